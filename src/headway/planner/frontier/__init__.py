"""The frontier engine: all strategies of a graph of choices that are not dominated."""

from headway.planner.frontier.chain import Block, block_of, chain, product, repeat
from headway.planner.frontier.front import Front, reduce
from headway.planner.frontier.problem import ChoiceGraph
from headway.planner.frontier.queries import Found, mini_parallelism, mini_time, profiling
from headway.planner.frontier.solve import Solution, solve

__all__ = [
    "Block",
    "ChoiceGraph",
    "Found",
    "Front",
    "Solution",
    "block_of",
    "chain",
    "mini_parallelism",
    "mini_time",
    "product",
    "profiling",
    "reduce",
    "repeat",
    "solve",
]
