"""Bytes that a training step holds at its peak, by category: from a graph, not from a formula.

What the graph's liveness says of forward and backward, and around it parameters, buffers, the
batch, the optimiser's state and its temporaries. Invariant: the peak is the largest of the
moments of the curve. The optimisers' temporaries are those of torch.optim, parameter by parameter
or, `foreach`, for all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.graph import ModelGraph
from headway.graph.ledger import Category, Moment, Peak
from headway.graph.liveness import play

Way = Literal["loop", "foreach", "fused"]


@dataclass(frozen=True)
class Optimiser:
    """What an optimiser keeps and needs, in parameters' sizes.

    Attributes:
        state: Tensors kept for every parameter.
        passing: Temporaries of one parameter, at most at once.
        left: Of those, how many are alive until the next parameter's are made.
        together: Temporaries with `foreach`, for all parameters at once.
        counters: Single numbers of 4 bytes kept for every parameter.
    """

    state: int = 0
    passing: int = 0
    left: int = 0
    together: int = 0
    counters: int = 0


OPTIMISERS: Mapping[str, Optimiser] = {
    "sgd": Optimiser(),
    "sgd, weight decay": Optimiser(passing=1, together=1),
    "momentum": Optimiser(state=1),
    "momentum, weight decay": Optimiser(state=1, passing=1, together=1),
    "adam": Optimiser(state=2, passing=2, left=1, together=1, counters=1),
    "adam, weight decay": Optimiser(state=2, passing=3, left=1, together=1, counters=1),
    "adamw": Optimiser(state=2, passing=2, left=1, together=1, counters=1),
}
"""Of torch.optim 2.11 to 2.14. Adam: sqrt of the second moment, and the denominator."""


def temporaries(optimiser: Optimiser, sizes: Sequence[int], way: Way) -> int:
    """Bytes at most while an update runs.

    Args:
        optimiser: Which.
        sizes: Of the parameters, in the optimiser's order.
        way: How torch carries it out: parameter by parameter (the default on CPUs), all at once
            (on GPUs), or in one kernel.
    """
    if way == "fused" or not sizes:
        return 0
    if way == "foreach":
        return optimiser.together * sum(sizes)
    before = (0, *sizes)
    return max(
        optimiser.left * b + optimiser.passing * s for b, s in zip(before, sizes, strict=False)
    )


def step_memory(
    graph: ModelGraph,
    optimiser: str | Optimiser = "adamw",
    *,
    way: Way = "loop",
    actions: Sequence[tuple[str, int]] = (("F", 0), ("B", 0)),
    units: tuple[int, int] | None = None,
    regions: Sequence[tuple[int, int]] = (),
) -> Peak:
    """Peak and curve of a step that is not the first one: gradients are None when it begins.

    Args:
        graph: Not folded, with its loss.
        optimiser: One of `OPTIMISERS`, or its numbers.
        way: As for `temporaries`.
        actions: Forwards and backwards, ("F", 0), ("B", 0), of micro-batches.
        units: As for `play`: a stage.
        regions: As for `play`: what is computed again.
    """
    rule = OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    start, stop = units or (0, len(graph.operators))
    operators = graph.operators[start:stop]
    used = {t for o in operators for t in o.inputs}
    parameters = {n: s.bytes for n, s in graph.parameters.items() if n in used or units is None}
    trained = [size for name, size in parameters.items() if name not in graph.frozen]
    always: dict[Category, int] = {
        "parameters": sum(parameters.values()),
        "buffers": sum(s.bytes for n, s in graph.buffers.items() if n in used or units is None),
        "batch": len({number for _, number in actions})
        * sum(s.bytes for s in graph.inputs.values()),
        "optimiser": rule.state * sum(trained) + 4 * rule.counters * len(trained),
    }
    inside = play(graph, units=units, actions=actions, regions=regions)
    curve = [_with(moment, always) for moment in inside.curve]
    update: dict[Category, int] = {
        "gradients": sum(trained),
        "temporaries": temporaries(rule, trained, way),
    }
    curve.append(_with(Moment("update", update), always))
    return Peak(max(curve, key=lambda moment: moment.total), tuple(curve))


def _with(moment: Moment, always: Mapping[Category, int]) -> Moment:
    return Moment(moment.at, {**{k: v for k, v in always.items() if v}, **moment.bytes})
