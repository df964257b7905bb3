"""`multimac wizard`: questions that end in a config.ini and a run."""
