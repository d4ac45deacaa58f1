"""What a candidate plan costs: seconds and bytes of operators, segments, stages and steps.

From the bottom: `operators` prices one operator on a tensor axis, `segments` every interval of the
model's units, `pipeline_time` a pipeline's table, `pricing` a step. `stage_cut` cuts the units into
stages. `degrees` says which tensor, data and pipeline degrees there are.
"""
