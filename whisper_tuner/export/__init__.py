"""The trained model for a runtime; a file for each, see formats.py."""
