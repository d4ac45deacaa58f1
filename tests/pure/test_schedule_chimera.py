"""pure: Chimera's tables cell by cell, and every formula of the paper over all sizes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from headway.errors import PlanError
from headway.plans.pipeline import PipelinePlan
from headway.schedule.generators.chimera import chimera
from headway.schedule.pipeline_schedule import Action, ActionKind
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import time_schedule

SIZES = (2, 4, 6, 8, 10, 12, 14, 16, 32)


def pairs_of_pipes(ranks):
    """All f that divide D/2."""
    return [f for f in range(1, ranks // 2 + 1) if ranks // 2 % f == 0]


def play(schedule, forward=1, backward=2):
    """The end of each action when every rank carries out its row as early as it can."""
    ends, ready, place = {}, [0] * schedule.ranks, [0] * schedule.ranks
    last, moved = schedule.stages - 1, True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.order):
            for action in row[place[rank] :]:
                ahead, pipe = action.kind == ActionKind.FORWARD, action.pipe
                stage, number = action.stage, action.microbatch
                if ahead:
                    needed = 0 if stage == 0 else ends.get((True, pipe, stage - 1, number))
                elif stage < last:
                    needed = ends.get((False, pipe, stage + 1, number))
                else:
                    needed = ends[True, pipe, stage, number]
                if needed is None or not (ahead or (True, pipe, stage, number) in ends):
                    break
                ready[rank] = max(ready[rank], needed) + (forward if ahead else backward)
                ends[ahead, pipe, stage, number] = ready[rank]
                place[rank] += 1
                moved = True
    assert place == [len(row) for row in schedule.order], "the table hangs"
    return ends


def makespan(schedule, forward=1, backward=2):
    return max(play(schedule, forward, backward).values())


def bubble(schedule, forward=1, backward=2):
    """Every micro-batch has one forward and one backward on each rank."""
    busy = schedule.num_microbatches * (forward + backward)
    return 1 - Fraction(busy, makespan(schedule, forward, backward))


def activations(schedule):
    """For each rank the most micro-batches between forward and backward."""
    peaks = []
    for row in schedule.order:
        live = peak = 0
        for action in row:
            live += 1 if action.kind == ActionKind.FORWARD else -1
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def drawing(schedule):
    """Digit: forward of that micro-batch; letter: its backward; dot: an idle slot."""
    rows = []
    for row in schedule.order:
        cells = ["."] * (1 + max(schedule.slots.values()))
        for action in row:
            number = action.microbatch
            assert cells[schedule.slots[action]] == ".", f"two actions in a slot: {action}"
            glyph = str(number) if action.kind == ActionKind.FORWARD else "abcdefghijklmnop"[number]
            cells[schedule.slots[action]] = glyph
        rows.append("".join(cells))
    return rows


def texts(row):
    return [f"{action.kind}{action.microbatch}" for action in row]


# -- T1.1: tables of the paper -----------------------------------------------------------------


def test_figure_3():
    assert drawing(chimera(4, 4)) == ["0.12c3da.b", ".0213cadb.", ".2031acbd.", "2.30a1bc.d"]


def test_figure_8_with_four_pipes():
    schedule = chimera(8, 8, pipes=4)
    assert drawing(schedule) == [
        "0.162734e5fcgdha.b",
        ".06172435ecfdgahb.",
        ".60714253cedfagbh.",
        "6.704152c3deafbg.h",
        "2.340516g7haebfc.d",
        ".24350617gahbecfd.",
        ".42536071agbhcedf.",
        "4.526370a1bgchde.f",
    ]
    placements = {pipe.name: pipe.placement for pipe in schedule.pipes}
    assert list(placements) == ["d0", "d1", "u0", "u1"]
    assert placements["d1"] == (4, 5, 6, 7, 0, 1, 2, 3)
    assert placements["u1"] == (3, 2, 1, 0, 7, 6, 5, 4)


def test_the_timed_makespans_of_figures_2_and_7():
    assert makespan(chimera(4, 4)) == 16
    assert makespan(chimera(4, 8)) == 30
    assert makespan(chimera(4, 8, mode="doubling")) == 27
    assert makespan(chimera(8, 8)) == 36


@pytest.mark.parametrize("mode", ["direct", "doubling", "halving"])
@pytest.mark.parametrize("sizes", [(2, 5), (4, 10), (6, 12), (8, 3)])
def test_the_timing_of_the_library_agrees_with_the_one_of_these_tests(sizes, mode):
    schedule = replace(chimera(*sizes, mode=mode), recompute=())
    for forward, backward in ((1, 1), (1, 2), (2, 3)):
        costs = StageCosts.of(schedule.stages, forward=forward, backward=backward)
        assert time_schedule(schedule, costs).makespan == makespan(schedule, forward, backward)


def test_the_first_rank_of_doubling():
    schedule = chimera(4, 8, mode="doubling")
    assert [pipe.microbatches for pipe in schedule.pipes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    expected = "F0 F1 F2 F3 F4 F5 B4 F6 F7 B5 B0 B6 B1 B7 B2 B3"
    assert texts(schedule.order[0]) == expected.split()
    assert schedule.recompute == (0, 1, 2, 3)
    assert not schedule.halves


def test_halving_is_the_table_of_doubling_in_halves():
    halves, doubled = chimera(4, 4, mode="halving"), chimera(4, 8, mode="doubling")
    assert halves.order == doubled.order
    assert halves.slots == doubled.slots
    assert halves.pipes == doubled.pipes
    assert halves.halves
    assert not halves.recompute


@pytest.mark.parametrize("mode", ["direct", "doubling", "halving"])
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_every_slot_is_used_once_whatever_the_number_of_microbatches(ranks, mode):
    """A pair of forwards shares its slot; the rows are sorted by slot and complete."""
    for pipes in (2 * f for f in pairs_of_pipes(ranks)):
        for microbatches in (1, ranks - 1, 2 * ranks, 3 * ranks + 1, 4 * ranks):
            schedule = chimera(ranks, microbatches, pipes=pipes, mode=mode)
            total = microbatches * (1 + schedule.halves)
            assert schedule.num_microbatches == total
            numbers = [m for pipe in schedule.pipes for m in pipe.microbatches]
            assert numbers == list(range(total))
            for row in schedule.order:
                assert len(set(row)) == len(row) == 2 * total
                taken = {}
                for action in row:
                    taken.setdefault(schedule.slots[action], []).append(action)
                assert list(taken) == sorted(taken)
                for actions in taken.values():
                    assert len(actions) <= 2
                    if len(actions) == 2:
                        assert mode != "direct"
                        first, second = actions
                        assert first.kind == second.kind == ActionKind.FORWARD
                        assert second == replace(first, microbatch=first.microbatch + 1)


# -- T1.2: bubbles -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_bubble_of_direct_concatenation(ranks, units):
    D, N, K = ranks, ranks * units, units
    schedule = chimera(D, N)
    assert bubble(schedule, 1, 1) == Fraction(D - 2, 2 * N + D - 2)
    assert bubble(schedule, 1, 2) == Fraction((D - 2) * (K + 1), 3 * K * D + (D - 2) * (K + 1))


@pytest.mark.parametrize("ranks", SIZES)
def test_the_bubble_of_one_unit_with_a_backward_twice_as_long(ranks):
    D = N = ranks
    expected = Fraction(D - 2) / (Fraction(3 * N, 2) + D - 2)
    assert bubble(chimera(D, N), 1, 2) == expected


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("units", [2, 4])
def test_the_bubble_of_doubling_and_halving(ranks, units):
    D, N = ranks, ranks * units
    doubled = chimera(D, N, mode="doubling")
    assert bubble(doubled, 1, 2) == Fraction(D - 2, 2 * N + D - 2)
    assert bubble(chimera(D, N // 2, mode="halving"), 1, 2) == bubble(doubled, 1, 2)


@pytest.mark.parametrize("ranks", [4, 8, 12])
@pytest.mark.parametrize("units", [2, 4])
def test_the_bubble_of_doubling_with_more_than_two_pipes(ranks, units):
    """Beyond the paper: the formula of its basic unit holds."""
    D, N = ranks, ranks * units
    for f in pairs_of_pipes(ranks):
        doubled = chimera(D, N, pipes=2 * f, mode="doubling")
        assert bubble(doubled, 1, 2) == Fraction(D - 2 * f, 2 * f * N + D - 2 * f)


@pytest.mark.parametrize("ranks", SIZES)
def test_the_bubble_of_more_than_two_pipes(ranks):
    for f in pairs_of_pipes(ranks):
        for N in (ranks, 2 * ranks):
            schedule = chimera(ranks, N, pipes=2 * f)
            D = ranks
            assert bubble(schedule, 1, 1) == Fraction(D - 2 * f, 2 * f * N + D - 2 * f)
            assert len(schedule.pipes) == 2 * f


def test_the_comparison_of_the_specification():
    assert bubble(chimera(4, 4)) == Fraction(1, 4)
    assert float(bubble(chimera(8, 8))) == pytest.approx(0.333, abs=5e-4)
    assert float(bubble(chimera(8, 16))) == pytest.approx(0.273, abs=5e-4)
    assert float(bubble(chimera(8, 32))) == pytest.approx(0.238, abs=5e-4)
    assert bubble(chimera(4, 4, pipes=4)) == 0
    assert float(bubble(chimera(8, 8, pipes=4))) == pytest.approx(0.143, abs=5e-4)
    assert float(bubble(chimera(8, 16, pipes=4))) == pytest.approx(0.111, abs=5e-4)
    assert float(bubble(chimera(8, 32, pipes=4))) == pytest.approx(0.094, abs=5e-4)
    assert float(bubble(chimera(8, 32, mode="doubling"))) == pytest.approx(0.086, abs=5e-4)


# -- T1.3, T1.4, T1.5, T1.6 --------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SIZES)
def test_activations_are_balanced(ranks):
    D = ranks
    for f in pairs_of_pipes(ranks):
        for units in (1, 2, 3):
            schedule = chimera(D, units * D, pipes=2 * f)
            peaks = activations(schedule)
            assert (min(peaks), max(peaks)) == (D - D // (2 * f) + 1, D)
            assert peaks[0] == peaks[-1] == min(peaks)
            assert schedule.most_activations == D
            assert all(len(schedule.hosted(rank)) == 2 * f for rank in range(D))


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_activations_of_doubling(ranks):
    peaks = activations(chimera(ranks, 2 * ranks, mode="doubling"))
    assert (min(peaks), max(peaks)) == (3 * ranks // 2 + 1, 2 * ranks)


@pytest.mark.parametrize("mode", ["direct", "doubling", "halving"])
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_the_declared_bound_holds(ranks, mode):
    for pipes in (2 * f for f in pairs_of_pipes(ranks)):
        for microbatches in range(1, 4 * ranks + 2, 1 + ranks // 4):
            schedule = chimera(ranks, microbatches, pipes=pipes, mode=mode)
            assert max(activations(schedule)) <= schedule.most_activations
            whole = ranks if mode == "direct" else 2 * ranks
            assert schedule.most_activations <= min(schedule.num_microbatches, whole)


@pytest.mark.parametrize("ranks", SIZES)
def test_the_critical_path_has_D_forwards_and_2D_minus_2_backwards(ranks):
    """What one more unit of a forward, or of a backward, adds to the step."""
    schedule = chimera(ranks, ranks)
    whole = makespan(schedule, 1000, 2000)
    assert makespan(schedule, 1001, 2000) - whole == ranks
    assert makespan(schedule, 1000, 2001) - whole == 2 * ranks - 2


@pytest.mark.parametrize(
    ("ranks", "idle"),
    [(4, {3: 3, 2: 0}), (6, {5: 6, 4: 2, 3: 0}), (8, {7: 9, 6: 4, 5: 2, 4: 0})],
)
def test_the_idle_time_behind_a_stage_tells_which_are_sent_early(ranks, idle):
    """From the last backward of the larger stage of a rank to the rank's end, without work."""
    schedule = chimera(ranks, ranks)
    ends = play(schedule)
    for stage, expected in idle.items():
        for rank in schedule.holders(stage):
            row = [
                (ends[a.kind == ActionKind.FORWARD, a.pipe, a.stage, a.microbatch], a)
                for a in schedule.order[rank]
            ]
            ready = max(end for end, action in row if action.stage == stage)
            busy = sum(1 if a.kind == ActionKind.FORWARD else 2 for end, a in row if end > ready)
            assert row[-1][0] - ready - busy == expected


