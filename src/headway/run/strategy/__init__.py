"""How a plan's gradients become updates: a strategy has a reducer and parameters.

Enters: what is trained and by which plan (`TrainingSetup`). Leaves: summed gradients, updated
parameters, and their state under logical names. Begin with `strategy.make_strategy`, which says
which of both a plan needs: a reducer (buckets, FSDP2, none) and `parameters` (whole, in parts, of
stages).
"""
