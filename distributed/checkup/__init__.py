"""Looks at all hosts before a run."""
