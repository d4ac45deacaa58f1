"""pure: list execution of tables, against numbers of the papers and a slow reference."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from headway.errors import PlanError
from headway.schedule.generators.chimera import chimera
from headway.schedule.generators.gpipe_and_1f1b import one_f_one_b
from headway.schedule.generators.zero_bubble import zbv
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import ScheduleTimer, time_schedule
from support.tables import random_table, table_of


def reference(schedule, costs, *, shared_links=True):
    """Starts and ends by relaxation: everything as early as possible, until nothing moves."""
    where = {}
    for rank, actions in enumerate(schedule.order):
        for i, a in enumerate(actions):
            kind = "B" if a.kind == ActionKind.INPUT_GRAD else str(a.kind)
            where[kind, a.pipe, a.stage, a.microbatch] = (rank, i)
    start = [[0.0] * len(actions) for actions in schedule.order]
    length = [
        [costs.seconds(a, rank, recompute=a.stage in schedule.recompute) for a in actions]
        for rank, actions in enumerate(schedule.order)
    ]

    def end(place):
        return start[place[0]][place[1]] + length[place[0]][place[1]]

    def arrivals():
        """(consumer, time) of everything that is passed, links served in the sender's order."""
        passed, free = [], {}
        for kind, edges in (("F", schedule.edges), ("B", [(b, a) for a, b in schedule.edges])):
            for source, target in edges:
                for pipe in schedule.pipes:
                    for m in pipe.microbatches:
                        giver, taker = (where[kind, pipe.name, s, m] for s in (source, target))
                        far = abs(source - target)
                        passed.append((giver, far, taker, costs.message[min(source, target)]))
        for giver, _, taker, wire in sorted(passed):
            if giver[0] == taker[0]:
                yield taker, end(giver)
                continue
            link = (giver[0], taker[0]) if shared_links else (giver, taker)
            free[link] = max(free.get(link, 0.0), end(giver)) + wire
            yield taker, free[link] + costs.latency

    def needs():
        yield from arrivals()
        for (kind, *rest), place in where.items():
            if kind in "BW":
                before = where.get(("F" if kind == "B" else "B", *rest))
                yield place, end(before)
        for rank, actions in enumerate(schedule.order):
            for i in range(1, len(actions)):
                yield (rank, i), end((rank, i - 1))

    moved = True
    while moved:
        moved = False
        for (rank, i), at in list(needs()):
            if at > start[rank][i] + 1e-12:
                start[rank][i], moved = at, True
    return start


def test_makespans_of_the_paper():
    """Chimera, figures 2, 3, 7(b), 7(d), at B = 2F."""
    costs = StageCosts.of(4)
    assert time_schedule(chimera(4, 4), costs).makespan == 16
    assert time_schedule(chimera(4, 8), costs).makespan == 30
    doubling = replace(chimera(4, 8, mode="doubling"), recompute=())
    assert time_schedule(doubling, costs).makespan == 27
    assert time_schedule(one_f_one_b(4, 4), costs).makespan == 21
    assert time_schedule(one_f_one_b(4, 8), costs).makespan == 33


def test_recomputation_is_charged_to_the_backward():
    assert time_schedule(chimera(4, 8, mode="doubling"), StageCosts.of(4)).makespan == 36


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_slow_reference_on_random_tables(seed):
    draw = random.Random(seed)
    schedule = random_table(draw)
    stages = schedule.stages
    costs = StageCosts.of(
        stages,
        forward=[draw.choice([0.5, 1, 1.5]) for _ in range(stages)],
        backward=[draw.choice([1, 2, 2.5]) for _ in range(stages)],
        message=[draw.choice([0, 0.5, 2]) for _ in range(stages)],
        latency=draw.choice([0, 0.25]),
        overhead=draw.choice([0, 0.125]),
        slowness=[draw.choice([1, 1.5]) for _ in range(schedule.ranks)],
    )
    for shared in (True, False):
        timing = time_schedule(schedule, costs, shared_links=shared)
        expected = reference(schedule, costs, shared_links=shared)
        for rank in range(schedule.ranks):
            assert timing.starts[rank] == pytest.approx(expected[rank])


CHAIN = (SchedulePipe("d0", (0, 1), (0, 1)),)


