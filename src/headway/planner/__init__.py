"""Finds plans: from a model's graph and a cluster to the Pareto front of parallelisation plans.

Rooms, from the bottom: `pareto` (the multi-objective solver), `estimate` (what a step of a
candidate costs), `search` (which candidates are opened), `traffic` (the collectives that a plan
issues), `explain` (why a plan costs what it costs, why nothing fits), `export` (a plan for the
simulator, `--plan auto`), `guidelines` (closed-form advice), `schedule_search` (pipeline tables
under a memory bound), `tables` (where embedding tables lie), `whale` (shares and stages on unequal
devices). Begin at `search.branch_and_bound`. Nothing here imports torch.
"""
