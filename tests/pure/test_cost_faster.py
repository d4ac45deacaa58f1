"""pure: devices that are faster at something, in all numbers that say how fast."""

from __future__ import annotations

from dataclasses import replace

from headway.cluster.device import KernelPace
from headway.cost.device import DeviceModel, scale_device

PACE = KernelPace(
    forward=8.0, forward_stream=4.0, backward=6.0, backward_weights=2.0, forward_call=1.0
)
DEVICE = DeviceModel(
    name="d", peak={"fp32": 10.0, "fp16": 20.0}, memory=1.0, memory_rate=5.0, kinds={"linear": PACE}
)


def test_one_changes_nothing():
    assert scale_device(DEVICE) == DEVICE


def test_what_was_measured_of_kinds_changes_with_the_datasheet():
    found = scale_device(DEVICE, compute=2.0)
    assert found.peak == {"fp32": 20.0, "fp16": 40.0}
    assert found.kinds["linear"] == replace(PACE, forward=16.0, backward=12.0)
    assert replace(found, peak=DEVICE.peak, kinds=DEVICE.kinds) == DEVICE
    found = scale_device(DEVICE, stream=3.0)
    assert found.memory_rate == 15.0
    assert found.kinds["linear"] == replace(PACE, forward_stream=12.0, backward_weights=6.0)
    assert replace(found, memory_rate=5.0, kinds=DEVICE.kinds) == DEVICE


def test_launches_are_those_of_host_device_and_libraries():
    found = scale_device(DEVICE, launches=4.0)
    assert (found.dispatch, found.kernel) == (DEVICE.dispatch / 4, DEVICE.kernel / 4)
    assert found.kinds["linear"] == replace(PACE, forward_call=0.25)