def two_ranks(*, first="F.0 F.1 B.0 B.1", second="F.0 B.0 F.1 B.1"):
    return table_of(
        CHAIN, [f"d0.s0.{t}" for t in first.split()], [f"d0.s1.{t}" for t in second.split()]
    )


def start_of(timing, rank, text):
    return timing.starts[rank][[str(action) for action in timing.order[rank]].index(text)]


def test_a_message_takes_its_latency_and_its_time_on_the_wire():
    costs = StageCosts.of(2, latency=0.25, message=0.5)
    timing = time_schedule(two_ranks(), costs)
    assert start_of(timing, 1, "d0.s1.F.0") == 1 + 0.5 + 0.25
    assert start_of(timing, 0, "d0.s0.B.0") == 1.75 + 1 + 2 + 0.75


def test_messages_of_one_pair_share_its_link_if_not_told_otherwise():
    table = two_ranks(second="F.0 F.1 B.0 B.1")
    costs = StageCosts.of(2, message=(2, 0))
    assert start_of(time_schedule(table, costs), 1, "d0.s1.F.1") == 5
    apart = time_schedule(table, costs, shared_links=False)
    assert start_of(apart, 1, "d0.s1.F.1") == 4


def test_both_directions_do_not_disturb_each_other():
    pipes = (SchedulePipe("d0", (0, 1), (0,)), SchedulePipe("u0", (1, 0), (1,)))
    rows = (["d0.s0.F.0", "u0.s1.F.1", "u0.s1.B.1", "d0.s0.B.0"],)
    rows += (["u0.s0.F.1", "d0.s1.F.0", "d0.s1.B.0", "u0.s0.B.1"],)
    timing = time_schedule(table_of(pipes, *rows), StageCosts.of(2, message=3))
    assert timing.makespan == 1 + 3 + 1 + 2 + 3 + 2


def test_stages_on_one_rank_pass_without_a_message():
    """The turn of the V: with messages of any price, the last rank goes from F to F at once."""
    table = zbv(2, 4)
    costs = StageCosts.of(4, ranks=2, latency=10, message=10)
    timing = time_schedule(table, costs)
    turn = start_of(timing, 1, "d0.s2.F.0")
    assert turn == start_of(timing, 1, "d0.s1.F.0") + 0.5


def test_a_skip_makes_the_later_stage_wait():
    pipes = (SchedulePipe("d0", (0, 1, 2), (0,)),)
    rows = [[f"d0.s{s}.F.0", f"d0.s{s}.B.0"] for s in range(3)]
    plain = table_of(pipes, *rows)
    costs = StageCosts.of(3, message=(5, 0, 1))
    assert start_of(time_schedule(plain, costs), 2, "d0.s2.F.0") == 1 + 5 + 1
    skipped = replace(plain, skips=((0, 2),))
    costs = StageCosts.of(3, message=(5, 0, 1), slowness=(1, 0.5, 1))
    assert start_of(time_schedule(skipped, costs), 2, "d0.s2.F.0") == 6.5
    slow_wire = replace(costs, message=(8, 0, 1))
    timing = time_schedule(skipped, slow_wire)
    assert start_of(timing, 2, "d0.s2.F.0") == 9.5
    assert start_of(timing, 0, "d0.s0.B.0") == 9.5 + 1 + 2 + max(8, 1 + 8)


def test_overhead_and_slow_ranks():
    costs = StageCosts.of(2, overhead=0.5, slowness=(1, 3))
    timing = time_schedule(two_ranks(), costs)
    assert timing.busy(0) == 2 * (1 + 2) + 4 * 0.5
    assert timing.busy(1) == 3 * 2 * (1 + 2) + 4 * 0.5
    assert timing.compute_end(1) == 1.5 + timing.busy(1)


def with_stage_actions(*rows):
    pipes = (SchedulePipe("d0", (0, 1), (0,)), SchedulePipe("u0", (1, 0), (1,)))
    return table_of(pipes, *[row.split() for row in rows])


BOTH = (
    "d0.s0.F.0 u0.s1.F.1 u0.s1.B.1 {a} d0.s0.B.0 {b}",
    "u0.s0.F.1 d0.s1.F.0 d0.s1.B.0 {c} u0.s0.B.1 {d}",
)


