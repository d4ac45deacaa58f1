"""Closed forms of how layers are split: compute, communication, memory, and what overlap hides.

Das et al. 2016 compare data, model and hybrid parallelism layer by layer. Volumes are bytes that
one node moves in an iteration. G groups of N / G nodes: the model is split inside a group, the data
across groups; G = 1 is model parallelism, G = N data parallelism. `layers_of` reads the
convolutions and linear layers of a captured model.

`windows` says which part of the exchange cannot be hidden: the network carries one layer's
gradients at a time, the last layer's first. With s_k the seconds of layer k and ready_k the moment
of its weight gradient

    end_k = max over j >= k of (ready_j + s_k + ... + s_j)
    exposed = max(0, max over k of (end_k - need_k))

which is the recurrence start_k = max(ready_k, end_{k+1}) of the paper's analysis of overlap,
solved.

ParaDL's table is of a whole convolutional network on p devices, in one of the ways of `ROWS` or a
hybrid. Its times are of an epoch: D / B iterations of B samples. Symbols as in the paper: |x_l|,
|y_l|, |w_l|, |b_l| elements of a layer's input and output per sample, weights and biases; FW, BW
seconds per sample, WU per iteration; alpha + bytes beta a message; delta bytes of an element; gamma
the share of memory that is in use at the same time. Invariant: on one device every row is the
serial run, without communication.

Sources: Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent",
the sections on data, model and hybrid parallelism; Kahira et al. 2021, "An Oracle for Guiding
Large-Scale Model/Hybrid Parallel Training of Convolutional Neural Networks" (ParaDL).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.collective.model.link_fit import LinkFit
from headway.cost.device import Array
from headway.graph.model_graph import ModelGraph, Operator, TensorSpec
from headway.planner.estimate.gradient_exchange import serial_ends
from headway.plans.tensor_layout import divisors

# A quotient this close above a whole number is that number.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class DasLayer:
    """A convolution with kernel kw x kh, output ow x oh, input iw x ih; a fully connected layer has
    1 x 1.

    Attributes:
        first: Nobody needs the gradient of its input.
        element: Bytes of an activation, weight or gradient (size_data).
    """

    ifm: int
    ofm: int
    kernel: tuple[int, int] = (1, 1)
    output: tuple[int, int] = (1, 1)
    input: tuple[int, int] = (1, 1)
    first: bool = False
    element: int = 4
    name: str = ""

    @property
    def weights(self) -> int:
        """ifm ofm kw kh."""
        return self.ifm * self.ofm * math.prod(self.kernel)


def computation(layer: DasLayer, samples: float) -> float:
    """FLOP per node: 3 * 2 * MB_node ifm ofm kw kh ow oh; of the first layer 2 / 3 of it."""
    passes = 2 if layer.first else 3
    return passes * 2 * samples * layer.weights * math.prod(layer.output)


def communication(layer: DasLayer, overlap: float = 1.0) -> float:
    """Bytes per node: size ifm ofm kw kh (2 - overlap).

    Args:
        overlap: Share of sending the gradient that overlaps receiving the weights, 0 to 1.
    """
    return layer.element * layer.weights * (2 - overlap)


def ratio_of(layers: Iterable[DasLayer], samples: float = 1.0, overlap: float = 1.0) -> float:
    """FLOP per byte of a network; of a layer 1.5 ow oh MB_node for fp32 and full overlap, whatever
    kernel and features."""
    both = [(computation(one, samples), communication(one, overlap)) for one in layers]
    return sum(flop for flop, _ in both) / sum(moved for _, moved in both)


def least_samples(balance: float, ratio_per_sample: float) -> int:
    """Samples per node at which data parallelism scales: ceil(balance / ratio), at least 1.

    Args:
        balance: FLOP/s of a node over bytes/s of its network.
        ratio_per_sample: FLOP per byte of a layer or network with one sample per node.
    """
    return max(1, math.ceil(balance / ratio_per_sample * (1 - _ROUNDING)))


def most_nodes(batch: int, balance: float, ratio_per_sample: float) -> int:
    """How many nodes a minibatch suffices for; 0 if not even for one."""
    return batch // least_samples(balance, ratio_per_sample)


def hybrid_volume(
    layer: DasLayer, batch: float, nodes: int, groups: int, overlap: float = 0.0
) -> float:
    """Bytes per node with G groups of N nodes and a batch of MB.

    comms_model = 2 size ifm iw ih MB / G, nothing where a group is one node;
    comms_data = size ofm ifm kw kh (2 - overlap) G / N, nothing where there is one group.

    Raises:
        ValueError: G does not divide N.
    """
    if groups < 1 or nodes % groups:
        raise ValueError(f"{groups} groups of {nodes} nodes are not alike")
    activations = 2 * layer.element * layer.ifm * math.prod(layer.input) * batch / groups
    gradients = communication(layer, overlap) * groups / nodes
    return (activations if groups < nodes else 0.0) + (gradients if groups > 1 else 0.0)


def ideal_groups(layer: DasLayer, batch: float, nodes: int, overlap: float = 0.0) -> float:
    """G* at which both volumes are equal; sqrt(N MB / ofm) of a fully connected layer without
    overlap."""
    inner = 2 * math.prod(layer.input) * batch * nodes
    return math.sqrt(inner / (layer.ofm * math.prod(layer.kernel) * (2 - overlap)))


def best_groups(layer: DasLayer, batch: float, nodes: int, overlap: float = 0.0) -> int:
    """The divisor of N with the least volume; of equal ones that nearer to G*."""
    ideal = ideal_groups(layer, batch, nodes, overlap)
    all_ = divisors(nodes)
    # It is a neighbour of G*. Between the pure ends volumes fall until G* and rise after it; and a
    # pure end that is no neighbour cannot win: for 2 <= g <= G* the volume of g is at most 2 / g
    # times that of G = 1, for G* <= g <= N / 2 at most 2 g / N times that of G = N.
    below = max((g for g in all_ if g <= ideal), default=1)
    above = min((g for g in all_ if g >= ideal), default=nodes)
    return min(
        (below, above),
        key=lambda g: (hybrid_volume(layer, batch, nodes, g, overlap), abs(math.log(g / ideal))),
    )


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A product with weights, split over t devices inside of d groups.

    Attributes:
        inputs: Elements per sample that enter.
        outputs: Elements per sample that leave.
    """

    inputs: float
    outputs: float
    weights: float
    element: int = 4


