"""Does a conditional policy listen to its condition? Any policy, also one that memcorr did not train."""
