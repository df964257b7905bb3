"""Processes of one machine, or of a launched script, that are ranks: how they start, meet and end."""
