"""The matcher that ships with the package: network, practice, training, weights."""
