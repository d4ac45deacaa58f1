"""The multi-objective solver: every strategy of a graph of choices that is not dominated.

A `choice_graph.ChoiceGraph` gives each node several choices, with additive cost vectors on nodes
and edges; `solve.solve` returns the Pareto front of its strategies, exact or within a proven
factor. Follows Cai et al. 2022 (TensorOpt), FT.
"""