def tensor_seconds(
    matmul: Matmul,
    batch: float,
    devices: int,
    degree: int,
    *,
    rate: Callable[[int, int], float],
) -> float:
    """Exchange per iteration on N = t d devices: 2 s (in + out) MB / d inside, 2 s W / t (d - 1) /
    d across.

    Args:
        rate: Bytes/s of a group by size and stride, as `HierarchicalNetwork.rate_of`: the slower of
            the levels that it spans.
    """
    groups = devices // degree
    inside = 2 * matmul.element * (matmul.inputs + matmul.outputs) * batch / groups
    across = 2 * matmul.element * matmul.weights / degree * (groups - 1) / groups
    return (inside / rate(degree, 1) if degree > 1 else 0.0) + (
        across / rate(groups, degree) if groups > 1 else 0.0
    )


def best_degree(
    matmul: Matmul, batch: float, devices: int, *, rate: Callable[[int, int], float]
) -> int:
    """The tensor degree t with the least exchange; of equal ones the smallest."""
    return min(
        divisors(devices), key=lambda t: (tensor_seconds(matmul, batch, devices, t, rate=rate), t)
    )


def layers_of(graph: ModelGraph) -> tuple[DasLayer, ...]:
    """Convolutions and linear layers with weights, in the order of execution.

    The positions of a sequence count as its output map. A convolution in groups is left out: its
    volumes follow other formulas.
    """
    # Samples are the first dimension of the graph's first input.
    samples = next((spec.shape[0] for spec in graph.inputs.values() if spec.shape), 1)
    found = (_layer(operator, samples, *graph.specs(operator)) for operator in graph.operators)
    return tuple(layer for layer in found if layer is not None)


