"""How a plan's gradients become updates: one class per way to split a model.

`data_parallel` has the base class, with a method for each instruction that follows the backward
pass. `sharded_parameters` (ZeRO, tensor parallelism) and `pipeline_parallel` override what differs.
"""
