"""What a step takes beside its kernels, its update and its exchange, from steps without.

Steps of the executor of a few numbers are timed for several plans (`run.idle_steps`). What the
model knows of them is taken off, and what is left is shared out:

    step + microbatches * microbatch + tensors * tensor

and in a pipeline of two stages, in which a micro-batch comes a message after the one before,

    piped_step + (microbatches + 1) * (piped_microbatch + message).

Invariant: no term is less than nothing, and with these terms the model gives the times back.
"""

from __future__ import annotations

from dataclasses import replace

from headway.cluster.device import Device, Host
from headway.cluster.readings import IdleStep, Kernels
from headway.cost.network import Network

_WIDTH, _BYTES = 4, 16.0
"""Of a trained tensor of such a step: numbers, bytes."""
_EACH, _ENDS = 4, 3
"""Kernels of both passes of each product, and of the mean."""


def with_host(device: Device, found: Kernels, network: Network, ranks: int, stamp: str) -> Device:
    """The device with what steps take beside it; as it is where that was not measured.

    Args:
        device: With all else that was measured.
        found: With the times of idle steps.
        network: Of all ranks.
        ranks: That took the steps together.
        stamp: Date and versions.
    """
    if not found.idle:
        return device

    def rest(step: IdleStep) -> float:
        return found.idle[step] - _known(step, device, network, ranks)

    one, many, several = (step for step in found.idle if step.stages == 1)
    tensor = max(0.0, (rest(many) - rest(one)) / (many.tensors - one.tensors))
    micro = max(0.0, (rest(several) - rest(one)) / (several.microbatches - one.microbatches))
    left = rest(one) - one.tensors * tensor - one.microbatches * micro
    host = Host(step=_rounded(max(0.0, left)), microbatch=_rounded(micro), tensor=_rounded(tensor))
    piped = [step for step in found.idle if step.stages > 1]
    if piped:
        few, more = piped
        each = (rest(more) - rest(few)) / (more.microbatches - few.microbatches)
        each = max(0.0, each)
        left = rest(few) - (few.microbatches + 1) * each
        host = replace(host, piped_step=_rounded(max(0.0, left)), piped_microbatch=_rounded(each))
    words = f"measured {stamp}: steps of the executor with next to nothing to compute"
    return replace(device, host=host, source={**device.source, "host": words})


def _known(step: IdleStep, device: Device, network: Network, ranks: int) -> float:
    """What the model says of such a step without these terms."""
    dispatch, gather = device.dispatch or 0.0, device.gather or 0.0
    sgd = device.updates.get("SGD")
    own = step.tensors // step.stages
    kernels = (_EACH * own + _ENDS) * dispatch
    update = 0.0 if sgd is None else own * sgd.seconds(_WIDTH)
    read = step.microbatches * step.samples * gather
    if step.stages == 1:
        summed = float(network.all_reduce(_BYTES * own, ranks)) if ranks > 1 else 0.0
        return step.microbatches * kernels + update + read + summed
    message = float(network.send(_BYTES * step.samples))
    return (step.microbatches + 1) * (kernels + message) + update + read


def _rounded(value: float) -> float:
    """To four digits: what was measured is not known better."""
    return float(f"{value:.4g}")
