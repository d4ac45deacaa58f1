"""pure: tables as the search plays them, against `schedule.timing`; bounds below every table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.pipeline_time import (
    make_periodic_table,
    one_f_one_b_timetable,
    timetable_of,
)
from headway.planner.search.bounds import one_f_one_b_lower_bound, step_lower_bound
from headway.schedule.generators.registry import (
    PLAIN,
    SCHEDULE_OPTIONS,
    ScheduleOption,
    make_schedule,
    schedule_option,
    schedule_options,
)
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import ActionKind
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import peak_activations
from headway.schedule.timing import (
    WIDE,
    FixedOrder,
    OneFOneBOrder,
    StageMessages,
    StagePasses,
    time_schedule,
)

SIZES = [(2, 2), (2, 5), (4, 3), (4, 4), (4, 8), (4, 12), (8, 16)]


def table_of(scheme, ranks, microbatches):
    return make_schedule(
        scheme.name,
        stages=ranks,
        microbatches=microbatches,
        virtual=scheme.virtual,
        pipes=scheme.pipes,
    )


def costs_of(random, stages, *, sync=True):
    forward, inputs, weights = random.uniform(0.5, 2.0, (3, stages))
    return StageCosts(
        forward=tuple(forward),
        input_grad=tuple(inputs),
        weight_grad=tuple(weights),
        latency=0.05,
        message=tuple(random.uniform(0.0, 1.5, stages)),
        sync=tuple(random.uniform(0.0, 3.0, stages)) if sync else (),
        activation=tuple(random.uniform(0.5, 2.0, stages)),
        weight=(1.0,) * stages,
    )


def work_of(costs):
    backward = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    return StagePasses(costs.forward, backward, costs.weight_grad)


def wire_of(costs):
    borders = costs.stages - 1
    return StageMessages([costs.latency] * borders, costs.message[:borders])


@pytest.mark.parametrize("scheme", SCHEDULE_OPTIONS, ids=str)
def test_equals_the_timed_table(scheme):
    """Every size that a schedule can have: makespan with messages and sums, and what is held."""
    random = np.random.default_rng(7)
    played = 0
    for ranks, microbatches in SIZES:
        found = make_periodic_table(scheme, ranks, microbatches)
        if found is None:
            with pytest.raises(PlanError):
                table_of(scheme, ranks, microbatches)
            continue
        table = table_of(scheme, ranks, microbatches)
        costs = costs_of(random, table.stages)
        lowered = lower(table, sync="eager-opt")
        result = found.play(work_of(costs), wire_of(costs), costs.sync)
        timing = time_schedule(lowered, costs)
        assert result == pytest.approx(timing.makespan, rel=1e-12)
        assert found.before is None
        ends, _ = found.table.order.play(work_of(costs), wire_of(costs))
        assert ends == pytest.approx([timing.compute_end(r) for r in range(ranks)])
        bare = found.play(work_of(costs))
        free = StageCosts(
            forward=costs.forward, input_grad=costs.input_grad, weight_grad=costs.weight_grad
        )
        assert bare == pytest.approx(time_schedule(table, free).makespan, rel=1e-12)
        held = [found.held(rank, costs.activation) for rank in range(ranks)]
        assert held == pytest.approx(peak_activations(table, costs), abs=1e-8)
        played += 1
    assert played >= 2


def test_micro_batches_under_way():
    """1F1B: min(m, p - i); GPipe: m; Chimera's copies: (D/2 + 1 ... D) units of a rank."""
    assert make_periodic_table(PLAIN, 4, 3).in_flight() == (3, 3, 2, 1)
    assert make_periodic_table(ScheduleOption("gpipe"), 4, 7).in_flight() == (7, 7, 7, 7)
    chimera = make_periodic_table(ScheduleOption("chimera", pipes=2), 4, 4)
    assert [chimera.held(rank, [1.0] * 4) for rank in range(4)] == [3, 4, 4, 3]
    assert chimera.table.holders[0] == (0, 3)


@pytest.mark.parametrize("scheme", SCHEDULE_OPTIONS, ids=str)
def test_many_micro_batches_go_on_as_the_last_rounds(scheme):
    """Of equal and of slightly unequal stages, a short table stands for a long one."""
    random = np.random.default_rng(3)
    ranks, microbatches = 4, 96
    whole = make_periodic_table(scheme, ranks, microbatches)
    short = make_periodic_table(scheme, ranks, microbatches, limit=1)
    assert whole.before is None
    assert sum(map(sum, short.table.computed)) < 0.7 * sum(map(sum, whole.table.computed))
    for width in (0.0, 0.2):
        costs = costs_of(random, whole.table.stages, sync=False)
        ones = np.ones(whole.table.stages)
        work = StagePasses(*((1 + width * random.random(len(ones))) * n for n in (1, 2, 1)))
        sums = tuple(random.uniform(0, 3, len(ones)))
        exact = whole.play(work, wire_of(costs), sums)
        found = short.play(work, wire_of(costs), sums)
        assert found == pytest.approx(exact, rel=5e-3)
    assert short.peaks == whole.peaks
    assert short.computed == whole.computed


