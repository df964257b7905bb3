"""Answers what `multimac selftest` asks of a machine, in processes started there, one for each question."""
