"""Generating text, WER, predictions, subtitles."""
