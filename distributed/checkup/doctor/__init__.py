"""Checks this machine by itself, for `multimac doctor`."""
