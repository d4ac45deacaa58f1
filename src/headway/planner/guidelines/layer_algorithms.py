"""Which algorithm each layer takes, and how large the minibatch is, under a bound on work space.

The choice is optimal: a row of the Pareto front of (work space, time). If every layer has its own
work space, they add up (Zou: sum_k sum_l x_kl M_kl <= M_bound). If layers share a pool, because
they run one after the other, the largest one counts: the pool is one more node of the graph of
choices, whose choices are its sizes.

Source: Zou et al. 2017, section on the minibatch and the integer programme of its algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headway.cost.device import Array
from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithms
from headway.planner.pareto.choice_graph import ChoiceGraph
from headway.planner.pareto.solve import Solution, mini_time, solve
from headway.units import format_bytes

Mode = Literal["sum", "max"]
OBJECTIVES = ("bytes", "seconds")
_POOL = "(pool)"


@dataclass(frozen=True, slots=True)
class AlgorithmSelection:
    """One algorithm for each layer."""

    algorithms: Mapping[str, str]
    seconds: float
    bytes: float


def frontier_of(layers: LayerAlgorithms, mode: Mode = "sum") -> tuple[ChoiceGraph, Solution]:
    """All choices of algorithms that nothing beats, as the frontier engine finds them.

    Args:
        mode: "sum": every layer has its work space; "max": all share one pool.

    Raises:
        PlanError: A layer has no algorithm, or a cost is not a number from 0 upwards.
    """
    graph = _own(layers) if mode == "sum" else _pooled(layers)
    return graph, solve(graph)


def choose_algorithms(graph: ChoiceGraph, solution: Solution, bound: float) -> AlgorithmSelection:
    """The fastest algorithms of a frontier within M_bound bytes of work space.

    Raises:
        PlanError: None is within the bound; says how far it is.
    """
    row = mini_time(OBJECTIVES, solution, cap={"bytes": bound})
    names = graph.named(solution.choices(row))
    names.pop(_POOL, None)
    num_bytes, seconds = solution.costs[row].tolist()
    return AlgorithmSelection(names, seconds, num_bytes)


def _own(layers: LayerAlgorithms) -> ChoiceGraph:
    return ChoiceGraph(
        OBJECTIVES,
        nodes={name: _costs((a.bytes, a.seconds) for a in some) for name, some in layers.items()},
        options={name: tuple(a.name for a in some) for name, some in layers.items()},
    )


def _pooled(layers: LayerAlgorithms) -> ChoiceGraph:
    """A pool of each size that some algorithm needs; an algorithm that needs more is forbidden."""
    # A pool between two of these sizes allows no more than the smaller one.
    sizes = sorted({a.bytes for some in layers.values() for a in some})
    edges = {
        (_POOL, name): np.array(
            [[[0.0, 0.0 if a.bytes <= size else math.inf] for a in some] for size in sizes]
        )
        for name, some in layers.items()
        if some
    }
    return ChoiceGraph(
        OBJECTIVES,
        # The bytes are the pool's alone: a layer's own would count them again.
        nodes={_POOL: _costs((size, 0.0) for size in sizes)}
        | {name: _costs((0.0, a.seconds) for a in some) for name, some in layers.items()},
        edges=edges,
        options={name: tuple(a.name for a in some) for name, some in layers.items()},
    )


def _costs(rows: Iterable[tuple[float, float]]) -> Array:
    return np.array(list(rows), dtype=np.float64).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class MinibatchTrial:
    """One minibatch.

    Attributes:
        bound: M_bound; negative where the model does not fit.
        chosen: None where no algorithms fit.
        epoch: Seconds: iteration * ceil(dataset / X_mini).
    """

    batch: int
    bound: float
    chosen: AlgorithmSelection | None = None
    iteration: float = math.inf
    epoch: float = math.inf


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The best minibatch, and all that were looked at."""

    best: MinibatchTrial
    trials: tuple[MinibatchTrial, ...] = field(repr=False)


def choose_minibatch(
    profile: Callable[[int], AlgorithmProfile],
    batches: Iterable[int],
    *,
    memory: float,
    samples: int,
    most: int | None = None,
    mode: Mode = "sum",
) -> Minibatch:
    """The minibatch with the shortest epoch, of equal epochs the smaller one.

    Args:
        profile: Measures one minibatch; called only while the one before it fitted.
        most: The largest minibatch with which training still reaches its accuracy.

    Raises:
        PlanError: No minibatch fits.
    """
    trials: list[MinibatchTrial] = []
    for batch in sorted(b for b in batches if most is None or b <= most):
        trials.append(_try(profile(batch), batch, memory, samples, mode))
        # A larger minibatch leaves even less.
        if trials[-1].bound < 0:
            break
    fitting = [trial for trial in trials if trial.chosen is not None]
    if not fitting:
        raise PlanError(
            "no minibatch fits",
            problems=[_why(trial) for trial in trials] or [f"none is at most {most}"],
            fix="offer smaller minibatches, or algorithms with less work space",
        )
    return Minibatch(min(fitting, key=lambda trial: (trial.epoch, trial.batch)), tuple(trials))


def _try(
    found: AlgorithmProfile, batch: int, memory: float, samples: int, mode: Mode
) -> MinibatchTrial:
    # M_bound = M_GPU - M_FM - M_MP - M_C: what is left for work spaces.
    bound = memory - found.features - found.parameters - found.classifier
    if bound < 0:
        return MinibatchTrial(batch, bound)
    graph, solution = frontier_of(found.layers, mode)
    if solution.costs[:, 0].min() > bound:
        return MinibatchTrial(batch, bound)
    chosen = choose_algorithms(graph, solution, bound)
    iteration = chosen.seconds + found.rest
    return MinibatchTrial(batch, bound, chosen, iteration, iteration * math.ceil(samples / batch))


def _why(trial: MinibatchTrial) -> str:
    if trial.bound < 0:
        return f"{trial.batch} samples: {format_bytes(-trial.bound)} too much without work space"
    return f"{trial.batch} samples: no algorithms within {format_bytes(trial.bound)}"
