"""How does the same work run on more machines than this one? Ray, Slurm; another way of running the one pool."""
