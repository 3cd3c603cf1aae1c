"""Recordings of whose object nobody knows the truth: what a matcher alone makes of them."""
