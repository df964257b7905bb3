"""Which ranks train together: the coordinator decides, each rank has a client of it."""
