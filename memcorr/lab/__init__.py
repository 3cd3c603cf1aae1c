"""How does it behave while somebody interferes? An interactive page, `memcorr lab`."""
