"""A run as one HTML file, `report.html`: it needs no network, no script and no other file."""
