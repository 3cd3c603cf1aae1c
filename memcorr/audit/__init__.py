"""Does a conditional policy listen to its condition? Any policy: ours, yours, somebody else's."""
