"""A device that is faster at something, in every number that says how fast it is at that.

Invariant: a factor of 1 changes nothing, and what was measured of kinds of kernels changes with
what the datasheet says.
"""

from __future__ import annotations

from dataclasses import replace

from headway.cluster.device import Pace
from headway.cost.device import DeviceModel


def faster(
    device: DeviceModel, *, compute: float = 1.0, stream: float = 1.0, launches: float = 1.0
) -> DeviceModel:
    """The device with other rates.

    Args:
        device: As it is.
        compute: Times the FLOP/s of every number format and kind of kernel.
        stream: Times the bytes/s of its memory, of every kind of kernel.
        launches: So many times less does issuing a kernel take, on the host, on the device, and in
            the libraries that set it up.
    """
    return replace(
        device,
        peak={name: compute * rate for name, rate in device.peak.items()},
        memory_rate=stream * device.memory_rate,
        dispatch=device.dispatch / launches,
        kernel=device.kernel / launches,
        kinds={name: _pace(pace, compute, stream, launches) for name, pace in device.kinds.items()},
    )


def _pace(pace: Pace, compute: float, stream: float, launches: float) -> Pace:
    factors = {"": compute, "_stream": stream, "_weights": stream, "_call": 1.0 / launches}
    numbers = {
        name: getattr(pace, name) * factor
        for term, factor in factors.items()
        for name in (f"forward{term}", f"backward{term}")
        if getattr(pace, name) is not None
    }
    return replace(pace, **numbers)
