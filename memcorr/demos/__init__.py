"""Demonstrations: recording, storing, reading, and which of their frames is the reference."""
