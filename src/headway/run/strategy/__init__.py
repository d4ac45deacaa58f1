"""How a plan's gradients become updates: a strategy has a reducer, parameters and an updater.

Enters: what is trained and by which plan (`TrainingSetup`). Leaves: summed gradients, updated
parameters, and their state under logical names. Begin with `strategy.make_strategy`, which says
which of the three a plan needs: a `reducer` (buckets, FSDP2, none), `parameters` (whole, in parts,
of stages) and an updater (once per step, stage by stage).
"""
