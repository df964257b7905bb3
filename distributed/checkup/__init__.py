"""Finds out if this machine, or these machines, are fit to train."""
