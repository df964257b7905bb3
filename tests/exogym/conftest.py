"""Puts this folder on the path: the tests in the folders below import toys and the simulator from here."""
