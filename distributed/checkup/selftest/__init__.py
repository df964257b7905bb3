"""`multimac selftest`: one command that proves, on its owner's machines, what could only be written from documents."""
