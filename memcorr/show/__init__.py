"""Rollouts for people to look at: videos and a page."""
