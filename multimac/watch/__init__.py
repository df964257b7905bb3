"""A live page of a run, in the browser of the machine that started it."""
