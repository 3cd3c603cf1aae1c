"""From a frame and a reference to their relation: matches, rigid motion, phase. The one way there."""