def synced(*, a="", b="", c="", d=""):
    return with_stage_actions(*(row.format(a=a, b=b, c=c, d=d) for row in BOTH))


def test_an_all_reduce_waits_for_all_holders_and_not_for_compute():
    """Stage 1 is complete at 4 on both ranks; compute goes on until 6."""
    table = synced(a="u0.s1.SYNC", b="u0.s1.WAIT", c="d0.s1.SYNC", d="d0.s1.WAIT")
    costs = StageCosts.of(2, sync=5)
    timing = time_schedule(table, costs)
    assert [(s.rank, s.start, s.end) for s in timing.sync_spans] == [(0, 4, 9), (1, 4, 9)]
    assert (timing.compute_end(0), timing.makespan) == (6, 9)
    late = time_schedule(table, replace(costs, slowness=(1, 2)))
    assert {s.start for s in late.sync_spans} == {8}


def test_all_reduces_of_a_rank_follow_each_other_by_readiness():
    table = synced(
        a="u0.s1.SYNC",
        b="d0.s0.SYNC d0.s0.WAIT u0.s1.WAIT",
        c="d0.s1.SYNC",
        d="u0.s0.SYNC u0.s0.WAIT d0.s1.WAIT",
    )
    timing = time_schedule(table, StageCosts.of(2, sync=5))
    spans = [(str(s.action), s.start, s.end) for s in timing.sync_spans if s.rank == 0]
    assert spans == [("u0.s1.SYNC", 4, 9), ("d0.s0.SYNC", 9, 14)]


def test_ranks_may_start_all_reduces_in_opposite_order():
    table = synced(
        b="d0.s0.SYNC u0.s1.SYNC d0.s0.WAIT u0.s1.WAIT",
        d="d0.s1.SYNC u0.s0.SYNC d0.s1.WAIT u0.s0.WAIT",
    )
    assert time_schedule(table, StageCosts.of(2, sync=5)).makespan == 16


@pytest.mark.parametrize("third", [1, 2])
def test_an_all_reduce_that_was_ready_first_goes_first_whoever_started_it(third):
    """Rank 0 starts stage 0 before stage 1, but the other holder of stage 0 comes late."""
    other = 3 - third
    pipes = (SchedulePipe("a", (0, 0), (0,)), SchedulePipe("b", (third, other), (1,)))
    rows = [
        ["a.s0.F.0", "a.s1.F.0", "a.s1.B.0", "a.s0.B.0", "a.s0.SYNC", "a.s1.SYNC"],
        ["b.s1.F.1", "b.s1.B.1", "b.s1.SYNC"],
        ["b.s0.F.1", "b.s0.B.1", "b.s0.SYNC"],
    ]
    slowness = [1, 1, 1]
    slowness[third] = 3
    table = table_of(pipes, rows[0], rows[other], rows[third])
    timing = time_schedule(table, StageCosts.of(2, sync=(2, 8), slowness=slowness))
    spans = {str(s.action): (s.start, s.end) for s in timing.sync_spans if s.rank == 0}
    assert spans == {"a.s1.SYNC": (6, 14), "a.s0.SYNC": (14, 16)}


def test_all_reduces_in_the_middle_of_a_table_block_only_who_waits():
    """Without a flush: STEP after each micro-batch, its WAIT before."""
    pipe = (SchedulePipe("d0", (0,), (0, 1)), SchedulePipe("d1", (1,), (2, 3)))
    row = "{p}.s0.F.{a}@0 {p}.s0.B.{a}@0 {p}.s0.SYNC {p}.s0.WAIT {p}.s0.STEP "
    row += "{p}.s0.F.{b}@1 {p}.s0.B.{b}@1 {p}.s0.SYNC@2 {p}.s0.WAIT@2 {p}.s0.STEP@2"
    rows = [row.format(p="d0", a=0, b=1).split(), row.format(p="d1", a=2, b=3).split()]
    table = replace(table_of(pipe, *rows), flush=False)
    timing = time_schedule(table, StageCosts.of(1, sync=1, slowness=(1, 2)))
    assert [s.start for s in timing.sync_spans if s.rank == 0] == [6, 13]
    assert timing.makespan == 14


