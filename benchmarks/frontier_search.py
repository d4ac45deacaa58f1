"""How long the frontier search takes, and what it promises.

    OMP_NUM_THREADS=1 python benchmarks/frontier_search.py [seed]

Costs are made up: a choice splits an operator over some devices, which saves memory and costs time,
with noise of a factor of two, so that no two operators are alike unless they are meant to be;
another choice at the next operator costs a re-layout. Two objectives, bytes and seconds. "points"
is the size of the frontier, "factor" what the solution promises.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.planner.pareto.choice_graph import ChoiceGraph
from headway.planner.pareto.front import reduce_front
from headway.planner.pareto.solve import solve

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.front_algebra import block_of, chain, repeat

Costs = NDArray[np.float64]
OBJECTIVES = ("bytes", "seconds")


def of_node(random: np.random.Generator, choices: int) -> Costs:
    """Split k ways: 1/k of the memory, and k to the 0.6 times the time, and noise."""
    split = 2.0 ** (np.arange(choices) / 3)
    noise = random.uniform(0.5, 1.0, (choices, 2))
    return np.stack([100 / split, 10 * split**0.6], axis=1) * noise


def of_edge(random: np.random.Generator, choices: int) -> Costs:
    """Nothing where both ends split alike; else time, more the farther apart."""
    apart = np.abs(np.subtract.outer(np.arange(choices), np.arange(choices)))
    costs = random.uniform(0.5, 1.0, (choices, choices, 2)) * [2.0, 3.0]
    return costs * (apart[..., None] > 0) * (1 + apart[..., None] / choices)


def line(random: np.random.Generator, operators: int, choices: int) -> ChoiceGraph:
    names = [f"op{number:04d}" for number in range(operators)]
    nodes = {name: of_node(random, choices) for name in names}
    edges = {pair: of_edge(random, choices) for pair in itertools.pairwise(names)}
    return ChoiceGraph(OBJECTIVES, nodes, edges)


def residual(random: np.random.Generator, blocks: int, choices: int) -> ChoiceGraph:
    """Blocks of three operators with an edge past them, as in ResNet-50."""
    nodes = {"stem": of_node(random, choices)}
    edges = {}
    before = "stem"
    for block in range(blocks):
        names = [before, *(f"b{block:03d}.{part}" for part in ("1", "2", "3", "add"))]
        nodes |= {name: of_node(random, choices) for name in names[1:]}
        pairs = [*itertools.pairwise(names), (before, names[-1])]
        edges |= {pair: of_edge(random, choices) for pair in pairs}
        before = names[-1]
    return ChoiceGraph(OBJECTIVES, nodes, edges)


def masked(random: np.random.Generator, layers: int, choices: int) -> ChoiceGraph:
    """A residual chain in which one mask is read by every layer: the exact rules are stuck."""
    graph = residual(random, layers, choices)
    readers = [name for name in graph.nodes if name.endswith(".2")]
    edges = {("mask", name): of_edge(random, choices) for name in readers}
    nodes = {**graph.nodes, "mask": of_node(random, choices)}
    return ChoiceGraph(OBJECTIVES, nodes, {**graph.edges, **edges})


def show(name: str, make: Callable[[], ChoiceGraph], **options: float) -> None:
    graph = make()
    start = time.process_time()
    found = solve(graph, **options)  # type: ignore[arg-type]
    took = time.process_time() - start
    rules = {entry.rule: 0 for entry in found.log}
    for entry in found.log:
        rules[entry.rule] += 1
    counts = ", ".join(f"{rule} {number}" for rule, number in rules.items())
    given = ", ".join(f"{key} {value:g}" for key, value in options.items())
    print(
        f"{name:<34}{given:<14}{took:7.2f} s {len(found):5d} points "
        f"factor {found.factor:8.6f}  {counts}",
        flush=True,
    )


def show_power(random: np.random.Generator, choices: int, times: int, rows: int) -> None:
    """A block of six operators, many times in a row."""
    edges = [of_edge(random, choices)[:, :, None] for _ in range(6)]
    parts = [edge + of_node(random, choices)[None, :, None] for edge in edges]
    start = time.process_time()
    block = chain([block_of(part) for part in parts], rows)
    power = repeat(block, times, rows)
    took = time.process_time() - start
    points = len(reduce_front(power.costs.reshape(2, -1).T))
    name = f"{times} blocks of 6, {choices} choices"
    print(f"{name:<34}rows {rows:<9}{took:7.2f} s {points:5d} points factor {power.factor:8.6f}")


def main(seed: int = 0) -> None:
    def random() -> np.random.Generator:
        return np.random.default_rng(seed)

    print("processor seconds")
    show("chain of 144, 18 choices", lambda: line(random(), 144, 18), rows=64)
    show("chain of 576, 18 choices", lambda: line(random(), 576, 18), rows=64)
    show("chain of 6,000, 18 choices", lambda: line(random(), 6000, 18), rows=64)
    show("residual, 169 ops, 20 choices", lambda: residual(random(), 42, 20), rows=64)
    show(
        "residual, 169 ops, 20 choices", lambda: residual(random(), 42, 20), epsilon=0.01, rows=256
    )
    show("mask, 49 ops, 12 choices", lambda: masked(random(), 12, 12), rows=64)
    for choices in (4, 18):
        show_power(random(), choices, 1000, 16)
    show("chain of 144, 18 choices", lambda: line(random(), 144, 18), epsilon=0.01)
    show("chain of 40, 8 choices", lambda: line(random(), 40, 8))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
