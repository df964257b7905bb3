"""From a manifest to batches."""
