"""Where the points of a reference frame are in the live one: matchers, lifting into 3D, the cache."""
