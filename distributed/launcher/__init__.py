"""One run: starts the workers, hears them, brings lost ones back, evaluates."""
