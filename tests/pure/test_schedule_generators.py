"""pure: each schedule's order, bubble and memory against the formulas and tables of its source."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from headway.errors import PlanError
from headway.schedule.generators.dualpipe import dualpipe, dualpipe_v
from headway.schedule.generators.gpipe_and_1f1b import (
    gems,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
)
from headway.schedule.generators.interleaved import breadth_first, interleaved
from headway.schedule.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zbv
from headway.schedule.pipeline_schedule import ActionKind
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import measure_schedule
from support.exact_play import cells, play, play_schedule

GENERATORS = {
    f.__name__: f
    for f in (
        gpipe,
        one_f_one_b,
        gems,
        interleaved,
        breadth_first,
        zb_h1,
        interleaved_zero_bubble,
        zbv,
        dualpipe,
        dualpipe_v,
        pipedream,
        pipedream_2bw,
    )
}
LEGAL = {
    "gems": lambda D, N: D % 2 == 0,
    "dualpipe": lambda D, N: D % 2 == 0 and N % 2 == 0 and N >= 2 * D,
    "dualpipe_v": lambda D, N: N >= 2 * D,
}
DEPTHS = (2, 3, 4, 6, 8, 10, 12, 16, 32)
each = pytest.mark.parametrize("name", GENERATORS)


def legal(name, D, N):
    return LEGAL.get(name, lambda D, N: True)(D, N)


def sizes(name):
    """Every legal size up to a few more micro-batches than twice the ranks; N < D, odd N too."""
    depths = (1, 2, 3, 4, 5, 8)
    pairs = [(D, N) for D in depths for N in (*range(1, 2 * D + 3), 4 * D + 1)]
    return [(D, N) for D, N in pairs if legal(name, D, N)]


def rows(schedule):
    """Each rank's order: stage, kind, micro-batch; the pipe only where there are several."""
    several = len(schedule.pipes) > 1

    def text(a):
        return (f"{a.pipe}." if several else "") + f"{a.stage}{a.kind}{a.microbatch}"

    return [" ".join(map(text, order)) for order in schedule.order]


# ---- what holds for all -----------------------------------------------------------------------


@each
def test_every_cell_is_there_once_and_in_its_place(name):
    for D, N in sizes(name):
        schedule = GENERATORS[name](D, N)
        found = Counter(
            (a.kind, a.pipe, a.stage, a.microbatch) for order in schedule.compute for a in order
        )
        assert set(found.values()) == {1}
        for pipe in schedule.pipes:
            for stage in range(schedule.stages):
                for number in pipe.microbatches:
                    key = pipe.name, stage, number
                    kinds = {kind for kind in ActionKind if found.pop((kind, *key), 0)}
                    assert kinds in ({ActionKind.FORWARD, ActionKind.BACKWARD}, set("FIW")), (
                        D,
                        N,
                        key,
                    )
        assert not found
        assert all(schedule.rank_of(a) == rank for rank, a in schedule.actions())
        assert not schedule.is_lowered
        numbers = [m for pipe in schedule.pipes for m in pipe.microbatches]
        assert numbers == list(range(N))


@each
def test_gradients_of_a_stage_are_summed_in_the_order_of_a_serial_run(name):
    for D, N in sizes(name):
        schedule = GENERATORS[name](D, N)
        for order in schedule.compute:
            seen = {}
            for a in order:
                seen.setdefault((a.pipe, a.stage, a.kind in "BW", a.kind in "BI"), []).append(a)
            for actions in seen.values():
                assert actions == sorted(actions, key=lambda a: a.microbatch), (D, N)


@each
def test_no_table_gets_stuck_and_the_declared_memory_is_what_is_needed(name):
    for D, N in sizes(name):
        schedule = GENERATORS[name](D, N)
        assert max(play_schedule(schedule).peaks) == pytest.approx(schedule.most_activations)


@each
def test_both_simulators_agree(name):
    for D, N in [(D, N) for D, N in sizes(name) if N in (D - 1, D, 2 * D + 2)]:
        schedule = GENERATORS[name](D, N)
        for cost in ((1, 1, 1), (2, 3, 1)):
            price = dict(zip(("forward", "input_grad", "weight_grad"), cost, strict=True))
            costs = StageCosts.of(schedule.stages, ranks=D, **price)
            ours, theirs = measure_schedule(schedule, costs), play_schedule(schedule, cost)
            assert ours.makespan == pytest.approx(float(theirs.makespan))
            assert ours.bubble == pytest.approx(float(theirs.bubble))
            assert ours.peak_activations == pytest.approx([float(p) for p in theirs.peaks])


@each
def test_illegal_sizes_are_refused_with_the_reason(name):
    generate = GENERATORS[name]
    for D in range(-1, 9):
        for N in range(-1, 20):
            if D >= 1 and N >= 1 and legal(name, D, N):
                generate(D, N)
                continue
            with pytest.raises(PlanError) as caught:
                generate(D, N)
            assert caught.value.problems
            assert caught.value.fix


