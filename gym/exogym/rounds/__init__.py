"""What ranks do together between their steps: end a round, validate, share the work, and tell of it."""
