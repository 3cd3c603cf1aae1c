"""Speed, as ratios against plain baselines measured in the same run."""
