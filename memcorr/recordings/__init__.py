"""Recordings of other people's robots: read, written, and looked at before anybody learns from them. No simulator."""
