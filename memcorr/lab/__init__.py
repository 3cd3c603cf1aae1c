"""How does a policy behave while a person interferes? An interactive page, `memcorr lab`."""
