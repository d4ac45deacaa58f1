"""What an operator costs on a device that was measured kind by kind.

Eager kernels run one after another: an operator into which others were folded costs the sum of its
kernels. Kinds that were measured have their own pace, products that of linear layers, all others
stream. Invariant: times grow with the samples;
what parameters move and what a call costs do not, and no split makes calls cheaper.
"""

from __future__ import annotations

from headway.cluster.device import Pace
from headway.cost.device import DeviceModel
from headway.graph import Operator, Work
from headway.graph.work import weights_of

PRODUCTS = frozenset(["addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"])
ALIKE = {
    **dict.fromkeys(PRODUCTS, "linear"),
    **dict.fromkeys(("conv1d", "conv3d", "convolution", "conv2d grouped"), "conv2d"),
    **dict.fromkeys(("conv1d grouped", "conv3d grouped"), "conv2d grouped"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose3d"), "conv_transpose2d"),
    "rnn_relu": "rnn_tanh",
    "rnn_relu_cell": "rnn_tanh_cell",
}
"""Kinds that have the pace of another one, unless they were measured themselves."""


def seconds_of(
    device: DeviceModel,
    operator: Operator,
    own: float,
    *,
    dtype: str,
    scale: float,
    moved_weights: float = 1.0,
    parts: int = 1,
) -> tuple[float, float]:
    """Forward and backward of an operator on one device, without launches.

    Args:
        device: With `kinds`.
        operator: Folded or not.
        own: Bytes of its parameters.
        dtype: Of its products.
        scale: Samples of a micro-batch over those of the capture.
        moved_weights: Share of what its parameters move and its calls cost that counts; 0: nothing
            that few samples make slower counts, so that times are proportional to samples, a bound
            from below.
        parts: Into which the operator is split.
    """
    forward = backward = 0.0
    for kernel in operator.kernels:
        held = own if kernel.traffic.weight_gradient or len(operator.kernels) == 1 else 0.0
        fixed = weights_of(kernel.kind, held, kernel.traffic)
        pace = _pace(device, kernel.kind)
        slow = scale * (_slower(device, dtype) if kernel.kind in PRODUCTS else 1.0)
        passes = []
        for flops, moved, weights, backward_ in (
            (kernel.flops.forward, kernel.traffic.forward, fixed.forward, False),
            (_gradients(kernel.flops), _gradients(kernel.traffic), _gradients(fixed), True),
        ):
            streams, weights = (moved - weights) * scale, weights * moved_weights
            if pace is None:
                rate = device.rate(dtype) if kernel.flops.total else 1.0
                seconds = max(flops * scale / rate, (streams + weights) / device.memory_rate)
                passes.append(seconds / parts)
            else:
                seconds = pace.seconds(flops * slow, streams, weights, backward=backward_)
                call = pace.call(backward=backward_) * kernel.calls
                call += pace.far((streams + weights) / parts, backward=backward_)
                call *= moved_weights if moved else 0.0
                passes.append(seconds / parts + call)
        forward, backward = forward + passes[0], backward + passes[1]
    return forward, backward


def _pace(device: DeviceModel, kind: str) -> Pace | None:
    """Of a kind, or of the nearest one that was measured."""
    while kind not in device.kinds and kind in ALIKE:
        kind = ALIKE[kind]
    return device.kinds.get(kind)


def _gradients(work: Work) -> float:
    return work.input_gradient + work.weight_gradient


def _slower(device: DeviceModel, dtype: str) -> float:
    """Times that products take as long as in fp32, in which paces are measured."""
    return device.rate("fp32") / device.rate(dtype) if "fp32" in device.peak else 1.0
