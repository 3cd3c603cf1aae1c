"""From frames and references to actions: relations, condition, diffusion, networks, plans. No simulator."""
