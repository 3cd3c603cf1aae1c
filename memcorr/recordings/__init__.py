"""Recordings of other people's robots: read, written, and checked before a policy learns from them. No simulator."""
