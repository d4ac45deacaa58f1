"""The multi-objective solver: every strategy of a graph of choices that is not dominated.
A `ChoiceGraph` gives each node several choices, with additive cost vectors on nodes and edges;
`solve` returns the Pareto front of its strategies, exact or within a proven factor. Follows Cai et
al. 2022 (TensorOpt), FT.
"""

from headway.planner.pareto.choice_graph import ChoiceGraph
from headway.planner.pareto.front import (
    Front,
    FrontBlock,
    block_of,
    chain,
    product,
    reduce_front,
    repeat,
)
from headway.planner.pareto.queries import FrontierAnswer, mini_parallelism, mini_time, profiling
from headway.planner.pareto.solve import Solution, solve

__all__ = [
    "ChoiceGraph",
    "Front",
    "FrontBlock",
    "FrontierAnswer",
    "Solution",
    "block_of",
    "chain",
    "mini_parallelism",
    "mini_time",
    "product",
    "profiling",
    "reduce_front",
    "repeat",
    "solve",
]
