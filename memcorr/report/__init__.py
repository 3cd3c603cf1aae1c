"""Every table and figure from those rows, beside the paper's. Needs neither torch nor MuJoCo."""
