"""Time and memory of a GPT-like transformer's step under tensor, data and pipeline splits.

An oracle: nothing of it is taken from a graph or a table, and the planner's prices are held
against it.

Everything is a formula of numbers, so that thousands of plans are priced at once: each field may
be an array. Layers are priced from their kernels (matrix products, attention, streaming, launches)
and collectives; the step from Alpa's pipeline form. Nothing of data-parallel exchange is taken to
overlap with compute: with one stage, rank and micro-batch the step is the sum of its kernels.

Sources: Narayanan et al. 2021 (Megatron, SC'21), equations of section 3 and the appendix;
Korthikanti et al. 2022 (recomputation, sequence parallelism; section 4: activations); Zheng et al.
2022 (Alpa), equation 2; Rajbhandari et al. 2020 (ZeRO); embedding and logits in memory as in
Megatron-LM's own estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.cost.device import Array, Number
from headway.cost.machines import Machine
from headway.cost.memory import GRADIENTS, HALF_PRECISION_BYTES, WEIGHTS

FORWARD_KERNELS, BACKWARD_KERNELS = 20.0, 36.0
"""Of a layer with fused bias, dropout and softmax, as Megatron issues it."""
# More in each pass where the fused softmax cannot be used: scale, mask, convert, and back.
UNFUSED_KERNELS = 10.0
# Megatron's fused softmax kernel takes (batch * heads of a rank) in multiples of this only.
FUSED_ROWS = 4
# Bytes per parameter that ZeRO copies: gradients into buckets and out, weights too.
COPIED = 16.0
HEAD_KERNELS, EMBEDDING_KERNELS = 30.0, 12.0
"""Of the logits with their loss, and of the embedding; forward and backward together."""


@dataclass(frozen=True, kw_only=True)
class FormulaMachine(Machine):
    """A machine with what only this formula knows of it, fitted with the rest.

    Attributes:
        skew: Seconds that the host waits in a collective for the other ranks, per doubling of them.
        whole_head: Share of the usual matmul rate at which logits run that no tensor axis splits.
    """

    skew: float = 30e-6
    whole_head: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A model of L equal layers of width h, s tokens and V words; each field is a number or an
    array.

    Attributes:
        ffn: Width of the feed-forward layer as a multiple of h.
    """

    layers: Number
    hidden: Number
    heads: Number
    sequence: Number
    vocabulary: Number = 51200.0
    ffn: Number = 4.0

    @property
    def layer_parameters(self) -> Number:
        """Weights of the matrices of one layer: (4 + 2 ffn) h^2, 12 h^2 for ffn = 4."""
        return (4.0 + 2.0 * self.ffn) * self.hidden * self.hidden

    @property
    def parameters(self) -> Number:
        """Weights of the matrices: 12 L h^2 + V h, logits tied to the embedding."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def flops(self, batch: Number, *, recompute: bool = True) -> Number:
        """FLOP of a step: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with recomputation, for ffn = 4.

        Megatron (Narayanan et al. 2021), section 5.1, equation 3; without recomputation 72 and 12.
        """
        tokens = batch * self.sequence
        layer = 2.0 * self.layer_parameters * tokens
        layer = layer + 4.0 * tokens * self.sequence * self.hidden
        passes = 4.0 if recompute else 3.0
        return passes * self.layers * layer + 6.0 * tokens * self.hidden * self.vocabulary


@dataclass(frozen=True, kw_only=True)
class TransformerSplit:
    """How a step is split: t, d, p, and m micro-batches of b samples of a replica; each field is a
    number or an array.

    Attributes:
        virtual: v, chunks of layers on a stage (interleaved 1F1B); 1: plain 1F1B.
        recompute: "full", "selective" (attention alone) or "none"; one, or an array of them.
        sequence_parallel: What the tensor axis leaves whole is split along the sequence.
        zero: Stage of ZeRO over the data axis, 0 to 3.
    """

    tensor: Number = 1.0
    data: Number = 1.0
    pipeline: Number = 1.0
    microbatch: Number = 1.0
    microbatches: Number = 1.0
    virtual: Number = 1.0
    recompute: str | np.ndarray = "full"
    sequence_parallel: bool | np.ndarray = False
    zero: Number = 0.0

    @property
    def devices(self) -> Number:
        return self.tensor * self.data * self.pipeline

    @property
    def batch(self) -> Number:
        """Samples of a step."""
        return self.data * self.microbatch * self.microbatches


@dataclass(frozen=True, kw_only=True)
class TransformerStepTime:
    """Seconds of a step and of its parts.

    Attributes:
        backward: Of one layer and micro-batch, with what it recomputes.
        collectives: Of one layer and micro-batch, in both.
        head: Logits and loss of one micro-batch, on the last stage.
        embedding: Of one micro-batch, on the first stage.
        bubble: What the pipeline adds to m times its slowest stage, without messages.
        messages: Between stages, as far as nothing hides them.
        exchange: Of gradients over the data axis, and of tied weights between stages.
    """

    seconds: Array
    forward: Array
    backward: Array
    collectives: Array
    head: Array
    embedding: Array
    bubble: Array
    messages: Array
    exchange: Array
    update: Array


def price_transformer(
    model: Transformer,
    split: TransformerSplit,
    machine: FormulaMachine,
    *,
    layer_factor: Number = 1.0,
    head_factor: Number = 1.0,
) -> TransformerStepTime:
    """Price a step.

    Args:
        layer_factor: By which the time of a layer was measured to differ from the formula.
        head_factor: The same for logits, loss and embedding.
    """
    forward, backward, collectives = layer_seconds(model, split, machine)
    forward, backward = forward * layer_factor, backward * layer_factor
    head, embedding = (seconds * head_factor for seconds in _ends(model, split, machine))
    stage = np.ceil(model.layers / split.pipeline) * (forward + backward)
    # One stage has both ends of the model; else the slowest has the longer of them.
    first = np.where(np.asarray(split.pipeline) > 1, embedding, 0.0)
    slowest = stage + np.maximum(head + embedding - first, first)
    whole = model.layers * (forward + backward) + head + embedding
    state = HALF_PRECISION_BYTES * split.microbatch * model.sequence * model.hidden
    compute, messages = pipeline_seconds(
        slowest,
        whole,
        split.microbatches,
        split.virtual,
        stages=split.pipeline,
        message=machine.network.send(state, split.tensor * split.data),
    )
    exchange, update = _exchange(model, split, machine)
    seconds = compute + messages + exchange + update
    return TransformerStepTime(
        seconds=np.asarray(seconds),
        forward=np.asarray(forward),
        backward=np.asarray(backward),
        collectives=np.asarray(collectives),
        head=np.asarray(head),
        embedding=np.asarray(embedding),
        bubble=np.asarray(compute - split.microbatches * slowest),
        messages=np.asarray(messages),
        exchange=np.asarray(exchange),
        update=np.asarray(update),
    )


def pipeline_seconds(
    slowest: Number,
    whole: Number,
    microbatches: Number,
    virtual: Number = 1.0,
    *,
    stages: Number = 1.0,
    message: Number = 0.0,
) -> tuple[Number, Number]:
    """(compute, messages) of a step: m t_max + (sum of t - t_max) / v, Alpa's equation 2 for v = 1.

    Both are what `schedule.timing` simulates for m >= p.

    Args:
        slowest: t_max of the p stages, for one micro-batch, forward and backward.
        whole: Sum of t.
        message: c, seconds; nobody waits for it while sending.
    """
    p = np.asarray(stages, dtype=float)
    compute = microbatches * slowest + (whole - slowest) / virtual
    # Filling and draining show 2 (p v - 1) messages. Plain 1F1B has p micro-batches in flight,
    # which must go round in (sum of t + 2 (p-1) c) / p each; what that is beyond t_max shows in
    # every one after the first p / (p-1). An interleaved table has chunks to spare.
    filling = 2.0 * (p * virtual - 1.0) * message
    late = np.maximum((whole + 2.0 * (p - 1.0) * message) / p - slowest, 0.0)
    late = late * np.maximum(microbatches - p / np.maximum(p - 1.0, 1.0), 0.0)
    return compute, np.where(p > 1, filling + np.where(np.asarray(virtual) > 1, 0.0, late), 0.0)


def layer_seconds(
    model: Transformer, split: TransformerSplit, machine: FormulaMachine
) -> tuple[Number, Number, Number]:
    """(forward, backward with recomputation, collectives in both) of one layer and micro-batch."""
    device, t = machine.device, split.tensor
    tokens, h = split.microbatch * model.sequence, model.hidden
    products = _products(model, split, machine)
    forward, scores = products[0], _attention(model, split, machine)
    whole = np.where(split.sequence_parallel, t, 1.0)
    wide = (4.0 + 4.0 * model.ffn + 12.0) / t  # activations of the FFN, and the copies of q, k, v
    state = tokens * h / device.memory_rate  # one byte of each number of the residual stream
    unfused = (split.microbatch * model.heads / t) % FUSED_ROWS != 0
    more = np.where(unfused, UNFUSED_KERNELS, 0.0)
    one = forward + scores[0] + state * (22.0 / whole + wide)
    two = products[1] + scores[1] + state * (30.0 / whole + 1.5 * wide)
    two = two + 6.0 * model.layer_parameters / t / device.memory_rate  # gradients are added up
    one = one + device.seconds_of_kernels(FORWARD_KERNELS + more)
    two = two + device.seconds_of_kernels(BACKWARD_KERNELS + more)
    # One all-reduce behind attention and one behind the FFN in each pass (Megatron).
    summed = 2.0 * _over_tensor(model, split, machine)
    waiting = 2.0 * machine.skew * np.log2(t)
    host_one = device.seconds_of_host(FORWARD_KERNELS + more) + waiting
    host_two = device.seconds_of_host(BACKWARD_KERNELS + more) + waiting
    again = np.where(np.asarray(split.recompute) == "full", 1.0, 0.0)
    partly = np.where(np.asarray(split.recompute) == "selective", scores[0], 0.0)
    backward = device.join(
        host_two + again * host_one, two + summed + partly + again * (one + summed)
    )
    return device.join(host_one, one + summed), backward, (2.0 + again) * summed


def _products(
    model: Transformer, split: TransformerSplit, machine: FormulaMachine
) -> tuple[Number, Number]:
    tokens, h, t = split.microbatch * model.sequence, model.hidden, split.tensor
    shapes = (
        (h, 3.0 * h / t),
        (h / t, h),
        (h, model.ffn * h / t),
        (model.ffn * h / t, h),
    )

    def matmul(m: Number, n: Number, k: Number) -> Number:
        return machine.device.seconds_of_matmul(m, n, k, dtype=machine.dtype)

    forward = sum(matmul(tokens, n, k) for k, n in shapes)
    # Gradients of inputs and of weights.
    backward = sum(matmul(tokens, k, n) + matmul(k, n, tokens) for k, n in shapes)
    return forward, backward


def _attention(
    model: Transformer, split: TransformerSplit, machine: FormulaMachine
) -> tuple[Number, Number]:
    """Scores, softmax with its dropout, and the weighted sum; forward and backward."""
    device, rate = machine.device, machine.device.rate(machine.dtype)
    rows = split.microbatch * model.heads / split.tensor
    scores = rows * model.sequence * model.sequence
    work = 4.0 * scores * (model.hidden / model.heads) / rate
    # The scores (b a/t s^2 numbers of 2 bytes) go through memory: products write and read them (4
    # bytes forward, 8 backward), softmax and dropout with its mask too (4 + 5 and 6 + 5); an
    # unfused softmax scales, masks and converts to 32 bits and back besides (16).
    more = np.where(rows % FUSED_ROWS != 0, 16.0, 0.0)
    forward = np.maximum(work, 4.0 * scores / device.memory_rate)
    backward = np.maximum(2.0 * work, 8.0 * scores / device.memory_rate)
    streamed = scores / device.memory_rate
    return forward + (9.0 + more) * streamed, backward + (11.0 + more) * streamed


def _over_tensor(model: Transformer, split: TransformerSplit, machine: FormulaMachine) -> Number:
    size = HALF_PRECISION_BYTES * split.microbatch * model.sequence * model.hidden
    return machine.network.all_reduce(size, split.tensor)


def _ends(
    model: Transformer, split: TransformerSplit, machine: FormulaMachine
) -> tuple[Number, Number]:
    """Logits with their loss, and embedding, of one micro-batch, forward and backward."""
    device, t = machine.device, split.tensor
    tokens, h = split.microbatch * model.sequence, model.hidden
    part = model.vocabulary / t
    products = device.seconds_of_matmul(tokens, part, h, dtype=machine.dtype)
    products = products + device.seconds_of_matmul(tokens, h, part, dtype=machine.dtype)
    products = products + device.seconds_of_matmul(part, h, tokens, dtype=machine.dtype)
    products = products / np.where(np.asarray(t) > 1, 1.0, machine.whole_head)
    summed = _over_tensor(model, split, machine)
    # The loss of split logits sums three numbers per token (Megatron-LM).
    small = 3.0 * machine.network.all_reduce(4.0 * tokens, t)
    # The logits in 16 and 32 bits pass through memory about eight times (30 bytes); in front of and
    # behind them lie a normalisation, copies and the embedding's scatter.
    head = products + device.seconds_of_elementwise(tokens * (30.0 * part + 40.0 * h))
    embedding = device.seconds_of_elementwise(40.0 * tokens * h) + summed
    waiting = machine.skew * np.log2(t)
    return (
        device.join(device.seconds_of_host(HEAD_KERNELS) + 4.0 * waiting, head + summed + small),
        device.join(device.seconds_of_host(EMBEDDING_KERNELS) + waiting, embedding),
    )


def _exchange(
    model: Transformer, split: TransformerSplit, machine: FormulaMachine
) -> tuple[Number, Number]:
    """Over the data axis, and the optimiser's update, both on the fullest stage."""
    t, d, p = split.tensor, split.data, split.pipeline
    network, m, zero = machine.network, split.microbatches, np.asarray(split.zero)
    head = model.vocabulary * model.hidden / t
    held = np.ceil(model.layers / p) * model.layer_parameters / t + head
    summed = network.all_reduce(HALF_PRECISION_BYTES * held, d, t)
    gathered = network.all_gather(HALF_PRECISION_BYTES * held, d, t)
    scattered = network.reduce_scatter(HALF_PRECISION_BYTES * held, d, t)
    # ZeRO 0 sums all gradients once; 1 and 2 scatter them and gather the new weights (2 scatters in
    # every micro-batch); 3 also gathers the weights in the passes of every micro-batch.
    exchange = np.select(
        [zero == 0, zero == 1, zero == 2],
        [summed, scattered + gathered, m * scattered + gathered],
        m * (scattered + 2.0 * gathered),
    )
    sharded = (zero > 0) & (np.asarray(d) > 1)
    # With ZeRO what is sent is copied into buckets and out.
    copied = machine.device.seconds_of_elementwise(np.where(sharded, COPIED * held, 0.0))
    # Both ends of a pipeline that fits into a node sum the tied weights there: half of its ranks is
    # the stride of that pair.
    tied = network.all_reduce(
        HALF_PRECISION_BYTES * head, np.where(np.asarray(p) > 1, 2.0, 1.0), t * d * p / 2.0
    )
    update = machine.device.update * held / np.where(zero > 0, d, 1.0)
    return exchange + copied + tied, update


STATE = 12.0
"""Bytes per parameter beside 16-bit weights: their 32-bit copy and Adam's two moments."""


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
