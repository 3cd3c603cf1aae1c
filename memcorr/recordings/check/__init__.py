"""What is wrong with a demonstration: one file per kind of evidence, one line per cause."""
