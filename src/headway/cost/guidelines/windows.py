"""Which part of the gradient exchange nobody can hide: the window of every layer, in closed form.

The network carries one layer's gradients at a time, the last layer's first. With s_k the seconds of
layer k and ready_k the moment of its weight gradient:

    end_k = max over j >= k of (ready_j + s_k + ... + s_j)
    exposed = max(0, max over k of (end_k - need_k))

Invariant: this is what `collective.play` and `simulator.exchange` play with one message on its way
at a time. Source: Das et al. 2016, the analysis of overlap; the maxima are those of its
recurrence start_k = max(ready_k, end_{k+1}).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.collective.link import LinkFit
from headway.cost.device import Array

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
class Windows:
    """Tuples have one entry per layer; seconds after the start of the forward pass.

    Attributes:
        ready: Its weight gradient is there.
        end: Its sum is there.
        need: Its sum is asked for, had nothing waited before.
        exposed: Seconds for which the node stands still because of it.
        compute: Of an iteration without waits.
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
) -> Windows:
    """The windows of an iteration in the steady state.

    Args:
        layers: In the order of the forward pass.
        link: Latency (SW_lat) and seconds per byte of one layer's exchange.
        need: When sums must be there.
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
    return Windows(
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
