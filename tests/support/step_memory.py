"""Peak memory of a training step from a captured graph, beside which torch's tracker is held.

What its liveness says of forward and backward, plus parameters, buffers, the batch, the optimiser's
state and its temporaries. The temporaries are those of torch.optim: parameter by parameter or, with
`foreach`, for all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from headway.cost.memory import OPTIMISER_MEMORY
from headway.graph.liveness import Category, MemoryMoment, MemoryPeak, simulate_liveness
from headway.graph.model_graph import ModelGraph

UpdateLoop = Literal["loop", "foreach", "fused"]


class UpdateTemporaries(NamedTuple):
    """What an update needs for a moment, in sizes of one parameter.

    Attributes:
        passing: Temporaries of one parameter, at most at once.
        left: Of those, how many are alive until the next parameter's are made.
        counters: Single numbers of 4 bytes kept for every parameter.
    """

    passing: int = 0
    left: int = 0
    counters: int = 0


UPDATE_TEMPORARIES: Mapping[str, UpdateTemporaries] = {
    "sgd": UpdateTemporaries(),
    "sgd, weight decay": UpdateTemporaries(passing=1),
    "momentum": UpdateTemporaries(),
    "momentum, weight decay": UpdateTemporaries(passing=1),
    "adam": UpdateTemporaries(passing=2, left=1, counters=1),
    "adam, weight decay": UpdateTemporaries(passing=3, left=1, counters=1),
    "adamw": UpdateTemporaries(passing=2, left=1, counters=1),
}
"""Of torch.optim 2.11 to 2.14. Adam: sqrt of the second moment, and the denominator."""


def optimiser_temporaries(optimiser: str, sizes: Sequence[int], way: UpdateLoop) -> int:
    """Bytes at most while an update runs.

    Args:
        optimiser: A name of `OPTIMISER_MEMORY`.
        sizes: Of the parameters, in the optimiser's order.
        way: How torch carries it out: parameter by parameter (the default on CPUs), all at once
            (on GPUs), or in one kernel.
    """
    if way == "fused" or not sizes:
        return 0
    if way == "foreach":
        return OPTIMISER_MEMORY[optimiser].together * sum(sizes)
    rule = UPDATE_TEMPORARIES[optimiser]
    # While a parameter is updated, what is left of the one before it is still alive.
    before = (0, *sizes)
    return max(rule.left * b + rule.passing * s for b, s in zip(before, sizes, strict=False))


def step_memory(
    graph: ModelGraph,
    optimiser: str = "adamw",
    *,
    way: UpdateLoop = "loop",
    actions: Sequence[tuple[str, int]] = (("F", 0), ("B", 0)),
    units: tuple[int, int] | None = None,
    regions: Sequence[tuple[int, int]] = (),
) -> MemoryPeak:
    """Peak and curve of a step that is not the first one: gradients are None when it begins.

    Args:
        graph: Not folded, with its loss.
        actions: Forwards and backwards, ("F", 0), ("B", 0), of micro-batches.
        regions: As for `simulate_liveness`: what is computed again.
    """
    rule = OPTIMISER_MEMORY[optimiser]
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
        "optimiser": rule.state * sum(trained)
        + 4 * UPDATE_TEMPORARIES[optimiser].counters * len(trained),
    }
    inside = simulate_liveness(graph, units=units, actions=actions, regions=regions)
    curve = [_with(moment, always) for moment in inside.curve]
    update: dict[Category, int] = {
        "gradients": sum(trained),
        "temporaries": optimiser_temporaries(optimiser, trained, way),
    }
    curve.append(_with(MemoryMoment("update", update), always))
    return MemoryPeak(max(curve, key=lambda moment: moment.total), tuple(curve))


def _with(moment: MemoryMoment, always: Mapping[Category, int]) -> MemoryMoment:
    return MemoryMoment(moment.at, {**{k: v for k, v in always.items() if v}, **moment.bytes})


def operator_ranges_of(graph: ModelGraph, modules: Sequence[str]) -> list[tuple[int, int]]:
    """For each of some modules the range of operators in which it is called.

    Args:
        modules: Paths: "blocks.3".
    """
    found = []
    for module in modules:
        inside = [
            n for n, o in enumerate(graph.operators) if f"{o.module}.".startswith(f"{module}.")
        ]
        found.append((inside[0], inside[-1] + 1))
    return found
