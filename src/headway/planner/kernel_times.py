"""What an operator costs on a device that was measured kind by kind.

Eager kernels run one after another: an operator into which others were folded costs the sum of its
kernels. Kinds that were measured have their own pace, products that of linear layers, all others
stream. Invariant: times grow with the samples, and what parameters move does not.
"""

from __future__ import annotations

from headway.cost.device import DeviceModel
from headway.graph import Operator

PRODUCTS = frozenset(["addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"])


def seconds_of(
    device: DeviceModel,
    operator: Operator,
    own: float,
    *,
    dtype: str,
    scale: float,
    moved_weights: float = 1.0,
) -> tuple[float, float]:
    """Forward and backward of the whole operator on one device, without launches.

    Args:
        device: With `kinds`.
        operator: Folded or not.
        own: Bytes of its parameters.
        dtype: Of its products.
        scale: Samples of a micro-batch over those of the capture.
        moved_weights: Share of what its parameters move that counts; 0: nothing that few samples
            make slower counts, so that times are proportional to samples, a bound from below.
    """
    forward = backward = 0.0
    for kernel in operator.kernels:
        weights = kernel.traffic.weight_gradient or len(operator.kernels) == 1

        def moved(bytes_: int, own: float = own if weights else 0.0) -> float:
            fixed = min(own, bytes_)
            return (bytes_ - fixed) * scale + fixed * moved_weights

        streams = moved(kernel.traffic.input_gradient) + moved(kernel.traffic.weight_gradient)
        gradients = kernel.flops.input_gradient + kernel.flops.weight_gradient
        ahead = moved(kernel.traffic.forward)
        product = kernel.kind in PRODUCTS
        pace = device.kinds.get("linear" if product else kernel.kind)
        if pace is None:
            rate = device.rate(dtype) if kernel.flops.total else 1.0
            forward += max(kernel.flops.forward * scale / rate, ahead / device.memory_rate)
            backward += max(gradients * scale / rate, streams / device.memory_rate)
        else:
            slow = scale * (_slower(device, dtype) if product else 1.0)
            forward += pace.seconds(kernel.flops.forward * slow, ahead, backward=False)
            backward += pace.seconds(gradients * slow, streams, backward=True)
    return forward, backward


def _slower(device: DeviceModel, dtype: str) -> float:
    """Times that products take as long as in fp32, in which paces are measured."""
    return device.rate("fp32") / device.rate(dtype) if "fp32" in device.peak else 1.0
