"""One module for each command: parse, one call, an exit status."""
