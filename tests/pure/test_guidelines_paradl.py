"""pure: ParaDL's rows against the printed formulas, and against the rings of the cost model."""

from __future__ import annotations

import dataclasses
import math

import pytest

from headway.cluster import Link
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.planner.guidelines import layer_parallelism as paradl
from headway.planner.guidelines.layer_parallelism import (
    ParadlJob,
    ParadlLayer,
    data_filter,
    data_spatial,
    possible,
)
from support.paradl_pipeline import pipeline

D, B, ALPHA, BETA, DELTA, GAMMA = 1280, 64, 1e-5, 1e-9, 4, 0.8
LAYERS = (
    ParadlLayer(forward=2e-3, backward=5e-3, update=1e-4, x=150e3, y=800e3, w=9e3, b=64,
          filters=64, channels=3, points=224 * 224, halo_x=1300, halo_dy=28e3),
    ParadlLayer(forward=4e-3, backward=7e-3, update=3e-4, x=800e3, y=400e3, w=70e3, b=128,
          filters=128, channels=64, points=112 * 112, halo_x=14e3, halo_dy=7e3),
    ParadlLayer(forward=1e-3, backward=3e-3, update=9e-4, x=400e3, y=1e3, w=4e6, b=1000,
          filters=1000, channels=512, points=14 * 14),
)  # fmt: skip
JOB = ParadlJob(
    layers=LAYERS,
    samples=D,
    batch=B,
    latency=ALPHA,
    seconds_per_byte=BETA,
    element=DELTA,
    reuse=GAMMA,
)
FW, BW, WU = 7e-3, 15e-3, 1.3e-3
X, Y, W, BIAS = 1350e3, 1201e3, 4.079e6, 1192
DB = DELTA * BETA


def held(samples, shards=1):
    return GAMMA * DELTA * (2 * samples * (X + Y) + 2 * W / shards + BIAS)


def agrees(row, computation, communication, memory, limit):
    assert row.computation == pytest.approx(computation, rel=1e-12)
    assert row.communication == pytest.approx(communication, rel=1e-12)
    assert row.memory == pytest.approx(memory, rel=1e-12)
    assert row.limit == limit
    assert row.seconds == row.computation + row.communication


@pytest.mark.parametrize("p", [1, 2, 8])
def test_the_rows_of_one_way_to_split(p):
    exchange = 2 * (D / B) * (p - 1) * (ALPHA + W / p * DB)
    agrees(paradl.data(JOB, p), D / p * (FW + BW) + D / B * WU, exchange, held(B / p), B)
    outputs = sum(ALPHA + B * y / p * DB for y in (800e3, 400e3))
    inner = 3 * (D / B) * (p - 1) * outputs
    work = D / p * (FW + BW) + D / (B * p) * WU
    split = B if p == 1 else 64
    agrees(paradl.filter_(JOB, p), work, inner, held(B, p), split)
    agrees(paradl.channel(JOB, p), work, inner, held(B, p), 3)
    halos = sum(2 * ALPHA + B * (a + b) * DB for a, b in ((1300, 28e3), (14e3, 7e3), (0, 0)))
    agrees(
        paradl.spatial(JOB, p),
        D / p * (FW + BW) + D / B * WU,
        exchange + (D / B * halos if p > 1 else 0),
        held(B / p),
        14 * 14 if p > 1 else B,
    )


def test_the_row_of_the_pipeline():
    s, p = 4, 2
    stage_fw, stage_bw, stage_wu = 4e-3 + 1e-3, 7e-3 + 3e-3, 3e-4 + 9e-4
    second = GAMMA * DELTA * (2 * B * (800e3 + 400e3 + 400e3 + 1e3) + 2 * 4.07e6 + 1128)
    first = GAMMA * DELTA * (2 * B * 950e3 + 2 * 9e3 + 64)
    agrees(
        pipeline(JOB, p, begins=(1,), s=s),
        D * (p + s - 1) / s * (stage_fw + stage_bw) + D / B * stage_wu,
        2 * D * (p + s - 2) / B * (ALPHA + B / s * 800e3 * DB),
        max(first, second),
        3,
    )


@pytest.mark.parametrize(("p1", "p2"), [(2, 4), (4, 2), (3, 3)])
def test_the_rows_of_the_hybrids(p1, p2):
    p = p1 * p2
    outputs = sum(ALPHA + B * y / p * DB for y in (800e3, 400e3))
    weights = ALPHA + W / p * DB
    agrees(
        data_filter(JOB, p1, p2),
        D / p * (FW + BW) + D / B * WU / p2,
        D / B * (3 * (p2 - 1) * outputs + 2 * (p1 - 1) * weights),
        held(B / p1, p2),
        B * 64,
    )
    halos = sum(2 * ALPHA + B / p1 * (a + b) * DB for a, b in ((1300, 28e3), (14e3, 7e3), (0, 0)))
    agrees(
        data_spatial(JOB, p1, p2),
        D / p * (FW + BW) + D / B * WU,
        D / B * (2 * (p - 1) * weights + halos),
        held(B / p),
        B * 14 * 14,
    )


def test_a_layer_without_space_limits_no_split_in_space():
    """The classifier behind the convolutions has no halo and no W H; its weights are summed."""
    head = ParadlLayer(forward=1e-3, backward=2e-3, update=1e-4, x=1e3, y=10, w=1e4, filters=10)
    both = dataclasses.replace(JOB, layers=(*LAYERS, head))
    weights = [2 * 3 * (ALPHA + w / 4 * DB) for w in (W, W + 1e4)]
    plain, more = paradl.spatial(JOB, 4), paradl.spatial(both, 4)
    assert more.limit == plain.limit == 14 * 14
    assert more.communication - plain.communication == pytest.approx(
        D / B * (weights[1] - weights[0]), rel=1e-6
    )
    assert paradl.spatial(dataclasses.replace(JOB, layers=(head,)), 4).limit == 1


@pytest.mark.parametrize("name", [*paradl.ROWS, "pipeline"])
def test_one_device_is_the_serial_run(name):
    row = {**paradl.ROWS, "pipeline": pipeline}[name](JOB, 1)
    assert row.computation == pytest.approx(D * (FW + BW) + D / B * WU, rel=1e-12)
    assert row.communication == 0
    assert row.memory == pytest.approx(held(B), rel=1e-12)
    assert possible(row, 1, row.memory)
    assert not possible(row, 1, row.memory * 0.99)


@pytest.mark.parametrize("p", [2, 4, 16])
def test_the_messages_are_the_rings_of_the_cost_model(p):
    ring = HierarchicalNetwork(
        (LinkLevel(name="all", width=math.inf, link=Link(rate=1 / BETA, latency=0.0)),)
    )
    job = dataclasses.replace(JOB, latency=0.0)
    exchange = float(ring.all_reduce(W * DELTA, p))
    assert paradl.data(job, p).communication == pytest.approx(D / B * exchange, rel=1e-12)
    inside = sum(
        float(ring.all_gather(B * y * DELTA, p) + ring.all_reduce(B * y * DELTA, p))
        for y in (800e3, 400e3)
    )
    assert paradl.filter_(job, p).communication == pytest.approx(D / B * inside, rel=1e-12)
