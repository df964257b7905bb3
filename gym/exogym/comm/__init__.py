"""Collectives: one file for each kind of group of ranks. comm.py says what all of them have."""
