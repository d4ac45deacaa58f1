"""Bytes that a transformer step needs on its fullest device, by Megatron's formulas.

Weights, gradients and Adam's state by ZeRO stage; activations by what is recomputed and how many
micro-batches are under way. Invariant: the total is the sum of the named parts. Sources:
Korthikanti et al. 2022, section 4 (activations), Narayanan et al. 2021 (pipelines), Rajbhandari et
al. 2020 (ZeRO); embedding and logits as in Megatron-LM's own estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.cost.device import Array, Number
from headway.cost.transformer import HALF, Split, Transformer

WEIGHTS, GRADIENTS, STATE = 2.0, 4.0, 12.0
"""Bytes per parameter: fp16 weights, fp32 gradients, fp32 copy and Adam's two moments: 18."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        weights: As computed with.
        gradients: In 32 bits.
        state: Of the optimiser.
        activations: Of all micro-batches under way, and the layer that is being recomputed.
        ends: Embedding and logits.
    """

    weights: Array
    gradients: Array
    state: Array
    activations: Array
    ends: Array

    @property
    def total(self) -> Array:
        return self.weights + self.gradients + self.state + self.activations + self.ends


def memory_of_transformer(model: Transformer, split: Split) -> Memory:
    """Bytes of a step on the first stage, which holds most.

    1F1B keeps min(m, p) micro-batches on it, an interleaved one 1 + (p-1)/(p v) times its layers.
    Per layer and micro-batch: s b h (10 + 24/t + 5 a s/(h t)); with sequence parallelism all
    divided by t; "selective" without 5 a s/(h t); "full" 2 s b h, and one layer whole.
    """
    t, d, p = split.tensor, split.data, split.pipeline
    zero = np.asarray(split.zero)
    layers = np.ceil(model.layers / p)
    held = (layers * model.layer_parameters + model.vocabulary * model.hidden) / t
    kept, transient = _activations(model, split)
    alone = np.asarray(p) == 1
    flight = np.where(
        np.asarray(split.virtual) > 1,
        layers * p * (1.0 + (p - 1.0) / (p * split.virtual)),
        layers * np.minimum(split.microbatches, p),
    )
    tokens = model.sequence * split.microbatch
    embedding = (8.0 + model.hidden) * tokens * np.minimum(split.microbatches, p)
    logits = 4.0 * tokens * (model.hidden + model.vocabulary) / t
    return Memory(
        weights=WEIGHTS * held / np.where(zero >= 3, d, 1.0),
        gradients=GRADIENTS * held / np.where(zero >= 2, d, 1.0),
        state=STATE * held / np.where(zero >= 1, d, 1.0),
        activations=np.asarray(kept * flight + transient),
        ends=np.asarray(embedding + np.where(alone, logits, 0.0)),
    )


def _activations(model: Transformer, split: Split) -> tuple[Number, Number]:
    """(kept per layer and micro-batch, of the one layer that is computed again)."""
    t = split.tensor
    state = model.sequence * split.microbatch * model.hidden
    scores = 5.0 * model.heads * model.sequence / (model.hidden * t)
    whole = 10.0 / np.where(split.sequence_parallel, t, 1.0)
    rest = whole + (8.0 + 4.0 * model.ffn) / t
    how = np.asarray(split.recompute)
    kept = np.select([how == "full", how == "selective"], [HALF, rest], rest + scores) * state
    transient = np.select([how == "full", how == "selective"], [rest + scores, scores], 0.0) * state
    return kept, transient
