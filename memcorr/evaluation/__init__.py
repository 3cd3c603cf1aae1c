"""Closed-loop rollouts under interventions, written down one row each."""
