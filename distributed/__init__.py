"""Joins whisper_tuner and exogym: the same job on one process, on N processes, on N machines."""
