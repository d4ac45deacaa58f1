"""A found plan for others: the simulator's step, a plan file's prediction, `--plan auto`."""
