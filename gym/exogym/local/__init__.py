"""Ranks that are processes of one machine, or of a launched script: how they start, meet and end."""
