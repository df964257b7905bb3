"""One rank: reads its RunSpec, trains, saves."""