@pytest.mark.parametrize(
    ("generate", "size", "fix"),
    [
        (dualpipe, (3, 4), "for 4 ranks, use an even number of micro-batches from 8 on"),
        (dualpipe, (4, 9), "for 4 ranks, use an even number of micro-batches from 8 on"),
        (dualpipe_v, (4, 7), "use at least 8 micro-batches, or zbv"),
        (gems, (3, 4), "use 2 or 4 ranks"),
        (gems, (0, 4), "give at least one rank and one micro-batch"),
    ],
)
def test_a_refusal_names_legal_numbers_that_are_legal(generate, size, fix):
    with pytest.raises(PlanError) as caught:
        generate(*size)
    assert caught.value.fix == fix


def test_all_reasons_come_at_once():
    with pytest.raises(PlanError) as caught:
        dualpipe(5, 7)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("generate", "instead"),
    [(interleaved, "1f1b"), (breadth_first, "gpipe"), (interleaved_zero_bubble, "zb-h1")],
)
def test_a_loop_of_one_stage_is_refused(generate, instead):
    with pytest.raises(PlanError, match=instead):
        generate(4, 8, virtual=1)


# ---- small tables by hand ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (gpipe(2, 2), ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        (
            one_f_one_b(3, 4),
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        (one_f_one_b(3, 1), ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
        (
            gems(2, 3),
            [
                "d0.0F0 d0.0B0 u0.1F2 u0.1B2 d0.0F1 d0.0B1",
                "d0.1F0 d0.1B0 u0.0F2 u0.0B2 d0.1F1 d0.1B1",
            ],
        ),
        (gems(2, 1), ["0F0 0B0", "1F0 1B0"]),
        (
            interleaved(2, 4),
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
        (
            breadth_first(2, 2),
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"],
        ),
        (
            zb_h1(3, 3),
            [
                "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
                "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
                "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
            ],
        ),
        (
            zbv(2, 3),
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
                "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
            ],
        ),
        (
            dualpipe(2, 4),
            [
                "d0.0F0 u0.1F2 d0.0F1 u0.1B2 u0.1F3 d0.0B0 u0.1B3 d0.0I1 d0.0W1",
                "u0.0F2 d0.1F0 u0.0F3 d0.1B0 d0.1F1 u0.0B2 d0.1B1 u0.0I3 u0.0W3",
            ],
        ),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_small_tables(schedule, table):
    assert rows(schedule) == table


# ---- bubble ratios and memory -----------------------------------------------------------------


@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 1, 1)], ids=["B=2F", "F=B"])
@pytest.mark.parametrize("D", DEPTHS)
def test_gpipe_and_1f1b(D, cost):
    counts = {D, 2 * D, 3 * D, 4 * D, 8 * D, 1, D - 1, D // 2, D + 1}
    for N in counts:
        for generate in (gpipe, one_f_one_b):
            played = play_schedule(generate(D, N), cost)
            assert played.bubble == Fraction(D - 1, N + D - 1)
            held = [N if generate is gpipe else min(D - stage, N) for stage in range(D)]
            assert list(played.peaks) == held


@pytest.mark.parametrize("D", [2, 4, 6, 8, 16])
def test_gems(D):
    for N in (1, 2, 3, 160):
        played = play_schedule(gems(D, N))
        assert played.makespan == N * (2 * D + 1) + D - 1
        assert set(played.peaks) == {1}
    assert played.bubble == pytest.approx((D - 1) / (D + 0.5), abs=0.01)


def test_gems_has_two_micro_batches_active_at_most():
    played = play_schedule(gems(4, 9))
    starts, ends = {}, {}
    for (_, _, _, number), (start, end) in played.spans.items():
        starts[number] = min(start, starts.get(number, start))
        ends[number] = max(end, ends.get(number, end))
    active = [sum(starts[m] <= time < ends[m] for m in starts) for time in starts.values()]
    assert max(active) == 2


@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_loops_have_the_bubble_of_the_formula_for_every_number_from_the_ranks_on(virtual):
    v = virtual
    for D in (1, 2, 3, 4, 8):
        for N in (*range(D, 2 * D + 2), 3 * D + 1, 4 * D):
            whole = Fraction(D - 1, v * N + D - 1)
            assert play_schedule(interleaved(D, N, virtual=v)).bubble == whole
            assert play_schedule(breadth_first(D, N, virtual=v)).bubble == whole
            split = play_schedule(interleaved_zero_bubble(D, N, virtual=v))
            assert split.bubble == Fraction(D - 1, 3 * v * N + D - 1)
            if N % D == 0:
                assert set(split.peaks) == {D}


def test_interleaved_runs_ahead_as_megatron_does():
    """Where D divides N: (v-1)D + 2(D-1-r) forwards, and one more before the first backward."""
    D, N, v = 4, 8, 3
    for rank, order in enumerate(interleaved(D, N, virtual=v).order):
        first = [a.kind for a in order].index(ActionKind.BACKWARD)
        assert first == (v - 1) * D + 2 * (D - 1 - rank) + 1


@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 6, 8, 12])
def test_zero_bubble_formulas(D):
    for N in (2 * D, 2 * D + 1, 3 * D, 4 * D + 1):
        assert play_schedule(zb_h1(D, N)).bubble == Fraction(D - 1, 3 * N + D - 1)
        assert set(play_schedule(zb_h1(D, N)).peaks) == {D}
        for generate, held in ((zbv, D), (dualpipe_v, D + Fraction(1, 2))):
            played = play_schedule(generate(D, N))
            assert played.bubble == Fraction(D - 1, 6 * N + D - 1)
            assert set(played.peaks) == {held}