def test_a_circle_is_refused_with_every_cell_that_waits():
    table = two_ranks(first="F.0 B.0 F.1 B.1", second="F.0 F.1 B.0 B.1")
    with pytest.raises(PlanError) as caught:
        time_schedule(table, StageCosts.of(2))
    assert caught.value.problems == (
        "rank 0 stands at cell 1, d0.s0.B.0, and waits for d0.s1.B.0 of rank 1",
        "rank 1 stands at cell 1, d0.s1.F.1, and waits for d0.s0.F.1 of rank 0",
    )


def test_an_action_before_what_it_needs_on_its_own_rank_is_refused():
    with pytest.raises(PlanError, match=r"d0\.s1\.B\.0, and waits for d0\.s1\.F\.0 of rank 1"):
        time_schedule(two_ranks(second="B.0 F.0 F.1 B.1"), StageCosts.of(2))


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ({"second": "F.0 F.1 B.1"}, "d0.s1.B.0, which is not in the table"),
        ({"first": "F.0 B.0 B.1"}, "d0.s0.F.1, which is not in the table"),
        ({"second": "F.0 I.0 F.1 B.1 W.1"}, "d0.s1.I.1, which is not in the table"),
    ],
)
def test_what_is_not_in_the_table_is_named(wrong, missing):
    with pytest.raises(PlanError, match=missing):
        time_schedule(two_ranks(**wrong), StageCosts.of(2))


def test_an_all_reduce_without_one_of_its_holders_is_refused():
    table = synced(a="u0.s1.SYNC", b="u0.s1.WAIT")
    with pytest.raises(PlanError, match=r"stage 1 \(ranks 0, 1\); rank 1 has no SYNC for it"):
        time_schedule(table, StageCosts.of(2))
    with pytest.raises(PlanError, match=r"WAIT, and waits for u0\.s1\.SYNC, which is not"):
        time_schedule(synced(b="u0.s1.WAIT"), StageCosts.of(2))


@pytest.mark.parametrize("kind", [ActionKind.SEND, ActionKind.RECV])
def test_half_of_a_message_is_refused(kind):
    whole = lower(two_ranks())
    gone = next(a for _, a in whole.actions() if a.kind == kind)
    rows = tuple(tuple(a for a in actions if a != gone) for actions in whole.order)
    with pytest.raises(PlanError, match=rf"waits for {gone}, which is not in the table"):
        time_schedule(replace(whole, order=rows), StageCosts.of(2))


def test_costs_of_another_number_of_stages_are_an_error_of_the_caller():
    with pytest.raises(ValueError, match="costs of 3 stages for pipes of 2"):
        time_schedule(two_ranks(), StageCosts.of(3))


@pytest.mark.parametrize("message", [0.0, 0.75])
def test_a_timer_times_other_orders_of_the_same_cells(message):
    """As a search does; every permutation that swaps neighbours, against a table made anew."""
    schedule = chimera(4, 4)
    costs = StageCosts.of(4, message=message)
    timer = ScheduleTimer(schedule, costs)
    numbers, impossible = timer.wiring.order, 0
    for rank in range(4):
        for i in range(len(numbers[rank]) - 1):
            order = [list(row) for row in numbers]
            order[rank][i : i + 2] = reversed(order[rank][i : i + 2])
            rows = tuple(tuple(timer.wiring.actions[cell] for cell in row) for row in order)
            try:
                expected = time_schedule(replace(schedule, order=rows), costs).makespan
            except PlanError:
                expected = math.inf
                impossible += 1
            assert timer.makespan(order) == expected
    assert 0 < impossible < 28
    assert timer.makespan() == time_schedule(schedule, costs).makespan


def test_an_empty_table_takes_no_time():
    empty = PipelineSchedule(name="none", pipes=(SchedulePipe("d0", (0,), ()),), order=((),))
    assert time_schedule(empty, StageCosts.of(1)).makespan == 0


def test_32_ranks_and_256_micro_batches_are_quick():
    """Measured: 0.02 s a run, 0.15 s for the wiring; the bound leaves room for a busy machine."""
    timer = ScheduleTimer(one_f_one_b(32, 256), StageCosts.of(32))
    before = time.process_time()
    assert timer.makespan() == 3 * (256 + 31)
    assert time.process_time() - before < 0.5