@pytest.mark.parametrize("ranks", [2, 3, 7, WIDE + 1])
def test_1f1b_in_closed_form_is_1f1b(ranks):
    """To the last bit: played cell by cell, and all cells of one second at once."""
    random = np.random.default_rng(5)
    for microbatches in (1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks + 3):
        known = timetable_of(table_of(PLAIN, ranks, microbatches))
        closed = one_f_one_b_timetable(ranks, microbatches)
        for name in ("hosted", "holders", "peaks", "computed", "joins", "stages"):
            assert getattr(closed, name) == getattr(known, name)
        work = StagePasses(*random.uniform(0.5, 2.0, (3, ranks)).tolist())
        wire = StageMessages(*random.uniform(0.0, 1.0, (2, ranks - 1)).tolist())
        sums = random.uniform(0.0, 3.0, ranks).tolist()
        order = OneFOneBOrder(ranks, microbatches)
        assert len(order.fixed.cells) == 2 * ranks * microbatches
        for line, some in ((None, ()), (wire, sums)):
            assert closed.play(work, line, some) == known.play(work, line, some)
            assert order.fixed.play(work, line) == order.sweep(work, line)


@pytest.mark.parametrize("scheme", SCHEDULE_OPTIONS, ids=str)
def test_a_fixed_order_is_the_timer(scheme):
    """The fast path gives the general player's times to the last bit, also where messages or
    passes take no time at all, and so come in another order than in the run it was made from."""
    random = np.random.default_rng(17)
    for ranks, microbatches in ((4, 8), (4, 16), (8, 16)):
        table = table_of(scheme, ranks, microbatches)
        order = FixedOrder.of(table)
        for _ in range(6):
            drawn = costs_of(random, table.stages, sync=False)
            nothing = random.random((2, table.stages)) < 0.3
            costs = replace(
                drawn,
                forward=tuple(np.where(nothing[0], 0.0, drawn.forward).tolist()),
                # a sum that is exact, so that B - W is I to the last bit
                input_grad=(0.75,) * table.stages,
                weight_grad=tuple((random.integers(0, 8, table.stages) / 4).tolist()),
                message=tuple(np.where(nothing[1], 0.0, drawn.message).tolist()),
            )
            ends, gradients = order.play(work_of(costs), wire_of(costs))
            timing = time_schedule(table, costs)
            assert ends == tuple(timing.compute_end(rank) for rank in range(ranks))
            kinds = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
            assert gradients == {
                (action.stage, rank): end
                for rank, row in enumerate(table.order)
                for action, end in zip(row, timing.ends[rank], strict=True)
                if action.kind in kinds
            }


def test_1f1b_is_not_faster_than_its_stages_say():
    """Also with messages and sums; equal stages without them reach it."""
    random = np.random.default_rng(13)
    for ranks, microbatches in [*SIZES, (4, 5), (3, 4), (8, 9), (8, 3), (2, 1)]:
        table = make_periodic_table(PLAIN, ranks, microbatches)
        for spread in (0.0, 1.0, 3.0):
            for _ in range(12):
                forward, backward, sums = np.exp(spread * random.standard_normal((3, ranks)))
                wire = random.uniform(0.0, spread, (2, ranks - 1))
                least = one_f_one_b_lower_bound(
                    microbatches,
                    np.array(table.in_flight()),
                    forward,
                    forward + backward,
                    wire.sum(axis=0),
                    spread * sums,
                )
                work = StagePasses(forward.tolist(), backward.tolist(), backward.tolist())
                found = table.play(work, StageMessages(*wire.tolist()), (spread * sums).tolist())
                assert found >= least
                if spread == 0.0:
                    assert found == pytest.approx(least, rel=1e-8)


@pytest.mark.parametrize("scheme", SCHEDULE_OPTIONS, ids=str)
def test_no_table_is_faster_than_its_bound(scheme):
    """Any stages, also very unequal ones; for equal stages 1F1B and GPipe reach it."""
    random = np.random.default_rng(11)
    for ranks, microbatches in [*SIZES, (4, 5), (3, 4), (8, 9), (8, 3)]:
        found = make_periodic_table(scheme, ranks, microbatches)
        if found is None:
            continue
        degrees = Degrees(
            tensor=1,
            data=1,
            pipeline=ranks,
            microbatch=1,
            microbatches=microbatches,
            schedule=scheme.name,
            virtual=scheme.virtual,
            pipes=scheme.pipes,
        )
        stages = found.table.stages
        for spread in (0.0, 1.0, 3.0):
            for _ in range(12):
                each = np.exp(spread * random.standard_normal((3, stages)))
                work = StagePasses(each[0], each[1] + each[2], each[2])
                least = step_lower_bound(degrees, sum(work.forward), sum(work.backward))
                assert found.play(work) >= least * (1 - 1e-12)
                if found.rounds == 0:
                    wire = StageMessages(*random.uniform(0.0, spread, (2, stages - 1)))
                    sums = random.uniform(0.0, 4 * spread, stages).tolist()
                    least = found.table.at_least(work, wire, sums)
                    assert found.play(work, wire, sums) >= least * (1 - 1e-12)
        equal = StagePasses([1.0] * stages, [2.0] * stages, [1.0] * stages)
        if scheme.name in ("1f1b", "gpipe") and (scheme.name == "gpipe" or microbatches > ranks):
            least = step_lower_bound(degrees, stages, 2.0 * stages)
            assert found.play(equal) == pytest.approx(least)


def test_names():
    assert schedule_options(("1f1b",)) == (PLAIN,)
    assert schedule_options(("all",)) == SCHEDULE_OPTIONS
    assert [s.virtual for s in schedule_options(("interleaved",))] == [2, 4]
    assert schedule_option("zbv", 1, 2) == ScheduleOption("zbv", virtual=2)
    assert schedule_option("chimera", 2, 4) == ScheduleOption("chimera", pipes=4)
    with pytest.raises(PlanError, match="no price for a schedule") as error:
        schedule_options(("1f1b", "pipedream"))
    assert error.value.problems == ("pipedream",) or "pipedream" in str(error.value)
