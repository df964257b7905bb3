"""Checkpoints of Whisper: loading, preparing, memory."""
