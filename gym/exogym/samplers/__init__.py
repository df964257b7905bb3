"""Where a rank's batches come from, and which rank trains which samples."""
