"""Data sets of many layouts, read as rows of named cells."""
