"""What is printed: tables, live views, comparisons, curves."""