@pytest.mark.parametrize(("microbatches", "expected"), [(1, 0.75), (2, 0.5), (3, 0.4375)])
def test_fewer_microbatches_than_stages(microbatches, expected):
    assert float(bubble(chimera(4, microbatches))) == expected


def test_fewer_microbatches_are_spread_and_empty_pipes_left_out():
    assert [p.microbatches for p in chimera(4, 3).pipes] == [(0, 1), (2,)]
    assert [p.name for p in chimera(4, 1).pipes] == ["d0"]
    assert [p.name for p in chimera(8, 3, pipes=4).pipes] == ["d0", "d1", "u0"]


def test_a_last_unit_that_is_not_full():
    schedule = chimera(4, 6)
    assert [p.microbatches for p in schedule.pipes] == [(0, 1, 2), (3, 4, 5)]
    assert makespan(schedule, 1, 1) == 16
    whole = chimera(4, 4).slots
    assert all(schedule.slots[a] == whole[a] for a in whole if a.pipe == "d0")
    assert schedule.slots[Action.parse("d0.s0.F.2")] == 8
    assert schedule.slots[Action.parse("u0.s0.B.5")] == 8 + 7


def test_an_odd_number_of_units_doubles_all_but_the_last():
    doubled, whole = chimera(4, 12, mode="doubling"), chimera(4, 8, mode="doubling")
    numbers = texts(doubled.order[0])
    assert len(numbers) == 24
    pairs = [
        (a.microbatch, b.microbatch)
        for a, b in zip(doubled.order[0], doubled.order[0][1:], strict=False)
        if doubled.slots[a] == doubled.slots[b]
    ]
    assert pairs == [(0, 1), (2, 3), (6, 7), (8, 9)]
    assert max(whole.slots.values()) < max(doubled.slots.values()) == 12 + 9


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"ranks": 5}, "5 ranks: Chimera needs an even number of stages; take 4 or 6"),
        ({"ranks": 1}, "1 ranks: Chimera needs an even number of stages; take 2"),
        ({"ranks": 0}, "0 ranks: Chimera needs an even number of stages; take 2"),
        ({"pipes": 3}, "3 pipes: with 12 ranks there can be 2, 4, 6, 12 (twice a divisor of 6)"),
        ({"pipes": 8}, "8 pipes: with 12 ranks there can be 2, 4, 6, 12 (twice a divisor of 6)"),
        ({"pipes": 0}, "0 pipes: with 12 ranks there can be 2, 4, 6, 12 (twice a divisor of 6)"),
        ({"microbatches": 0}, "0 micro-batches: there must be at least 1"),
        ({"mode": "doublin"}, "unknown mode doublin; did you mean doubling?"),
    ],
)
def test_what_cannot_be_is_refused_with_the_legal_numbers(sizes, said):
    with pytest.raises(PlanError) as caught:
        chimera(**{"ranks": 12, "microbatches": 4} | sizes)
    assert caught.value.problems == (said,)


def test_all_problems_come_together():
    with pytest.raises(PlanError) as caught:
        chimera(4, -1, pipes=8, mode="no")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("named", [{"schedule": "chimera-halving"}, {"mode": "halving"}])
def test_a_plan_halves_even_numbers_of_micro_batches_alone(named):
    """By its name as by its option: a ragged batch of an odd number is not halved."""
    pipeline = PipelinePlan(**{"schedule": "chimera", **named})
    assert pipeline.make(4, 8).num_microbatches == 8
    assert pipeline.make(4, 8).halves
    assert pipeline.make(4, 7).num_microbatches == 7
    assert not pipeline.make(4, 7).halves
