"""How a plan's gradients become updates: a strategy has a reducer, parameters and an updater.

Enters: what is trained and by which plan (`TrainingSetup`). Leaves: summed gradients, updated
parameters, and their state under logical names. Begin with `select`, which says which of the three
a plan needs: `reducer` (buckets, FSDP2, none), `parameters` and `stage_parameters` (whole, in
parts, of stages) and `updater` (once per step, stage by stage).
"""
