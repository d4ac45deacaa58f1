"""The search: from a request (model, cluster, batch, objective) to the Pareto front of plans.
`branch_and_bound` opens combinations of degrees by their lower bounds, `candidate` cuts and prices
one of them,
`plan_point` is a plan of the result, `plan_conversion` turns it into a `Plan` and back. The
`mixed_*` files do the same for devices of several types, and are to become one with them.
"""
