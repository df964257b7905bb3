"""A file for each command: its signature with options and help, and what it does."""
