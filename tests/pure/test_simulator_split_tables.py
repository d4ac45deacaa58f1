"""pure: steps with split tables: exchanges between the stretches of passes, by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from headway.cluster.link import Link
from headway.collective.table_traffic import (
    ExchangeMark,
    KernelWork,
    RankPass,
    TableExchange,
    TableTraffic,
)
from headway.cost.device import DeviceModel
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.errors import PlanError
from headway.planner.tables.step_price import price_tables, work_seconds
from headway.schedule.generators.registry import make_schedule
from headway.simulator.ranks import RankGrid, StepFaults
from headway.simulator.simulation import simulate_training_step
from headway.simulator.table_work import PricedExchange, TableStretch, TableWork
from headway.simulator.work import StageSegment, StageWork, StepWork

FLAT = HierarchicalNetwork((LinkLevel(name="all", width=math.inf, link=Link(rate=1.0)),))
"""A second for each byte that a rank sends or receives."""


def work(tables, ranks=2, **more):
    stage = StageWork(forward=4.0, input_grad=4.0, weight_grad=4.0, update=1.0, **more)
    table = make_schedule("1f1b", stages=1, microbatches=1)
    return StepWork(
        table=table, stages=(stage,), grid=RankGrid(data=ranks), network=FLAT, tables=tables
    )


def exchange(kind, fullest, ranks=2):
    return PricedExchange(kind=kind, ranks=ranks, fullest=fullest, bytes=fullest * ranks)


def tables(exchanges, forward, backward, ranks=2, update=0.0):
    return TableWork(
        exchanges=tuple(exchanges),
        forward=((tuple(forward),),) * ranks,
        backward=((tuple(backward),),) * ranks,
        update=(update,) * ranks,
        state=(100.0,) * ranks,
    )


ALL = (TableStretch(1.0, 0.0),)


def test_an_exchange_that_is_waited_for_at_once_stops_the_pass():
    # 1 s of forward, 3 s of ids, 3 s of forward, 8 s of backward, 1 s of update.
    ahead = (
        TableStretch(0.25, 0.0, 0, True),
        TableStretch(0.0, 0.0, 0),
        TableStretch(0.75, 0.0),
    )
    step = simulate_training_step(work(tables([exchange("ids", 3.0)], ahead, ALL)))
    assert step.seconds == pytest.approx(16.0)
    assert step.exposed == {"tables": pytest.approx(3.0)}
    assert step.bubble == pytest.approx(0.0)


def test_what_is_under_way_hides_behind_what_is_computed_until_it_is_awaited():
    # Sums leave after 1 s and are wanted after 3 s: of 5 s two are hidden, and lookups take 0.5 s.
    ahead = (
        TableStretch(0.25, 0.5, 0, True),
        TableStretch(0.5, 0.0, 0),
        TableStretch(0.25, 0.0),
    )
    step = simulate_training_step(work(tables([exchange("sums", 5.0)], ahead, ALL, update=2.0)))
    assert step.seconds == pytest.approx(0.5 + 1.0 + 5.0 + 1.0 + 8.0 + 1.0 + 2.0)
    assert step.exposed == {"tables": pytest.approx(3.0)}
    for account in step.accounts:
        assert account.busy["lookups"] == pytest.approx(2.5)
        assert account.busy["forward"] == pytest.approx(4.0)
        assert account.peak == pytest.approx(100.0)


def test_an_exchange_waits_for_the_slowest_rank():
    ahead = (TableStretch(0.5, 0.0, 0, True), TableStretch(0.0, 0.0, 0), TableStretch(0.5, 0.0))
    slow = replace(
        work(tables([exchange("ids", 1.0)], ahead, ALL)), faults=StepFaults(slow={1: 2.0})
    )
    step = simulate_training_step(slow)
    one, other = step.accounts
    assert step.seconds == pytest.approx(2 * 13.0 + 1.0)
    assert one.exposed["tables"] == pytest.approx(1.0)
    assert one.bubble > other.bubble == pytest.approx(0.0)


def test_gradients_of_tables_and_sums_of_others_share_the_link():
    # Backward: the bucket leaves after 4 s and takes 2 x 6 bytes x 1/2; gradients of tables leave
    # after 6 s, behind it, and take 3 s.
    back = (TableStretch(0.75, 0.0, 0, True), TableStretch(0.25, 0.0, 0), TableStretch(0.0, 0.0))
    pieces = tuple(StageSegment(forward=2.0, backward=4.0, params=p) for p in (0.0, 6.0))
    found = work(tables([exchange("gradients", 3.0)], ALL, back), pieces=pieces, params=6.0)
    step = simulate_training_step(replace(found, bucket=0.0))
    # Forward to 4, bucket from 8 to 14, gradients from 14 to 17, the update.
    assert step.seconds == pytest.approx(18.0)
    assert step.exposed == {"tables": pytest.approx(5.0)}
    kinds = [(s.label, s.start, s.end) for s in step.timeline.spans if s.lane == "exchange"]
    assert ("gradients", pytest.approx(14.0), pytest.approx(17.0)) in kinds


def test_chunks_of_a_pass_are_cut_where_exchanges_are():
    """Cuts do not change what is computed."""
    pieces = tuple(StageSegment(forward=f, backward=2 * f, params=1e-9) for f in (0.5, 1.5, 2.0))
    ahead = tuple(TableStretch(s, 0.0) for s in (0.1, 0.2, 0.7))
    cut = work(tables([], ahead, ahead[::-1]), pieces=pieces, params=3e-9)
    whole = simulate_training_step(replace(cut, bucket=0.0))
    assert whole.seconds == pytest.approx(13.0)


def test_tables_lie_beside_neither_stages_nor_other_ranks():
    with pytest.raises(PlanError, match="tables of 2 ranks, of which 3 are"):
        work(tables([], ALL, ALL), ranks=3)


# -- prices ---------------------------------------------------------------------------------------

DEVICE = DeviceModel(
    name="slow", peak={"fp32": 10.0}, memory=1e9, memory_rate=4.0, efficiency=1.0, kernel=0.0,
    dispatch=0.5, sharpness=1.0,
)  # fmt: skip


def traffic(marks, rest, alone):
    passes = (
        RankPass("forward", 0, tuple(marks), rest),
        RankPass("backward", 0, (), KernelWork()),
    )
    return TableTraffic(
        exchanges=(TableExchange(((0.0, 8.0), (2.0, 0.0)), Counter({("a", "ids"): 10.0})),),
        passes=(passes, passes),
        alone=(alone, KernelWork()),
        sent=({("a", "ids"): 8.0}, {("a", "ids"): 2.0}),
        scale=2.0,
    )


def test_a_price_is_what_kernels_take_beyond_those_of_the_model_alone():
    # Alone: 4 kernels, 20 FLOPs, 8 bytes: 2 + 2 + 2 s. With tables: 2 more kernels and 4 bytes.
    alone = KernelWork(4, 20.0, 8.0)
    assert work_seconds(alone, DEVICE, "fp32") == pytest.approx(6.0)
    first = ExchangeMark(KernelWork(3, 5.0, 6.0), 0, starts=True)
    found = price_tables(
        traffic([first], KernelWork(3, 15.0, 6.0), alone), [DEVICE] * 2, dtype="fp32"
    )
    ahead, behind = found.forward[0][0]
    assert (ahead.share, behind.share) == (0.25, 0.75)
    assert (ahead.exchange, ahead.starts, behind.exchange) == (0, True, None)
    # 8 s with tables, twice the samples.
    assert ahead.lookups + behind.lookups == pytest.approx(2 * 2.0)
    assert found.exchanges[0].fullest == 16.0
    assert found.bytes == 20.0
    assert found.exchanges[0].kind == "ids"
    # 16 bytes to the other rank, one second each.
    assert found.exchanges[0].seconds(FLAT) == pytest.approx(16.0)
