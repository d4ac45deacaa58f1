"""Running one rank's part of a pipeline schedule.

Begin with `executor.Pipeline`. `stage_execution` runs one stage, `p2p` carries values and
gradients between stages, `weight_stashing` and `recomputation` say which weights and
activations are kept, and `stage_profile` times the stages."""
