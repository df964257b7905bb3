"""Proves on its owner's machines what could only be written from documents, for `multimac selftest`."""
