"""What `multimac selftest` asks of a machine: processes started there, one for each question."""
