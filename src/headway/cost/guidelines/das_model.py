"""Das et al. 2016 on a captured model: its layers, and the windows of its gradient exchange.
`layers_of` reads the convolutions and linear layers of a graph. `windows` says which part of
the exchange cannot be hidden: the network carries one layer's gradients at a time, the last
layer's first. With s_k the seconds of layer k and ready_k the moment of its weight gradient

    end_k = max over j >= k of (ready_j + s_k + ... + s_j)
    exposed = max(0, max over k of (end_k - need_k))

which is the recurrence start_k = max(ready_k, end_{k+1}) of the paper's analysis of overlap,
solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.collective.model.link_fit import LinkFit
from headway.cost.device import Array
from headway.cost.guidelines.das import DasLayer
from headway.graph.model_graph import ModelGraph, Operator, TensorSpec


def layers_of(graph: ModelGraph) -> tuple[DasLayer, ...]:
    """Convolutions and linear layers with weights, in the order of execution.

    The positions of a sequence count as its output map; how many there are is told by the FLOPs,
    since what was folded into an operator may have another shape than its product. Samples are the
    first dimension of the graph's first input. A convolution in groups is left out: its volumes
    follow other formulas.
    """
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
    # what was folded into an operator in front of it has given its input another role
    others = (spec for role, (_, spec) in by_role.items() if role not in ("weight", "bias"))
    source = next(others, weight)
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


# Which part of the gradient exchange nobody can hide: the window of every layer, in closed
# form.


Need = Literal["forward", "update"]
"""When a layer's sum must be there: before its next forward, or at the end of backward, because
the optimiser steps all parameters at once."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Of one layer on one node.

    Attributes:
        forward: Seconds.
        weight_grad: Seconds.
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
    def available(self) -> tuple[float, ...]:
        """avail_k: seconds from the gradient to the need of the sum."""
        return tuple(need - ready for need, ready in zip(self.need, self.ready, strict=True))

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


def serial_ends(
    ready: Array,
    seconds: Array,
    sent: NDArray[np.bool_],
) -> Array:
    """end_k, by one running maximum from the last layer to the first; `ready` of what stays."""
    until = np.cumsum(seconds[::-1])
    begin = np.where(sent[::-1], ready[::-1] - (until - seconds[::-1]), -np.inf)
    end = (until + np.maximum.accumulate(begin))[::-1]
    return np.where(sent, end, ready)


def _exposed(
    end: Array,
    need: Array,
    sent: NDArray[np.bool_],
) -> tuple[float, ...]:
    """By how much each layer raises the largest lateness so far, in the order of the needs."""
    late = np.where(sent, np.maximum(end - need, 0.0), 0.0)
    order = np.lexsort((end, need))
    most = np.maximum.accumulate(late[order])
    exposed = np.zeros(len(late))
    exposed[order] = np.diff(most, prepend=0.0)
    return tuple(map(float, exposed))


def smallest_bucket(link: LinkFit) -> float:
    """Bytes B SW_lat from which on the link's bytes cost more than the software's latency."""
    return link.latency / link.seconds_per_byte
