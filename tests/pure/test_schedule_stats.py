"""pure: bubbles, memory, versions and critical paths of all schedules against published numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from headway.errors import PlanError
from headway.schedule.generators.chimera import chimera
from headway.schedule.generators.gpipe_and_1f1b import gpipe, one_f_one_b, pipedream, pipedream_2bw
from headway.schedule.generators.registry import make_schedule
from headway.schedule.generators.zero_bubble import zb_h1
from headway.schedule.pipeline_schedule import ActionKind, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import count_messages, critical_path, measure_schedule, peak_activations
from headway.schedule.timing import ScheduleTimer
from support.tables import random_table, table_of


def stats(name, stages, microbatches, **options):
    """Without recomputation, F = 1, B = 2."""
    schedule = replace(
        make_schedule(name, stages=stages, microbatches=microbatches, **options), recompute=()
    )
    return measure_schedule(schedule, StageCosts.of(schedule.stages, ranks=stages))


TABLE = {
    "1f1b": {(4, 4): 0.429, (4, 8): 0.273, (8, 8): 0.467, (8, 16): 0.304, (8, 32): 0.179},
    "gpipe": {(4, 4): 0.429, (4, 8): 0.273, (8, 8): 0.467, (8, 16): 0.304, (8, 32): 0.179},
    "interleaved": {(4, 4): 0.273, (4, 8): 0.158, (8, 8): 0.304, (8, 16): 0.179, (8, 32): 0.099},
    "interleaved-zero-bubble": {(4, 4): 0.111, (4, 8): 0.059, (8, 8): 0.127, (8, 32): 0.035},
    "zbv": {(4, 4): 0.2, (4, 8): 0.059, (8, 8): 0.226, (8, 16): 0.068, (8, 32): 0.035},
    "dualpipe-v": {(4, 8): 0.059, (8, 16): 0.068, (8, 32): 0.035},
    "chimera": {(4, 4): 0.25, (4, 8): 0.2, (8, 8): 0.333, (8, 16): 0.273, (8, 32): 0.238},
    "chimera-doubling": {(4, 8): 0.111, (8, 16): 0.158, (8, 32): 0.086},
}


@pytest.mark.parametrize(
    ("name", "sizes", "bubble"),
    [(name, sizes, bubble) for name, row in TABLE.items() for sizes, bubble in row.items()],
)
def test_bubble_ratios(name, sizes, bubble):
    assert round(stats(name, *sizes).bubble, 3) == bubble


@pytest.mark.parametrize(
    ("sizes", "bubble"),
    [((4, 4), 0.0), ((4, 8), 0.0), ((8, 8), 0.143), ((8, 16), 0.111), ((8, 32), 0.094)],
)
def test_bubble_ratios_of_four_pipes(sizes, bubble):
    assert round(stats("chimera", *sizes, pipes=4).bubble, 3) == bubble


@pytest.mark.parametrize(
    ("name", "sizes", "held"),
    [
        ("1f1b", (4, 8), [1, 4]),
        ("gpipe", (4, 8), [8, 8]),
        ("interleaved", (4, 4), [2.5, 4]),
        ("interleaved", (8, 16), [4.5, 11.5]),
        ("dualpipe-v", (4, 8), [4.5, 4.5]),
        ("dualpipe-v", (8, 16), [8.5, 8.5]),
        ("dualpipe", (4, 8), [5, 5]),
        ("dualpipe", (8, 16), [9, 9]),
        ("chimera", (4, 4), [3, 4]),
        ("chimera", (8, 16), [5, 8]),
        ("chimera-doubling", (4, 8), [7, 8]),
        ("chimera-doubling", (8, 16), [13, 16]),
        ("chimera-doubling", (16, 32), [25, 32]),
        ("gems", (4, 8), [1, 1]),
    ],
)
def test_activations(name, sizes, held):
    """In units of one full stage, held from the start of F to the end of B or W."""
    peaks = stats(name, *sizes).peak_activations
    assert [min(peaks), max(peaks)] == held


@pytest.mark.parametrize(
    ("stages", "f"), [(d, f) for d in (4, 8, 12, 16) for f in (1, 2, 3, 4) if not d // 2 % f]
)
def test_activations_and_weights_of_chimera(stages, f):
    found = stats("chimera", stages, stages, pipes=2 * f)
    assert min(found.peak_activations) == stages - stages // (2 * f) + 1
    assert max(found.peak_activations) == stages
    assert set(found.weights) == {2 * f}
    assert set(found.versions) == {1}


def test_chimera_needs_least_memory_at_the_ends_of_its_pipes():
    assert stats("chimera", 8, 8).peak_activations == (5, 6, 7, 8, 8, 7, 6, 5)
    assert stats("1f1b", 4, 8).peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 10, 12, 16, 32])
def test_the_critical_path_of_chimera(stages):
    found = stats("chimera", stages, stages)
    assert (found.critical_forwards, found.critical_backwards) == (stages, 2 * stages - 2)
    assert found.makespan == stages + 2 * (2 * stages - 2)


def test_a_split_backward_is_held_until_its_weight_gradient_or_in_part():
    """Rank 0 does F F I I W W: two are held until the first W, or until the first I."""
    rows = [
        f"d0.s0.{text}" for text in ("F.0", "F.1", "I.0", "I.1", "F.2", "I.2", "W.0", "W.1", "W.2")
    ]
    table = table_of((SchedulePipe("d0", (0,), (0, 1, 2)),), rows)
    costs = StageCosts.of(1)
    assert peak_activations(table, costs) == (3,)
    assert peak_activations(table, costs, freed_by_input_grad=1) == (2,)
    assert peak_activations(table, costs, freed_by_input_grad=0.25) == (2.5,)
    schedule = zb_h1(4, 8)
    assert peak_activations(schedule, StageCosts.of(4)) == (4, 4, 4, 4)
    cheap = measure_schedule(schedule, StageCosts.of(4), freed_by_input_grad=1).peak_activations
    assert cheap == (4, 3, 2, 1)


def test_activations_of_unequal_stages():
    costs = replace(StageCosts.of(4), activation=(1, 2, 4, 8))
    assert peak_activations(one_f_one_b(4, 8), costs) == (4, 6, 8, 8)


def test_halves_cost_half():
    """Backward halving: no more memory than the basic unit, and fewer bubbles."""
    schedule = make_schedule("chimera-halving", stages=4, microbatches=4)
    found = measure_schedule(schedule, StageCosts.of(4).halved())
    assert found.makespan == 13.5
    assert max(found.peak_activations) == 4


def test_weights_and_versions_without_a_flush():
    costs = replace(StageCosts.of(4), weight=(1, 1, 1, 10))
    found = measure_schedule(pipedream(4, 8), costs)
    assert found.versions == (4, 3, 2, 1)
    assert found.weights == (4, 3, 2, 10)
    assert measure_schedule(pipedream_2bw(4, 12), costs).versions == (2, 2, 2, 2)
    assert measure_schedule(pipedream_2bw(4, 12), costs).weights == (2, 2, 2, 20)


def test_a_stage_that_two_pipes_bring_to_a_rank_is_held_once():
    pipes = (SchedulePipe("d0", (0,), (0,)), SchedulePipe("u0", (0,), (1,)))
    table = table_of(pipes, ["d0.s0.F.0", "d0.s0.B.0", "u0.s0.F.1", "u0.s0.B.1"])
    assert measure_schedule(table, StageCosts.of(1)).weights == (1,)


def test_messages_are_counted_between_ranks_alone():
    assert count_messages(one_f_one_b(4, 8)) == 3 * 2 * 8
    assert count_messages(make_schedule("zbv", stages=4, microbatches=8)) == (7 - 1) * 2 * 8
    assert count_messages(chimera(4, 8)) == 3 * 2 * 8
    assert count_messages(replace(one_f_one_b(4, 8), skips=((0, 3),))) == 4 * 2 * 8


def test_bubbles_of_each_rank():
    found = measure_schedule(one_f_one_b(2, 2), StageCosts.of(2, slowness=(1, 2)))
    assert found.makespan == 1 + 2 * 3 * 2 + 2
    assert found.bubbles == pytest.approx((1 - 6 / 15, 1 - 12 / 15))
    assert found.bubble == pytest.approx(1 - 18 / 30)


@pytest.mark.parametrize("seed", range(25))
def test_a_critical_path_leads_from_the_start_to_the_end_without_a_gap(seed):
    draw = random.Random(seed)
    schedule = random_table(draw)
    costs = StageCosts.of(schedule.stages)
    timer = ScheduleTimer(schedule, costs)
    timing = timer.timing()
    start = dict(zip(schedule.actions(), itertools.chain(*timing.starts), strict=True))
    end = dict(zip(schedule.actions(), itertools.chain(*timing.ends), strict=True))
    path = critical_path(timer, timer.run())
    assert start[path[0]] == 0
    assert end[path[-1]] == timing.makespan
    for before, after in itertools.pairwise(path):
        assert start[after] == end[before]


@pytest.mark.parametrize("seed", range(25))
def test_the_critical_path_grows_first_when_messages_take_time(seed):
    """Of equally long paths the one with most messages: the makespan grows by their number."""
    draw = random.Random(seed)
    schedule = random_table(draw)
    tiny = 2.0**-20
    timer = ScheduleTimer(schedule, StageCosts.of(schedule.stages))
    path = critical_path(timer, timer.run())
    crossings = sum(a[0] != b[0] for a, b in itertools.pairwise(path))
    later = ScheduleTimer(schedule, StageCosts.of(schedule.stages, latency=tiny))
    assert later.makespan() == timer.makespan() + crossings * tiny


def test_the_critical_path_follows_a_queue_of_messages():
    """Three forwards in a row over a slow link: the link decides, from the first message on."""
    pipe = (SchedulePipe("d0", (0, 1), (0, 1, 2)),)
    row = ["F.0", "F.1", "F.2", "B.0", "B.1", "B.2"]
    table = table_of(pipe, [f"d0.s0.{t}" for t in row], [f"d0.s1.{t}" for t in row])
    timer = ScheduleTimer(table, StageCosts.of(2, message=(5, 0)))
    path = [str(action) for _, action in critical_path(timer, timer.run())]
    assert path[:3] == ["d0.s0.F.0", "d0.s1.F.2", "d0.s1.B.0"]


def test_the_critical_path_goes_through_an_all_reduce():
    pipes = (SchedulePipe("d0", (0,), (0,)), SchedulePipe("d1", (1,), (1,)))
    rows = [
        [f"d{n}.s0.F.{n}", f"d{n}.s0.B.{n}", f"d{n}.s0.SYNC", f"d{n}.s0.WAIT", f"d{n}.s0.STEP"]
        for n in range(2)
    ]
    timer = ScheduleTimer(table_of(pipes, *rows), StageCosts.of(1, sync=4, slowness=(1, 2)))
    path = critical_path(timer, timer.run())
    assert [str(action) for _, action in path][:3] == ["d1.s0.F.1", "d1.s0.B.1", "d1.s0.SYNC"]
    assert path[-1][1].kind in (ActionKind.STEP, ActionKind.WAIT, ActionKind.SYNC)


def test_a_table_that_cannot_go_on_has_no_stats():
    table = gpipe(2, 2)
    rows = (table.order[0], table.order[1][::-1])
    with pytest.raises(PlanError, match="gpipe cannot go on"):
        measure_schedule(replace(table, order=rows), StageCosts.of(2))


# -- what is computed again ------------------------------------------------------------------------


def test_a_stage_that_recomputes_keeps_its_inputs_until_its_backward():
    schedule = make_schedule("gpipe", stages=2, microbatches=3)
    costs = StageCosts.of(2, kept=(0.1, 0.25))
    for again, most in (((), (3, 3)), ((0,), (1.2, 3)), ((0, 1), (1.2, 1.5))):
        assert peak_activations(replace(schedule, recompute=again), costs) == most
    # Unknown, it is taken to be everything.
    assert peak_activations(replace(schedule, recompute=(0, 1)), StageCosts.of(2)) == (3, 3)
    doubling = make_schedule("chimera-doubling", stages=8, microbatches=16)
    held = peak_activations(doubling, StageCosts.of(8, kept=0.1))
    assert (min(held), max(held)) == (2.2, 2.5)


def test_the_input_gradient_begins_with_what_is_computed_again():
    """Then everything is held until W."""
    row = [f"d0.s0.{cell}" for cell in ("F.0", "F.1", "I.0", "I.1", "W.0", "W.1")]
    table = table_of((SchedulePipe("d0", (0,), (0, 1)),), row)
    costs = StageCosts.of(1, kept=0.5)
    assert peak_activations(replace(table, recompute=(0,)), costs) == (2,)
    assert peak_activations(replace(table, recompute=(0,)), costs, freed_by_input_grad=1) == (1.5,)


@pytest.mark.parametrize(("again", "work"), [((), 96), ((2,), 104), ((0, 1, 2, 3), 128)])
def test_each_stage_pays_for_its_own_forward(again, work):
    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    found = measure_schedule(replace(schedule, recompute=again), StageCosts.of(4))
    assert round(sum(found.makespan * (1 - idle) for idle in found.bubbles), 9) == work


def test_cut_in_halves_both_keep_their_input():
    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    whole = StageCosts.of(4, kept=0.1)
    assert whole.halved().kept == (0.05,) * 4
    assert schedule.every_stage == (0, 1, 2, 3)
    assert replace(schedule, recompute=(1, 3), blockwise=True).recomputes == (
        "recomputes in stages 1, 3, block by block"
    )
