"""A run's folder: its log, what it tells, finding and cleaning."""
