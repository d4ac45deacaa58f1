"""Peak memory of a training step: by Megatron's formulas, and from a captured graph.

Formulas, for transformers: weights, gradients and Adam's state by ZeRO stage, activations by
what is recomputed and how many micro-batches are in flight (Korthikanti et al. 2022, section 4;
Narayanan et al. 2021; Rajbhandari et al. 2020; embedding and logits as in Megatron-LM's own
estimator).

Graph, for any model: what its liveness says of forward and backward, plus parameters, buffers,
the batch, the optimiser's state and its temporaries. The temporaries are those of torch.optim:
parameter by parameter or, with `foreach`, for all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.cost.device import Array, Number
from headway.cost.transformer import HALF_PRECISION_BYTES, Transformer, TransformerSplit
from headway.graph.liveness import Category, MemoryMoment, MemoryPeak, simulate_liveness
from headway.graph.model_graph import ModelGraph

WEIGHTS, GRADIENTS, STATE = 2.0, 4.0, 12.0
"""Bytes per parameter: fp16 weights, fp32 gradients, fp32 copy and Adam's two moments: 18."""


@dataclass(frozen=True, kw_only=True)
class TransformerMemory:
    """Bytes on the fullest device.

    Attributes:
        activations: Of all micro-batches under way, and the layer that is being recomputed.
    """

    weights: Array
    gradients: Array
    state: Array
    activations: Array
    ends: Array

    @property
    def total(self) -> Array:
        return self.weights + self.gradients + self.state + self.activations + self.ends


def memory_of_transformer(model: Transformer, split: TransformerSplit) -> TransformerMemory:
    """Bytes of a step on the first stage, which holds most."""
    t, d, p = split.tensor, split.data, split.pipeline
    zero = np.asarray(split.zero)
    layers = np.ceil(model.layers / p)
    held = (layers * model.layer_parameters + model.vocabulary * model.hidden) / t
    kept, transient = _activations(model, split)
    alone = np.asarray(p) == 1
    # 1F1B keeps min(m, p) micro-batches on it, an interleaved one 1 + (p-1)/(p v) times its layers.
    flight = np.where(
        np.asarray(split.virtual) > 1,
        layers * p * (1.0 + (p - 1.0) / (p * split.virtual)),
        layers * np.minimum(split.microbatches, p),
    )
    tokens = model.sequence * split.microbatch
    # 8 s b + s b h for each micro-batch in flight, and without a pipeline 4 s b (h + V) / t for the
    # logits: Megatron-LM's estimator.
    embedding = (8.0 + model.hidden) * tokens * np.minimum(split.microbatches, p)
    logits = 4.0 * tokens * (model.hidden + model.vocabulary) / t
    return TransformerMemory(
        weights=WEIGHTS * held / np.where(zero >= 3, d, 1.0),
        gradients=GRADIENTS * held / np.where(zero >= 2, d, 1.0),
        state=STATE * held / np.where(zero >= 1, d, 1.0),
        activations=np.asarray(kept * flight + transient),
        ends=np.asarray(embedding + np.where(alone, logits, 0.0)),
    )


def _activations(model: Transformer, split: TransformerSplit) -> tuple[Number, Number]:
    """(kept per layer and micro-batch, of the one layer that is computed again).

    s b h (10 + 24/t + 5 a s/(h t)); with sequence parallelism all divided by t; "selective" without
    5 a s/(h t); "full" 2 s b h, and one layer whole.
    """
    t = split.tensor
    state = model.sequence * split.microbatch * model.hidden
    scores = 5.0 * model.heads * model.sequence / (model.hidden * t)
    whole = 10.0 / np.where(split.sequence_parallel, t, 1.0)
    rest = whole + (8.0 + 4.0 * model.ffn) / t
    how = np.asarray(split.recompute)
    kept = (
        np.select([how == "full", how == "selective"], [HALF_PRECISION_BYTES, rest], rest + scores)
        * state
    )
    transient = np.select([how == "full", how == "selective"], [rest + scores, scores], 0.0) * state
    return kept, transient


UpdateLoop = Literal["loop", "foreach", "fused"]


@dataclass(frozen=True)
class OptimiserMemory:
    """What an optimiser keeps and needs, in parameters' sizes.

    Attributes:
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


OPTIMISER_MEMORY: Mapping[str, OptimiserMemory] = {
    "sgd": OptimiserMemory(),
    "sgd, weight decay": OptimiserMemory(passing=1, together=1),
    "momentum": OptimiserMemory(state=1),
    "momentum, weight decay": OptimiserMemory(state=1, passing=1, together=1),
    "adam": OptimiserMemory(state=2, passing=2, left=1, together=1, counters=1),
    "adam, weight decay": OptimiserMemory(state=2, passing=3, left=1, together=1, counters=1),
    "adamw": OptimiserMemory(state=2, passing=2, left=1, together=1, counters=1),
}
"""Of torch.optim 2.11 to 2.14. Adam: sqrt of the second moment, and the denominator."""


def optimiser_temporaries(optimiser: OptimiserMemory, sizes: Sequence[int], way: UpdateLoop) -> int:
    """Bytes at most while an update runs.

    Args:
        sizes: Of the parameters, in the optimiser's order.
        way: How torch carries it out: parameter by parameter (the default on CPUs), all at once
            (on GPUs), or in one kernel.
    """
    if way == "fused" or not sizes:
        return 0
    if way == "foreach":
        return optimiser.together * sum(sizes)
    # While a parameter is updated, what is left of the one before it is still alive.
    before = (0, *sizes)
    return max(
        optimiser.left * b + optimiser.passing * s for b, s in zip(before, sizes, strict=False)
    )


def step_memory(
    graph: ModelGraph,
    optimiser: str | OptimiserMemory = "adamw",
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
    rule = OPTIMISER_MEMORY[optimiser] if isinstance(optimiser, str) else optimiser
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
    inside = simulate_liveness(graph, units=units, actions=actions, regions=regions)
    curve = [_with(moment, always) for moment in inside.curve]
    update: dict[Category, int] = {
        "gradients": sum(trained),
        "temporaries": optimiser_temporaries(rule, trained, way),
    }
    curve.append(_with(MemoryMoment("update", update), always))
    return MemoryPeak(max(curve, key=lambda moment: moment.total), tuple(curve))


def _with(moment: MemoryMoment, always: Mapping[Category, int]) -> MemoryMoment:
    return MemoryMoment(moment.at, {**{k: v for k, v in always.items() if v}, **moment.bytes})
