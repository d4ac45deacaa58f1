"""What an operator costs on a device that was measured kind by kind.

Eager kernels run one after another: an operator into which others were folded costs the sum of its
kernels. Products follow the device's formula, kinds that were measured their own pace, all others
stream. Invariant: times grow with the samples, and what parameters move does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.device import DeviceModel
from headway.graph import Operator
from headway.graph.operator import Kernel

PRODUCTS = frozenset(["addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"])


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of an operator, at the samples with which its graph was captured.

    Attributes:
        made: Elements of its results.
        taken: Of its inputs without parameters.
        held: Of its parameters.
        own: Bytes of its parameters.
    """

    made: float
    taken: float
    held: float
    own: float


def seconds_of(
    device: DeviceModel,
    operator: Operator,
    counts: Counts,
    *,
    dtype: str,
    scale: float,
    cut: float = 1.0,
    moved_weights: float = 1.0,
) -> tuple[float, float]:
    """Forward and backward of the whole operator on one device, without launches.

    Args:
        device: With `kinds`.
        operator: Folded or not.
        counts: Of it.
        dtype: Of its products.
        scale: Samples of a micro-batch over those of the capture.
        cut: Parts into which the summed dimension of its products falls.
        moved_weights: Share of what its parameters move that counts; 0: nothing that few samples
            make slower counts, so that times are proportional to samples, a bound from below.
    """
    forward = backward = 0.0
    for kernel in operator.kernels:
        own = counts.own if kernel.traffic.weight_gradient or len(operator.kernels) == 1 else 0.0

        def moved(bytes_: int, own: float = own) -> float:
            fixed = min(own, bytes_)
            return (bytes_ - fixed) * scale + fixed * moved_weights

        if kernel.kind in PRODUCTS:
            one, two = _product(device, kernel, counts, dtype, scale, cut, few=moved_weights > 0)
            forward += max(one, moved(kernel.traffic.forward) / device.memory_rate)
            weights, inputs = kernel.traffic.weight_gradient, kernel.traffic.input_gradient
            backward += max(two[0], moved(inputs) / device.memory_rate)
            backward += max(two[1], moved(weights) / device.memory_rate)
            continue
        streams = moved(kernel.traffic.input_gradient) + moved(kernel.traffic.weight_gradient)
        gradients = kernel.flops.input_gradient + kernel.flops.weight_gradient
        ahead = moved(kernel.traffic.forward)
        pace = device.kinds.get(kernel.kind)
        if pace is None:
            rate = device.rate(dtype) if kernel.flops.total else 1.0
            forward += max(kernel.flops.forward * scale / rate, ahead / device.memory_rate)
            backward += max(gradients * scale / rate, streams / device.memory_rate)
        else:
            forward += pace.seconds(kernel.flops.forward * scale, ahead, backward=False)
            backward += pace.seconds(gradients * scale, streams, backward=True)
    return forward, backward


def _product(
    device: DeviceModel,
    kernel: Kernel,
    counts: Counts,
    dtype: str,
    scale: float,
    cut: float,
    *,
    few: bool,
) -> tuple[float, tuple[float, float]]:
    """Forward, and both gradients: 2 m n k / rate (1 + depth / k + narrow / m)."""

    def seconds(flops: int, results: float, weights: float) -> float:
        if not flops:
            return 0.0
        depth = max(flops / (2.0 * results) / cut, 1.0)
        slow = 1.0 + device.depth / depth
        if weights and few:
            slow += device.narrow / max(flops * scale / (2.0 * weights), 1.0)
        return flops * scale / device.rate(dtype) * slow

    forward = seconds(kernel.flops.forward, counts.made, counts.held)
    inputs = seconds(kernel.flops.input_gradient, counts.taken, counts.held)
    weights = kernel.flops.weight_gradient
    rows = max(weights * scale / (2.0 * counts.held), 1.0) if counts.held else 1.0
    slow = 1.0 + device.depth / rows if few else 1.0
    last = weights * scale / device.rate(dtype) * slow
    return forward, (inputs, last)
