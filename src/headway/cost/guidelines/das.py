"""Compute against communication per layer, for data, model and hybrid parallelism.
Volumes are bytes that one node moves in an iteration. G groups of N / G nodes: the model is
split inside a group, the data across groups; G = 1 is model parallelism, G = N data
parallelism. Source: Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic
Gradient Descent", the sections on data, model and hybrid parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_ROUNDING = 1e-9
"""A quotient this close above a whole number is that number."""


@dataclass(frozen=True, kw_only=True)
class DasLayer:
    """A convolution; a fully connected layer has kernel and maps of 1 x 1.

    Attributes:
        kernel: kw, kh.
        output: ow, oh.
        input: iw, ih.
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


def ratio(layer: DasLayer, samples: float = 1.0, overlap: float = 1.0) -> float:
    """FLOP per byte; 1.5 ow oh MB_node for fp32 and full overlap, whatever kernel and features."""
    return computation(layer, samples) / communication(layer, overlap)


def ratio_of(layers: Iterable[DasLayer], samples: float = 1.0, overlap: float = 1.0) -> float:
    """FLOP per byte of a whole network."""
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


def model_is_better(layer: DasLayer, batch: float, overlap: float = 1.0) -> bool:
    """Whether splitting the features moves less than exchanging gradients, one way each:
    ofm kw kh (2 - overlap) > iw ih MB."""
    weights = layer.ofm * math.prod(layer.kernel) * (2 - overlap)
    return weights > math.prod(layer.input) * batch


def hybrid_volume(
    layer: DasLayer, batch: float, nodes: int, groups: int, overlap: float = 0.0
) -> float:
    """Bytes per node with G groups.

    comms_model = 2 size ifm iw ih MB / G, nothing where a group is one node;
    comms_data = size ofm ifm kw kh (2 - overlap) G / N, nothing where there is one group.

    Args:
        batch: MB, of all nodes.
        nodes: N.
        groups: G, a divisor of N.
        overlap: As in `communication`.

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
    """The divisor of N with the least volume; of equal ones that nearer to G*.

    It is a neighbour of G*. Between the pure ends volumes fall until G* and rise after it; and a
    pure end that is no neighbour cannot win: for 2 <= g <= G* the volume of g is at most 2 / g
    times that of G = 1, for G* <= g <= N / 2 at most 2 g / N times that of G = N.
    """
    ideal = ideal_groups(layer, batch, nodes, overlap)
    all_ = divisors(nodes)
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
        element: Bytes of each of them.
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
    """Exchange per iteration: 2 s (in + out) MB / d inside, 2 s W / t (d - 1) / d across.

    Args:
        batch: MB, of all devices.
        devices: N = t d.
        degree: t.
        rate: Bytes/s of a group by size and stride, as `cost.network.Network.rate_of`: the slower
            of the levels that it spans.
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


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))
