"""The wizard: questions instead of flags, then the same configuration and the same calls as the command line."""
