"""pure: measured times become devices and levels that give the times back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.cluster import Link, read_cluster, to_toml
from headway.cluster.device import HostOverhead
from headway.cluster.measurement import DeviceReadings, IdleStep, LinkReadings, RankReadings
from headway.cost.cluster_fit import busy_warning, cluster_of_readings
from headway.cost.device import DeviceModel
from headway.cost.machines import device_of, machine_of
from headway.cost.network import HierarchicalNetwork, LinkLevel, network_of

SIZES = [2.0**power for power in range(10, 25, 2)]
DEVICE = DeviceModel(
    name="own",
    peak={"fp32": 90e9, "fp64": 45e9},
    memory=8e9,
    memory_rate=12e9,
    efficiency=1.0,
    depth=24.0,
    kernel=0.0,
    dispatch=5e-6,
    sharpness=1.0,
    update=4e-9,
)
STAMP = "2026-11-21, torch 2.13.0"


def exchanges(rate, latency, ranks, message):
    level = LinkLevel(name="x", width=math.inf, link=Link(rate=rate, latency=latency))
    sums = HierarchicalNetwork((level,)).all_reduce(np.array(SIZES), ranks)
    return LinkReadings(
        ranks=ranks,
        sums=tuple(zip(SIZES, sums.tolist(), strict=True)),
        messages=tuple((size, message.seconds(size)) for size in SIZES),
    )


def kernels(device=DEVICE, name="cpu"):
    shapes = [(256, 256, k) for k in (128, 512, 1024)] + [(512, 512, k) for k in (256, 2048)]
    return DeviceReadings(
        name=name,
        adds=True,
        products={
            dtype: tuple(
                (m, n, k, device.dispatch + float(device.seconds_of_matmul(m, n, k, dtype=dtype)))
                for m, n, k in shapes
            )
            for dtype in device.peak
        },
        streams=tuple((size, 3e-6 + size / device.memory_rate) for size in (1e6, 1e7, 1e8)),
        dispatch=device.dispatch,
        kernel=device.kernel,
        updates={"AdamW": (9e-9, 6e-9, 3e-9), "clip": (3e-9, 2e-9, 1e-9)},
        memory=device.memory,
        spread=1.02,
    )


WANTED = HostOverhead(
    step=1.5e-3, microbatch=3e-4, tensor=2e-5, piped_step=2e-3, piped_microbatch=5e-4
)


def idle():
    """Seconds of idle steps of two ranks with `WANTED`, by hand."""
    launch, gather, message, small = DEVICE.dispatch, 2e-6, 30e-6, 4096 * 9e-9

    def summed(num_bytes):
        return 2 * 50e-6 + num_bytes / 3e9

    one = 7 * launch + 2 * gather
    many = (4 * 33 + 3) * launch + 2 * gather
    both = WANTED.piped_microbatch + 7 * launch + message + 32 / 4e9
    sums = {n: WANTED.step + n * (WANTED.tensor + small) + summed(16 * n) for n in (1, 33)}
    return {
        IdleStep(tensors=1, microbatches=1, samples=2): sums[1] + WANTED.microbatch + one,
        IdleStep(tensors=33, microbatches=1, samples=2): sums[33] + WANTED.microbatch + many,
        IdleStep(tensors=1, microbatches=4, samples=2): sums[1] + 4 * (WANTED.microbatch + one),
        **{
            IdleStep(tensors=2, microbatches=m, samples=2, stages=2): WANTED.piped_step
            + (m + 1) * both
            + small
            + 2 * m * gather
            for m in (2, 8)
        },
    }


def test_what_a_step_takes_beside_its_kernels_is_found_again(tmp_path):
    updates = {"AdamW": (9e-9, 6e-9, 3e-9), "clip": (3e-9, 2e-9, 1e-9), "SGD": (9e-9, 6e-9, 3e-9)}
    own = replace(kernels(), idle=idle(), gather=2e-6, updates=updates)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster_of_readings(readings(kernels=own)[:2], STAMP)))
    device = device_of(read_cluster(path).devices["cpu"], "cpu")
    for name in ("step", "microbatch", "tensor", "piped_step", "piped_microbatch"):
        assert getattr(device.host, name) == pytest.approx(getattr(WANTED, name), rel=0.02), name
    assert device.source["host"].startswith(f"measured {STAMP}: ")
    alone = {step: seconds for step, seconds in idle().items() if step.stages == 1}
    cluster = cluster_of_readings(readings(kernels=replace(own, idle=alone))[:2], STAMP)
    assert cluster.devices["cpu"].host.piped_step == 0
    assert cluster_of_readings(readings()[:2], STAMP).devices["cpu"].host is None


INSIDE = exchanges(3e9, 50e-6, 2, Link(rate=4e9, latency=30e-6))
BETWEEN = exchanges(1e8, 200e-6, 2, Link(rate=1.1e8, latency=90e-6))


def readings(**changes):
    facts = {"kernels": kernels(), "inside": INSIDE, "between": None, "busy": 0.0, "threads": 1}
    facts |= changes
    return [RankReadings(node=node, **facts) for node in ("node-0", "node-0", "node-1", "node-1")]


def test_known_numbers_are_found_again_and_survive_the_file(tmp_path):
    first, *others = readings()
    measured = cluster_of_readings([replace(first, between=BETWEEN), *others], STAMP)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(measured, ["measured"]))
    cluster = read_cluster(path)
    assert (len(cluster.nodes), cluster.ranks) == (2, 4)
    found, wanted = device_of(cluster.devices["cpu"], "cpu"), DEVICE
    for name in ("memory", "memory_rate", "efficiency", "depth", "kernel", "dispatch"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name
    assert found.update == pytest.approx(wanted.update, rel=1e-3)
    assert found.sharpness == 1
    assert found.peak == pytest.approx(wanted.peak, rel=1e-3)
    inside, between = network_of(cluster).levels
    assert (inside.width, between.width) == (2, math.inf)
    assert inside.link.rate == pytest.approx(3e9, rel=1e-3)
    assert inside.link.latency == pytest.approx(50e-6, rel=1e-3)
    assert between.message.rate == pytest.approx(1.1e8, rel=1e-3)
    assert between.message.latency == pytest.approx(90e-6, rel=1e-3)
    for source in (found.source, inside.source, between.source):
        assert all(text.startswith(f"measured {STAMP}: ") for text in source.values())
    assert "fit error 0% (largest 0%)" in inside.source["rate"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_the_model_gives_the_times_of_any_number_of_ranks_back(ranks):
    times = exchanges(2e9, 30e-6, ranks, Link(rate=2e9, latency=30e-6))
    cluster = cluster_of_readings(readings(inside=times)[:2], STAMP)
    network = network_of(replace(cluster, processes=ranks))
    for size, seconds in times.sums:
        assert float(network.all_reduce(size, ranks)) == pytest.approx(seconds, rel=0.25)


def test_the_slowest_exchange_counts_and_the_usual_device():
    slow = exchanges(1e9, 80e-6, 2, Link(rate=1e9, latency=80e-6))
    one, two, three, four = readings()
    fast = replace(one, kernels=kernels(replace(DEVICE, memory_rate=24e9)))
    poor = replace(four, kernels=kernels(replace(DEVICE, memory_rate=1e9)), inside=slow)
    machine = machine_of(cluster_of_readings([fast, two, three, poor], STAMP))
    assert machine.network.levels[0].link.rate == pytest.approx(1e9, rel=1e-3)
    assert machine.device.memory_rate == pytest.approx(12e9, rel=1e-3)


def test_unlike_nodes_and_devices_are_told_apart():
    one, two, three, _ = readings()
    three = replace(three, kernels=kernels(name="t4"), inside=None, between=BETWEEN)
    cluster = cluster_of_readings([one, two, three], STAMP)
    cluster.check()
    assert cluster.devices_of_ranks == ("cpu", "cpu", "t4")
    assert [len(ranks) for ranks in cluster.groups(cluster.link_levels[0])] == [2, 1]


def test_one_process_has_no_links():
    cluster = cluster_of_readings([replace(readings()[0], inside=None)], STAMP)
    cluster.check()
    assert cluster.levels == ()
    assert machine_of(cluster).network.all_reduce(1e6, 1) == 0


def test_a_busy_machine_is_told():
    assert busy_warning(readings()) is None
    assert "others used 1.5 cores" in busy_warning(readings(busy=1.5))
    assert "took 1.40 times as long" in busy_warning(
        readings(kernels=replace(kernels(), spread=1.4))
    )
