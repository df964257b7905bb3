"""The Whisper domain on one machine: audio, features, batches, evaluation, export. Knows no SSH and no collectives."""
