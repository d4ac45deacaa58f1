"""The search: from a request (model, devices, batch, objective) to the Pareto front of plans.

`branch_and_bound` opens combinations of degrees by their lower bounds (`bounds`), `candidate` cuts
and prices one, on devices of one type or laid out over several (`device_layout`). `plan_point` is a
plan of the result, `plan_conversion` turns it into a `Plan` and back.
"""
