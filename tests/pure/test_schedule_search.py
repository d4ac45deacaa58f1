"""pure: filled and searched tables against formulas, brute force, the memory bound and the seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from headway.errors import PlanError, UsageError
from headway.planner.schedule_search.placements import PLACEMENTS, costs_of, make_placement
from headway.planner.schedule_search.tables import (
    ListProblem,
    ScheduleSearchBudget,
    TableCandidate,
    UrgencyPolicy,
    earliest_starts,
    improve_table,
    known_tables,
    lower_bound,
    random_urgency,
    search_schedule,
)
from headway.schedule.check import schedule_violations
from headway.schedule.generators.chimera import chimera
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import Action, ActionKind
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import measure_schedule, peak_activations
from headway.schedule.timing import ScheduleTimer, time_schedule
from headway.schedule.weight_gradients import fill_with_weight_gradients
from support.exact_play import play_schedule

FLUSHED = [name for name in SCHEDULES if not name.startswith("pipedream")]
QUICK = ScheduleSearchBudget(lists=40, moves=200)
UNEQUAL = StageCosts.of(4, forward=(1.0, 1.5, 1.0, 0.75), latency=0.1, message=0.05)


def makespan(schedule, costs):
    return time_schedule(schedule, costs).makespan


# ---- weight gradients in the bubbles ----------------------------------------------------------


@pytest.mark.parametrize("D", [2, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_split_chimera_has_the_bubble_of_its_formula(D, K):
    N = K * D
    schedule = make_schedule("chimera-split", stages=D, microbatches=N)
    played = play_schedule(schedule, (1, 1, 1))
    assert played.makespan == 3 * N + D / 2 - 1
    assert played.bubble == pytest.approx((D - 2) / (6 * N + D - 2))
    assert max(played.peaks) == D == schedule.most_activations
    assert schedule_violations(schedule) == ()
    layout = make_placement("both-directions", D, N, StageCosts.of(D))
    assert lower_bound(layout, D) == played.makespan


def test_four_pipes_fill_almost_everything():
    for D, N, expected in ((4, 8, 24), (8, 8, 25), (8, 16, 49)):
        schedule = make_schedule("chimera-split", stages=D, microbatches=N, pipes=4)
        assert makespan(schedule, StageCosts.of(D)) == expected


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 9), (4, 10)])
def test_filling_never_costs_time_or_memory(name, stages, microbatches):
    try:
        given = make_schedule(name, stages=stages, microbatches=microbatches)
    except PlanError:
        return
    draw = random.Random(name)
    for _ in range(4):
        times = {
            part: [draw.choice((0.5, 1.0, 1.5, 2.0)) for _ in range(given.stages)]
            for part in ("forward", "input_grad", "weight_grad")
        }
        costs = StageCosts.of(
            given.stages, ranks=stages, **times, latency=draw.choice((0, 0.3)), overhead=0.01
        )
        filled = fill_with_weight_gradients(given, costs)
        assert schedule_violations(filled) == ()
        assert makespan(filled, costs) <= makespan(given, costs) + 1e-9
        assert max(peak_activations(filled, costs)) <= max(peak_activations(given, costs))


def test_forwards_and_input_gradients_keep_their_order():
    given = chimera(4, 8)
    filled = fill_with_weight_gradients(given, StageCosts.of(4))
    for before, after in zip(given.order, filled.order, strict=True):
        kept = [a for a in after if a.kind != ActionKind.WEIGHT_GRAD]
        assert [replace(a, kind=ActionKind.FORWARD) for a in kept] == [
            replace(a, kind=ActionKind.FORWARD) for a in before
        ]
    assert filled.name == "chimera-split"


def test_filling_uses_memory_that_it_is_given_and_no_more():
    given, costs = make_schedule("1f1b", stages=4, microbatches=8), StageCosts.of(4)
    spans = []
    for most in (4, 5, 6, 8):
        filled = fill_with_weight_gradients(given, costs, most)
        assert max(peak_activations(filled, costs)) <= most
        spans.append(makespan(filled, costs))
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == 27


def test_a_table_where_the_split_does_not_pay_is_given_back():
    given = make_schedule("1f1b", stages=2, microbatches=4)
    costs = StageCosts.of(2, forward=0.01, overhead=1.0)
    assert fill_with_weight_gradients(given, costs) is given


def test_what_cannot_be_filled_is_refused_with_the_reason():
    costs = StageCosts.of(4)
    stale = make_schedule("pipedream", stages=4, microbatches=4)
    with pytest.raises(PlanError, match="no flush"):
        fill_with_weight_gradients(stale, costs)
    with pytest.raises(PlanError, match="before `lower`"):
        fill_with_weight_gradients(lower(chimera(4, 4)), costs)
    with pytest.raises(PlanError, match="holds 4 activations on a rank, at most 3 are"):
        fill_with_weight_gradients(chimera(4, 4), costs, 3)


# ---- the lower bound and small cases by brute force -------------------------------------------


def can_be_done(layout, most, steps):
    """Whether any table ends in so many steps, where all actions take one: all of them at once.

    A state is how many actions of each (kind, pipe, stage) have been done; in a step every rank
    does one of those that are possible, or nothing. States that cannot end in time are left out.
    """
    pipes = {pipe.name: pipe for pipe in layout.pipes}
    visits = [
        (kind, p.name, s)
        for p in layout.pipes
        for s in range(len(p.placement))
        for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
    ]
    number = {visit: i for i, visit in enumerate(visits)}
    total = [len(pipes[name].microbatches) for _, name, _ in visits]
    own = [
        [i for i, (_, name, s) in enumerate(visits) if pipes[name].placement[s] == rank]
        for rank in range(layout.ranks)
    ]

    def before(i):
        kind, name, s = visits[i]
        last = len(pipes[name].placement) - 1
        if kind == ActionKind.FORWARD:
            return [number[ActionKind.FORWARD, name, s - 1]] if s else []
        if kind == ActionKind.WEIGHT_GRAD:
            return [number[ActionKind.INPUT_GRAD, name, s]]
        later = [number[ActionKind.INPUT_GRAD, name, s + 1]] if s < last else []
        return [number[ActionKind.FORWARD, name, s], *later]

    needs = [before(i) for i in range(len(visits))]
    sizes = [layout.costs.activation[s] for _, _, s in visits]

    def choices(state, rank):
        held = sum(
            sizes[i] * (state[i] - state[i + 2])
            for i in own[rank]
            if visits[i][0] == ActionKind.FORWARD
        )
        yield None
        for i in own[rank]:
            fits = visits[i][0] != ActionKind.FORWARD or held + sizes[i] <= most + 1e-9
            if fits and state[i] < total[i] and all(state[j] > state[i] for j in needs[i]):
                yield i

    states = {(0,) * len(visits)}
    for step in range(steps):
        following = set()
        for state in states:
            for chosen in itertools.product(*(choices(state, r) for r in range(layout.ranks))):
                new = list(state)
                for i in chosen:
                    if i is not None:
                        new[i] += 1
                left = steps - step - 1
                if all(sum(total[i] - new[i] for i in own[r]) <= left for r in range(len(own))):
                    following.add(tuple(new))
        states = following
    return tuple(total) in states


@pytest.mark.parametrize("placement", ["straight", "v", "loop", "both-directions", "both-v"])
@pytest.mark.parametrize(
    ("D", "N", "most"), [(2, 2, 1), (2, 2, 2), (2, 3, 2), (2, 4, 1.5), (2, 4, 2), (2, 5, 1.5)]
)
def test_small_searches_find_the_best_of_all_tables(placement, D, N, most):
    costs = StageCosts.of(D)
    layout = make_placement(placement, D, N, costs)
    step = layout.costs.forward[0]
    found = search_schedule(D, N, costs, most_activations=most, placements=[placement])
    steps = round(found.makespan / step)
    assert steps * step == pytest.approx(found.makespan)
    assert found.bound <= found.makespan + 1e-9
    assert can_be_done(layout, most, steps)
    assert not can_be_done(layout, most, steps - 1)


@pytest.mark.parametrize(("placement", "gap"), [("straight", 0), ("v", 0), ("loop", 0.5)])
def test_on_three_ranks_a_loop_is_missed_by_one_step(placement, gap):
    costs = StageCosts.of(3)
    layout = make_placement(placement, 3, 3, costs)
    found = search_schedule(3, 3, costs, most_activations=2, placements=[placement])
    best = found.makespan - gap
    steps = round(best / layout.costs.forward[0])
    assert not can_be_done(layout, 2, steps - 1)
    assert gap or can_be_done(layout, 2, steps)


def rows_of(layout, rank):
    """All orders of a rank in which micro-batches ascend and F, I, W of each follow each other."""
    lanes = [
        (pipe, s) for pipe in layout.pipes for s, at in enumerate(pipe.placement) if at == rank
    ]

    def extend(row, done):
        if len(row) == 3 * sum(len(pipe.microbatches) for pipe, _ in lanes):
            yield tuple(row)
        for pipe, s in lanes:
            for kind, earlier in zip("FIW", " FI", strict=True):
                k = done.get((pipe.name, s, kind), 0)
                ready = kind == "F" or done.get((pipe.name, s, earlier), 0) > k
                if k < len(pipe.microbatches) and ready:
                    action = Action(ActionKind(kind), pipe.name, s, pipe.microbatches[k])
                    yield from extend([*row, action], {**done, (pipe.name, s, kind): k + 1})

    return list(extend([], {}))


@pytest.mark.parametrize(
    ("placement", "N", "most"),
    [("straight", 2, 2), ("straight", 3, 2), ("straight", 3, 3), ("both-directions", 2, 2)],
)
def test_with_unequal_costs_the_best_of_all_orders_is_found(placement, N, most):
    draw = random.Random(N)
    for _ in range(2):
        numbers = [[draw.randint(1, 5) for _ in range(2)] for _ in range(3)]
        costs = StageCosts.of(
            2,
            forward=numbers[0],
            input_grad=numbers[1],
            weight_grad=numbers[2],
            latency=draw.choice((0.0, 0.5)),
            slowness=(1.0, draw.choice((1.0, 1.3))),
        )
        layout = make_placement(placement, 2, N, costs)
        timer = ScheduleTimer(layout.plain_table(), costs)
        number = {action: cell for cell, action in enumerate(timer.wiring.actions)}
        within = [
            [[number[a] for a in row] for row in rows_of(layout, rank) if max(held(row)) <= most]
            for rank in range(2)
        ]
        best = min(timer.makespan(order) for order in itertools.product(*within))
        found = search_schedule(2, N, costs, most_activations=most, placements=[placement])
        assert found.makespan == pytest.approx(best)
        assert lower_bound(layout, most) <= best + 1e-9


def held(row):
    step = {ActionKind.FORWARD: 1, ActionKind.WEIGHT_GRAD: -1}
    return list(itertools.accumulate(step.get(action.kind, 0) for action in row))


# ---- searches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("most", [1.5, 2.5, 4.0])
def test_results_are_legal_within_memory_and_never_worse_than_known_tables(placement, most):
    layout = make_placement(placement, 4, 6, UNEQUAL)
    found = search_schedule(
        4, 6, UNEQUAL, most_activations=most, placements=[placement], budget=QUICK
    )
    assert schedule_violations(found.schedule) == ()
    stats = measure_schedule(found.schedule, found.costs)
    assert stats.makespan == pytest.approx(found.makespan)
    assert max(stats.peak_activations) <= most + 1e-9
    assert found.bound <= found.makespan
    known = [makespan(table, layout.costs) for table in known_tables(layout, most)]
    assert found.makespan <= min(known, default=float("inf"))
    steps = [improvement.makespan for improvement in found.trail]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == found.makespan
    assert not known or steps[0] == pytest.approx(min(known))
    ascending(found.schedule)


def ascending(schedule):
    """Gradients of a stage are summed in the order of a serial run."""
    seen = {}
    for _, action in schedule.actions():
        visit = action.kind, action.pipe, action.stage
        assert seen.get(visit, -1) < action.microbatch
        seen[visit] = action.microbatch


def test_known_tables_respect_the_bound():
    for placement, D, N in itertools.product(PLACEMENTS, (4,), (4, 8)):
        layout = make_placement(placement, D, N, StageCosts.of(D))
        for most in (1, 3, 4, 5):
            for table in known_tables(layout, most):
                assert max(peak_activations(table, layout.costs)) <= most
                assert schedule_violations(table) == ()


def test_the_seed_decides_alone():
    def search(seed):
        return search_schedule(
            4,
            8,
            UNEQUAL,
            most_activations=4,
            placements=["w"],
            budget=replace(QUICK, seed=seed),
        )

    assert search(1) == search(1)
    assert search(1).schedule.order != search(2).schedule.order


@pytest.mark.parametrize(("D", "N"), [(4, 4), (4, 8), (8, 8)])
def test_one_copy_is_never_worse_than_zbv_and_two_are_better(D, N):
    zbv = makespan(make_schedule("zbv", stages=D, microbatches=N), StageCosts.of(2 * D, ranks=D))
    one = search_schedule(D, N, StageCosts.of(D), most_activations=D, placements=("straight", "v"))
    two = search_schedule(D, N, StageCosts.of(D), most_activations=D)
    assert one.makespan == 3 * N + (D - 1) / 2 <= zbv
    assert two.makespan == 3 * N + D / 2 - 1 < zbv
    assert one.is_optimal
    assert two.is_optimal
    if N == D:
        assert one.makespan <= 0.9 * zbv


@pytest.mark.parametrize("slow", range(4))
def test_an_unequal_stage_costs_a_tenth_less_than_in_named_tables(slow):
    costs = StageCosts.of(4, forward=[1.5 if s == slow else 1.0 for s in range(4)])
    budget = ScheduleSearchBudget(lists=150, moves=1500)
    found = search_schedule(4, 8, costs, most_activations=4, placements=["w"], budget=budget)
    for name in ("1f1b", "interleaved"):
        rival = make_schedule(name, stages=4, microbatches=8)
        assert found.makespan <= 0.9 * makespan(rival, costs_of(rival.stages, costs))


def test_a_slow_rank_is_searched_too():
    costs = StageCosts.of(4, slowness=(1.0, 1.0, 2.0, 1.0))
    found = search_schedule(4, 8, costs, most_activations=4, placements=["v"], budget=QUICK)
    zbv = makespan(make_schedule("zbv", stages=4, microbatches=8), costs_of(8, costs))
    assert found.bound <= found.makespan <= zbv


def test_a_time_limit_ends_a_search():
    budget = ScheduleSearchBudget(lists=10**9, moves=10**9, seconds=0.2)
    found = search_schedule(4, 4, UNEQUAL, most_activations=2, placements=["v"], budget=budget)
    assert schedule_violations(found.schedule) == ()


def test_refusals():
    costs = StageCosts.of(4)
    with pytest.raises(UsageError, match="did you mean straight"):
        search_schedule(4, 4, costs, most_activations=4, placements=["strait"])
    with pytest.raises(PlanError, match="holds at most 0"):
        search_schedule(4, 4, costs, most_activations=0.4, budget=QUICK)
    with pytest.raises(ValueError, match="a rank"):
        search_schedule(0, 4, costs, most_activations=4)
    with pytest.raises(ValueError, match="costs of 3 stages"):
        costs_of(4, StageCosts.of(3))


# ---- parts ------------------------------------------------------------------------------------


def test_cutting_and_joining_stages_keeps_the_model():
    once = replace(UNEQUAL, sync=(1.0, 2.0, 3.0, 4.0))
    for stages in (8, 16):
        cut = costs_of(stages, once)
        for part in ("forward", "input_grad", "weight_grad", "activation", "weight", "sync"):
            assert sum(getattr(cut, part)) == pytest.approx(sum(getattr(once, part)))
        assert cut.message == (0.05,) * stages
        assert costs_of(4, cut) == once


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_careful_lists_never_get_stuck(placement):
    for D, N, most in ((2, 3, 1), (4, 6, 1), (4, 6, 2.25), (6, 6, 3)):
        problem = ListProblem(make_placement(placement, D, N, StageCosts.of(D)), most)
        solo, draw = earliest_starts(problem), random.Random(0)
        for _ in range(5):
            order = problem.run(UrgencyPolicy(random_urgency(problem, solo, draw)))
            assert order is not None
            assert problem.timer.makespan(order) < float("inf")


def test_local_search_mends_a_bad_table():
    layout = make_placement("straight", 3, 4, StageCosts.of(3))
    timer = ScheduleTimer(layout.plain_table(), layout.costs)
    start = TableCandidate(timer.makespan(), timer, timer.wiring.order)
    better = improve_table(start, 4, moves=3000, draw=random.Random(0))
    assert start.makespan > better.makespan == lower_bound(layout, 4)