def _layer(
    operator: Operator,
    samples: int,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> DasLayer | None:
    by_role = dict(zip(operator.roles, zip(operator.inputs, inputs, strict=True), strict=True))
    if "weight" not in by_role or by_role["weight"][0] not in operator.parameters:
        return None
    weight, result = by_role["weight"][1], outputs[0]
    # What was folded into an operator in front of it has given its input another role.
    others = (spec for role, (_, spec) in by_role.items() if role not in ("weight", "bias"))
    source = next(others, weight)
    # By the FLOPs, since what was folded into an operator may have another shape than its product.
    positions = operator.flops.forward // (2 * math.prod(weight.shape) * max(1, samples))
    kernel, output, arrived = (1, 1), (positions, 1), (positions, 1)
    match operator.kind:
        case "linear":
            pass
        case "conv2d" if weight.shape[1] == source.shape[1]:
            kernel = (weight.shape[2], weight.shape[3])
            arrived = (source.shape[2], source.shape[3])
            if math.prod(result.shape[2:]) == positions and len(result.shape) == 4:
                output = (result.shape[2], result.shape[3])
        case _:
            return None
    return DasLayer(
        ifm=weight.shape[1],
        ofm=weight.shape[0],
        kernel=kernel,
        output=output,
        input=arrived,
        first=not operator.flops.input_gradient,
        element=weight.itemsize,
        name=operator.name,
    )


Need = Literal["forward", "update"]
"""When a layer's sum must be there: before its next forward, or at the end of backward, because
the optimiser steps all parameters at once."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Of one layer on one node.

    Attributes:
        input_grad: Seconds; 0 of the first layer.
        num_bytes: Of its gradients as the link sees them; 0: nothing is sent.
    """

    forward: float
    weight_grad: float
    input_grad: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ExchangeWindows:
    """Tuples have one entry per layer; seconds after the start of the forward pass.

    Attributes:
        need: Its sum is asked for, had nothing waited before.
        exposed: Seconds for which the node stands still because of it.
    """

    ready: tuple[float, ...]
    end: tuple[float, ...]
    need: tuple[float, ...]
    exposed: tuple[float, ...]
    compute: float

    @property
    def step(self) -> float:
        """T_iter = computation + exposed."""
        return self.compute + sum(self.exposed)


def windows(
    layers: Sequence[LayerTimes],
    link: LinkFit,
    *,
    need: Need = "forward",
    weights_first: bool = True,
) -> ExchangeWindows:
    """The windows of an iteration in the steady state.

    Args:
        layers: In the order of the forward pass.
        link: Latency (SW_lat) and seconds per byte of one layer's exchange.
        weights_first: Each layer computes its weight gradient before its input gradient (Das); else
            both come at once, at the end of the layer's backward, as from autograd. Then avail_k is
            the sum over the layers before k alone.
    """
    forward = np.array([one.forward for one in layers])
    weight = np.array([one.weight_grad for one in layers])
    data = np.array([one.input_grad for one in layers])
    moved = np.array([one.num_bytes for one in layers], dtype=np.float64)
    total = float(forward.sum())
    done = total + np.cumsum((weight + data)[::-1])[::-1]
    ready = done - data if weights_first else done
    seconds = np.where(moved > 0, link.latency + link.seconds_per_byte * moved, 0.0)
    end = serial_ends(ready, seconds, moved > 0)
    compute = float(done[0]) if len(layers) else 0.0
    begins = compute + np.cumsum(forward) - forward
    needed = begins if need == "forward" else np.full(len(layers), compute)
    return ExchangeWindows(
        ready=tuple(map(float, ready)),
        end=tuple(map(float, end)),
        need=tuple(map(float, needed)),
        exposed=_exposed(end, needed, moved > 0),
        compute=compute,
    )


def _exposed(
    end: Array,
    need: Array,
    sent: NDArray[np.bool_],
) -> tuple[float, ...]:
    """By how much each layer raises the largest lateness so far, in the order of the needs."""
    late = np.where(sent, np.maximum(end - need, 0.0), 0.0)
    # The last key of lexsort counts most: by need, of equal needs the one that ends first.
    order = np.lexsort((end, need))
    most = np.maximum.accumulate(late[order])
    exposed = np.zeros(len(late))
    exposed[order] = np.diff(most, prepend=0.0)
    return tuple(map(float, exposed))


@dataclass(frozen=True, kw_only=True)
class ParadlLayer:
    """One layer; elements and seconds per sample.

    Attributes:
        update: WU, seconds per iteration.
        points: W H of the input, what a spatial split divides; 1: it has no space, and what it
            computes is divided by samples there.
        halo_x: Elements of the input that a part fetches from its neighbours.
        halo_dy: Elements of the output's gradient that it fetches.
    """

    forward: float
    backward: float
    update: float
    x: float
    y: float
    w: float = 0.0
    b: float = 0.0
    filters: int = 1
    channels: int = 1
    points: int = 1
    halo_x: float = 0.0
    halo_dy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ParadlJob:
    """What is trained, and on what.

    Attributes:
        samples: D, of an epoch.
        batch: B, of all devices.
        latency: alpha, seconds per message.
        seconds_per_byte: beta.
        element: delta, bytes.
        reuse: gamma.
    """

    layers: Sequence[ParadlLayer]
    samples: float
    batch: float
    latency: float
    seconds_per_byte: float
    element: float = 4.0
    reuse: float = 1.0

    @property
    def iterations(self) -> float:
        """D / B."""
        return self.samples / self.batch

    def message(self, elements: float) -> float:
        """alpha + elements delta beta."""
        return self.latency + elements * self.element * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class ParadlRow:
    """A line of the table: seconds of an epoch, bytes of a device, most devices."""

    computation: float
    communication: float
    memory: float
    limit: int

    @property
    def seconds(self) -> float:
        return self.computation + self.communication


def data(job: ParadlJob, p: int) -> ParadlRow:
    """comp D/p sum(FW + BW) + D/B sum WU; comm 2 D/B (p-1)(alpha + sum|w|/p delta beta)."""
    return data_filter(job, p, 1)


def filter_(job: ParadlJob, p: int) -> ParadlRow:
    """comp D/p sum(FW + BW) + D/(B p) sum WU; comm 3 D/B (p-1) sum_{l<G} (alpha + B|y|/p ...):
    outputs are gathered forward, input gradients summed backward."""
    return data_filter(job, 1, p)


def channel(job: ParadlJob, p: int) -> ParadlRow:
    """As `filter_`, with an all-reduce forward and an all-gather backward."""
    return replace(filter_(job, p), limit=min(layer.channels for layer in job.layers))


def spatial(job: ParadlJob, p: int) -> ParadlRow:
    """As `data`, plus D/B sum (2 alpha + B (halo|x| + halo|dy|) delta beta), and at most min(W H)
    devices, both of the layers that have space."""
    return data_spatial(job, 1, p)


def data_filter(job: ParadlJob, p1: int, p2: int) -> ParadlRow:
    """p1 groups of p2 devices: filters split inside, gradients summed across.

    comm 3 D/B (p2-1) sum_{l<G} (alpha + B|y|/p delta beta)
       + 2 D/B (p1-1)(alpha + sum|w|/p delta beta), p = p1 p2.
    """
    p, layers = _positive(p1) * _positive(p2), job.layers
    # The paper sums over l < G: no layer needs the outputs of the last one.
    outputs = sum(job.message(job.batch * layer.y / p) for layer in layers[:-1])
    weights = job.message(_total(layers, "w") / p)
    return ParadlRow(
        computation=_passes(job, p) + job.iterations * _total(layers, "update") / p2,
        communication=job.iterations * (3 * (p2 - 1) * outputs + 2 * (p1 - 1) * weights),
        memory=memory_of(job, layers, samples=job.batch / p1, shards=p2),
        limit=_limit(job, min(layer.filters for layer in layers), p1, p2),
    )


def data_spatial(job: ParadlJob, p1: int, p2: int) -> ParadlRow:
    """p1 groups of p2 devices: samples split in space inside, gradients summed over all."""
    p, layers = _positive(p1) * _positive(p2), job.layers
    weights = 2 * (p - 1) * job.message(_total(layers, "w") / p)
    halos = sum(
        job.latency + job.message(job.batch / p1 * (layer.halo_x + layer.halo_dy))
        for layer in layers
        if layer.points > 1
    )
    return ParadlRow(
        computation=_passes(job, p) + job.iterations * _total(layers, "update"),
        communication=job.iterations * (weights + (halos if p2 > 1 else 0.0)),
        memory=memory_of(job, layers, samples=job.batch / p),
        limit=_limit(job, min((n.points for n in layers if n.points > 1), default=1), p1, p2),
    )


ROWS: Mapping[str, Callable[[ParadlJob, int], ParadlRow]] = MappingProxyType(
    {
        "data": data,
        "spatial": spatial,
        "filter": filter_,
        "channel": channel,
    }
)
"""Of one way to split; the hybrids take two numbers."""


def possible(row: ParadlRow, devices: int, memory: float) -> bool:
    """Whether so many devices of so many bytes can work like this."""
    return devices <= row.limit and row.memory <= memory


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} devices; at least 1")
    return number


def _limit(job: ParadlJob, parts: int, p1: int, p2: int) -> int:
    """Most devices: at most a sample for each group, and a part for each of its devices."""
    # A single group of several devices splits no samples, so the batch does not limit it.
    samples = int(job.batch) if p1 > 1 or p2 == 1 else 1
    return samples * (parts if p2 > 1 else 1)


def _total(layers: Sequence[ParadlLayer], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _passes(job: ParadlJob, p: int) -> float:
    """D/p sum(FW + BW)."""
    return job.samples / p * (_total(job.layers, "forward") + _total(job.layers, "backward"))


def memory_of(
    job: ParadlJob, layers: Sequence[ParadlLayer], *, samples: float, shards: int = 1
) -> float:
    """gamma delta sum(2 samples (|x| + |y|) + 2|w| / shards + |b|)."""
    # Twice for the gradients of activations and weights; the paper counts biases once.
    elements = sum(
        2 * samples * (layer.x + layer.y) + 2 * layer.w / shards + layer.b for layer in layers
    )
    return job.reuse * job.element * elements
