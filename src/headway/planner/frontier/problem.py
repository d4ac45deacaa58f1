"""What is searched: a graph whose nodes each take one of several choices, with additive costs.

Invariant: a strategy gives one choice to every node; its cost is the sum of its nodes' and edges'
costs, objective by objective; costs are not negative, infinity forbids a choice or a pair. Source:
Cai et al. 2022 (TensorOpt), cost of a strategy; Jia et al. 2018 (OptCNN), eq. 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from headway.errors import PlanError
from headway.planner.frontier.rows import Floats


@dataclass(frozen=True)
class ChoiceGraph:
    """Choices of nodes, and what they cost.

    Attributes:
        objectives: Names of the d objectives, such as ("bytes", "seconds").
        nodes: Costs of the choices of a node, (C_v, d).
        edges: Costs of the pairs of choices of two nodes, (C_u, C_v, d).
        options: Names of the choices of a node, where they have names.
        forced: Choice that a node must take, where the user has said so.

    Raises:
        PlanError: Shapes or values that make no sense, all of them together.
    """

    objectives: tuple[str, ...]
    nodes: Mapping[str, Floats]
    edges: Mapping[tuple[str, str], Floats] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forced: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = tuple(_problems(self))
        if problems:
            raise PlanError(
                "the graph of choices cannot be searched",
                problems=problems,
                fix="mend the costs of these nodes and edges",
            )

    def choices_of(self, node: str) -> int:
        """C_v."""
        return len(self.nodes[node])

    def evaluate(self, choices: Mapping[str, int]) -> Floats:
        """Cost (d,) of a strategy that names the choice of every node."""
        total = np.zeros(len(self.objectives))
        for name, costs in self.nodes.items():
            total += costs[choices[name]]
        for (source, target), costs in self.edges.items():
            total += costs[choices[source], choices[target]]
        return total

    def named(self, choices: Mapping[str, int]) -> dict[str, str]:
        """A strategy by the names of its choices; the number where a choice has no name."""
        return {
            node: self.options[node][choice] if node in self.options else str(choice)
            for node, choice in choices.items()
        }


def _problems(graph: ChoiceGraph) -> Iterator[str]:
    width = len(graph.objectives)
    if not width:
        yield "there is no objective"
    if len(set(graph.objectives)) < width:
        yield f"objectives must have different names: {', '.join(graph.objectives)}"
    if not graph.nodes:
        yield "there is no node"
    for name, costs in graph.nodes.items():
        if costs.ndim != 2 or costs.shape[1] != width or len(costs) == 0:
            yield f"node {name}: costs are {costs.shape}, must be (choices, {width})"
        else:
            yield from _values(f"node {name}", costs)
    for (source, target), costs in graph.edges.items():
        yield from _problems_of_edge(graph, source, target, costs)
    yield from _problems_of_choices(graph)


def _problems_of_edge(graph: ChoiceGraph, source: str, target: str, costs: Floats) -> Iterator[str]:
    label = f"edge {source} -> {target}"
    unknown = [name for name in (source, target) if name not in graph.nodes]
    if unknown:
        yield f"{label}: no node {', '.join(unknown)}"
        return
    if source == target:
        yield f"{label}: joins a node to itself; add its costs to those of the node"
        return
    expected = (len(graph.nodes[source]), len(graph.nodes[target]), len(graph.objectives))
    if costs.shape != expected:
        yield f"{label}: costs are {costs.shape}, must be {expected}"
    else:
        yield from _values(label, costs)


def _values(label: str, costs: Floats) -> Iterator[str]:
    if np.isnan(costs).any():
        yield f"{label}: a cost is not a number"
    elif (costs < 0).any():
        yield f"{label}: a cost is negative ({costs.min():g})"


def _problems_of_choices(graph: ChoiceGraph) -> Iterator[str]:
    for name, options in graph.options.items():
        number = len(graph.nodes.get(name, ()))
        if number != len(options):
            yield f"node {name}: {len(options)} names for {number} choices"
    for name, choice in graph.forced.items():
        number = len(graph.nodes.get(name, ()))
        if not 0 <= choice < number:
            yield f"node {name}: choice {choice} is forced, there are {number}"