@pytest.mark.parametrize("D", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 3, 1), (1, 2, 2), (3, 3, 1)])
def test_dualpipe_bubble(D, cost):
    """(D/2-1)(F&B + B - 3W) where a pair is one unit; never more where it is two actions."""
    F, B, W = cost[0], cost[1] + cost[2], cost[2]
    formula = (D // 2 - 1) * ((F + B) + B - 3 * W)
    for N in (2 * D, 2 * D + 2, 4 * D):
        schedule, busy = dualpipe(D, N), N * (F + B)
        assert play(in_pairs(schedule), D, cost).makespan - busy == formula
        played = play_schedule(schedule, cost)
        assert played.makespan - busy <= formula
        if len(set(cost)) == 1:
            assert played.makespan - busy == (D // 2 - 1) * F
        assert set(played.peaks) == {D + 1}


def in_pairs(schedule):
    """A forward and the whole backward behind it become one unit."""
    orders = []
    for order in cells(schedule):
        units = []
        for unit in order:
            pair = unit[0][0] == "B" and units and [cell[0] for cell in units[-1]] == ["F"]
            units[-1:] = [units[-1] + unit] if pair else [*units[-1:], unit]
        orders.append(units)
    return orders


@pytest.mark.parametrize(
    ("D", "N", "generate", "bubble", "held"),
    [
        (4, 4, gpipe, 0.429, (4, 4)),
        (4, 4, one_f_one_b, 0.429, (1, 4)),
        (4, 4, interleaved, 0.273, (2.5, 4)),
        (4, 4, interleaved_zero_bubble, 0.111, (4, 4)),
        (4, 4, zbv, 0.200, (2.5, 4)),
        (4, 8, one_f_one_b, 0.273, (1, 4)),
        (4, 8, interleaved, 0.158, (2.5, 5.5)),
        (4, 8, interleaved_zero_bubble, 0.059, (4, 4)),
        (4, 8, zbv, 0.059, (4, 4)),
        (4, 8, dualpipe_v, 0.059, (4.5, 4.5)),
        (8, 8, one_f_one_b, 0.467, (1, 8)),
        (8, 8, interleaved, 0.304, (4.5, 8)),
        (8, 8, interleaved_zero_bubble, 0.127, (8, 8)),
        (8, 8, zbv, 0.226, (4.5, 8)),
        (8, 16, one_f_one_b, 0.304, (1, 8)),
        (8, 16, interleaved, 0.179, (4.5, 11.5)),
        (8, 16, interleaved_zero_bubble, 0.068, (8, 8)),
        (8, 16, zbv, 0.068, (8, 8)),
        (8, 16, dualpipe_v, 0.068, (8.5, 8.5)),
        (8, 32, one_f_one_b, 0.179, (1, 8)),
        (8, 32, interleaved, 0.099, (4.5, 11.5)),
        (8, 32, interleaved_zero_bubble, 0.035, (8, 8)),
        (8, 32, zbv, 0.035, (8, 8)),
        (8, 32, dualpipe_v, 0.035, (8.5, 8.5)),
    ],
)
def test_the_published_comparison(D, N, generate, bubble, held):
    """F = 1, B = 2, I = W = 1; two stages per rank where a rank has several."""
    played = play_schedule(generate(D, N))
    assert round(float(played.bubble), 3) == bubble
    assert (min(played.peaks), max(played.peaks)) == held


@pytest.mark.parametrize("D", [2, 3, 4, 8])
def test_zbv_with_few_micro_batches_only_loses_cells(D):
    """The program of 2D-1 micro-batches without those that are not there; W may come earlier."""
    full = zbv(D, 2 * D - 1)
    for N in range(1, 2 * D - 1):
        few = zbv(D, N)
        for mine, whole in zip(few.order, full.order, strict=True):
            kept = [a for a in whole if a.microbatch < N]
            assert [a for a in mine if a.kind != "W"] == [a for a in kept if a.kind != "W"]
        assert play_schedule(few).makespan < play_schedule(full).makespan
