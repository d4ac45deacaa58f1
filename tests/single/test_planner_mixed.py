"""single: the search on devices of several types, against everything there is; its plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import NothingFits, PlanError
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.estimate.pricing import IntervalRows
from headway.planner.search.branch_and_bound import PlanSearch, find_plans, microbatch_shares
from headway.planner.search.device_layout import device_counts, device_layouts
from headway.planner.search.plan_conversion import missing_in_executor, sample_shares, to_plan
from headway.planner.search.request import DeviceGroup, PlanRequest
from headway.planner.whale.load_balance import DeviceShare, whole_filling
from headway.plans import explain
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import ids
from support.machines import assumed_machine
from support.sampling import sampled
from support.water_filling import water_filling

NETWORK = machine_of(of_preset("p3.16xlarge", nodes=1)).network
MACHINES = {  # without launches, in which they would be alike
    kind: replace(
        machine, network=NETWORK, dtype="fp32", device=replace(machine.device, dispatch=0, kernel=0)
    )
    for kind, machine in (("v100", assumed_machine("v100-32gb")), ("p100", assumed_machine("p100")))
}
COUNTS = {"v100": 2, "p100": 2}
MIB = 2.0**20


def gpt(layers, width=256, window=64):
    config = TransformerConfig(
        vocabulary=512, window=window, width=width, layers=layers, heads=4, tied=False
    )
    with torch.device("meta"):
        return PlanningWorkload(
            graph=fuse_light_operators(capture(TransformerLM(config), ids(16, window))), samples=16
        )


@pytest.fixture(scope="module")
def small():
    return gpt(1)


@pytest.fixture(scope="module")
def work():
    return gpt(6, width=1024, window=256)


def asked(work, **changed):
    machines, counts = changed.pop("machines", MACHINES), changed.pop("counts", COUNTS)
    groups = [DeviceGroup(kind=kind, machine=machines[kind], count=n) for kind, n in counts.items()]
    usual = {"work": work, "batch": 12, "machine": groups[0].machine}
    return PlanRequest(groups=tuple(groups), **(usual | changed))


def layouts(search):
    """Combinations in which devices of several types work together."""
    return [one for one in search.combinations() if one.layout is not None]


# ---- cells and shares ---------------------------------------------------------------------------


def rows(amounts, **degrees):
    found = device_layouts(amounts, **degrees)
    return {(tuple("".join(copy) for copy in one.copies), one.order) for one in found}


def test_devices_are_laid_out_by_stage_and_by_copy():
    """K = 8, two stages, nested data parallelism 4, types of 4 and 4."""
    found = rows({"a": 4, "b": 4}, tensor=1, data=4, pipeline=2)
    assert found == {
        (("ab",) * 4, "tdp"),
        (("aa", "aa", "bb", "bb"), "tpd"),
        (("ba",) * 4, "tdp"),
    }
    uneven = rows({"a": 3, "b": 1}, tensor=1, data=2, pipeline=2)
    assert (("aa", "ab"), "tdp") in uneven
    assert (("ab", "aa"), "tdp") not in uneven  # the same copies in another order
    assert not list(device_layouts({"a": 3, "b": 1}, tensor=2, data=2, pipeline=1))
    assert rows({"a": 2, "b": 0}, tensor=2, data=1, pipeline=1) == {(("a",), "tdp")}


def test_amounts_are_whole_types_or_powers_of_two():
    counts = {"a": 6, "b": 2}
    whole = [tuple(one.values()) for one in device_counts(counts, None)]
    assert whole == [(0, 2), (6, 0), (6, 2)]
    some = [tuple(one.values()) for one in device_counts(counts, (4,))]
    assert some == [(2, 2), (4, 0)]


def test_whole_filling_is_the_best_of_all_whole_shares():
    random = np.random.default_rng(0)
    for _ in range(200):
        copies = random.integers(1, 4, random.integers(1, 4)).tolist()
        samples = int(random.integers(sum(copies), 12 + sum(copies)))
        costs = [np.cumsum(random.integers(0, 5, samples) + 0.5) for _ in copies]
        found, longest = whole_filling(costs, copies, samples)
        assert sum(n * size for n, size in zip(copies, found, strict=True)) >= samples
        assert longest == max(c[size - 1] for c, size in zip(costs, found, strict=True))
        best = min(
            max(c[size - 1] for c, size in zip(costs, some, strict=True))
            for some in itertools.product(range(1, samples + 1), repeat=len(copies))
            if sum(n * size for n, size in zip(copies, some, strict=True)) >= samples
        )
        assert longest == best
    with pytest.raises(PlanError, match="take 3"):
        whole_filling([np.array([1.0, 2.0, 3.0, np.inf])], [1], 4)


def test_whole_filling_comes_to_water_filling():
    shares = [
        DeviceShare(rate=15.7, memory=1, scaled=1),
        DeviceShare(rate=9.3, memory=0.25, scaled=1),
    ]
    samples = 10_000
    costs = [
        np.where(
            np.arange(1, samples + 1) <= share.cap * samples,
            np.arange(1, samples + 1) / share.rate,
            np.inf,
        )
        for share in shares
    ]
    found, _ = whole_filling(costs, [1, 1], samples)
    assert np.array(found) / samples == pytest.approx(water_filling(shares).loads, abs=1e-3)


# ---- against everything there is ----------------------------------------------------------------


def every_cut(sharing, caps, at=None):
    """The least Alpa's sum over all cuts, all recomputations and strategies; one by one."""
    one = sharing.combination
    p, m = one.degrees.pipeline, one.degrees.microbatches
    row = sharing.of(next(iter(one.types_of(0)))).tables.row
    of = sharing.of(next(iter(one.types_of(0)))).tables.classes.of
    borders = {b for s in range(p) for c in one.types_of(s) for b in sharing.of(c).tables.borders}
    best = np.inf
    for border in ({at} if at else borders) if p > 1 else {"R"}:
        for middle in itertools.combinations(range(1, len(row)), p - 1):
            edges = (0, *middle, len(row))
            times = []
            for s, (a, b) in enumerate(itertools.pairwise(edges)):
                number = int(of[a, b]) if p > 1 else 0
                times.append(
                    min(slowest(sharing, s, border, number, again, caps) for again in (0, 1))
                )
            best = min(best, sum(times) + (m - 1) * max(times))
    return best


def slowest(sharing, stage, border, number, again, caps):
    """Of the copies of a stage; strategies of different cells may differ without a tensor axis."""
    one = sharing.combination
    ways = []
    for cell in sorted(one.types_of(stage)):
        candidate = sharing.of(cell)
        under_way = candidate._in_flight[stage]
        every = candidate._prepared(border)[0]
        first = candidate.first(every) if candidate.is_late(stage) else None
        memory = candidate.pricing.memory
        own = []
        for place, line in enumerate(every[number, again]):
            more = line[IntervalRows.MORE] if first is None else first[number, again, place]
            state = line[IntervalRows.STATE]
            held = state + under_way * line[IntervalRows.KEPT] + more
            updated = state * (1 + memory.passing) + memory.waiting[number]
            if max(held, updated) <= caps[cell[1]]:
                tail = line[IntervalRows.TAIL] / one.degrees.microbatches
                own.append((line[IntervalRows.SECONDS] + tail, state))
        ways.append(own)
    found = [
        max(value for value, _ in some)
        for some in itertools.product(*ways)
        if one.degrees.tensor == 1
        or max(s for _, s in some) <= min(s for _, s in some) * (1 + 2e-6)
    ]
    return min(found, default=np.inf)


def alpas_sum(point):
    m = point.degrees.microbatches
    copies = zip(*(one.stages for one in point.classes), strict=True)
    times = [max(stage.seconds + stage.tail / m for stage in own) for own in copies]
    return sum(times) + (m - 1) * max(times)


@pytest.mark.parametrize("memory", sampled([None, 40 * MIB, 24 * MIB], 1))
def test_every_cut_is_the_best_of_all(small, memory):
    search = PlanSearch(asked(small, memory=memory, zero=(0,), batch=6))
    assert len(search.row) == 7
    seen = 0
    for combination in layouts(search):
        for some in microbatch_shares(search.layouts, combination, search.question.caps).tolist():
            sharing = search.sharing(combination, tuple(some))
            point = sharing.fastest(search.question.caps)
            best = every_cut(sharing, search.question.caps)
            assert (point is None) == np.isinf(best)
            if point is not None:
                best = every_cut(sharing, search.question.caps, point.border)
                assert alpas_sum(point) == pytest.approx(best, rel=1e-12)
                assert all(point.bytes_on(k) <= cap for k, cap in search.question.caps.items())
                seen += 1
    assert seen > 20


@pytest.mark.parametrize(("counts", "tensor"), [({"v100": 1, "p100": 1}, 1), (COUNTS, 2)])
def test_a_stage_of_unlike_copies_is_as_slow_as_the_slowest(small, counts, tensor):
    """Of all stretches of units, with what fits the smaller device only just."""
    caps = {"v100": 40 * MIB, "p100": 24 * MIB}
    search = PlanSearch(asked(small, counts=counts, zero=(0,), tensor=(tensor,)))
    seen = 0
    for combination in layouts(search):
        if combination.degrees.data == 1 or len(combination.amounts) == 1:
            continue
        sharing = search.sharing(combination, (2, 2))
        cells = sorted(combination.types_of(0))
        for border in (
            sharing.of(cells[0]).tables.borders if combination.degrees.pipeline > 1 else "R"
        ):
            times, picks = sharing._picked(0, border, caps)
            for number, (time, (again, *ways)) in enumerate(zip(times, picks, strict=True)):
                best = min(slowest(sharing, 0, border, number, n, caps) for n in (0, 1))
                assert time == pytest.approx(best, rel=1e-12)
                if np.isfinite(best):
                    took = [
                        sharing.of(cell)._prepared(border)[0][number, again, way]
                        for cell, way in zip(cells, ways, strict=True)
                    ]
                    m = combination.degrees.microbatches
                    each = [row[IntervalRows.SECONDS] + row[IntervalRows.TAIL] / m for row in took]
                    assert max(each) == pytest.approx(best, rel=1e-12)
                    seen += min(each) < 0.9 * best
    assert seen > 0


def test_no_plan_is_below_its_bound_where_types_are_fast_at_different_operators(small):
    """One type waits for memory, the other for products."""
    v100 = MACHINES["v100"]
    odd = replace(v100, device=replace(v100.device, memory_rate=v100.device.memory_rate / 50))
    slow = {name: peak / 50 for name, peak in v100.device.peak.items()}
    machines = {"wide": replace(v100, device=replace(v100.device, peak=slow)), "narrow": odd}
    question = asked(small, machines=machines, counts={"wide": 1, "narrow": 1}, zero=(0,), batch=4)
    search = PlanSearch(question)
    for combination in layouts(search):
        for some in microbatch_shares(search.layouts, combination, question.caps).tolist():
            sharing = search.sharing(combination, tuple(some))
            point = sharing.fastest(question.caps)
            if point is not None:
                assert search.layouts.seconds(combination) <= point.seconds
                assert sharing.least(question.caps)[0] <= point.seconds * (1 + 1e-12)


def test_types_with_different_networks_are_refused(small):
    other = replace(MACHINES["p100"], network=machine_of(of_preset("dgx-a100", nodes=1)).network)
    with pytest.raises(PlanError, match="different networks") as caught:
        asked(small, machines=MACHINES | {"p100": other})
    assert list(caught.value.problems) == ["machines.p100: not that of v100"]


def everything(question):
    """Of all combinations and all sizes, also wasteful ones."""
    search = PlanSearch(question)
    for combination in search.combinations():
        if combination.layout is None:
            found = [search.open(combination).fastest(question.cap)]
        else:
            need = -(-question.batch // combination.degrees.microbatches)
            copies = [number for _, number in combination.layout.classes]
            found = [
                search.sharing(combination, some).fastest(question.caps)
                for some in itertools.product(range(1, need + 1), repeat=len(copies))
                if sum(n * size for n, size in zip(copies, some, strict=True)) >= need
            ]
        yield from (point for point in found if point is not None)


@pytest.mark.parametrize(
    ("counts", "memory"),
    sampled([*product([COUNTS, {"v100": 1, "p100": 3}], [None, 24 * MIB])], 1),
)
def test_the_fastest_is_the_best_of_all_shares(small, counts, memory):
    question = asked(small, counts=counts, batch=9, memory=memory, objective="fastest", proof=True)
    found = find_plans(question)
    best = min(everything(question), key=lambda point: point.seconds)
    assert found.best.seconds == pytest.approx(best.seconds, rel=1e-12)
    assert found.bound <= found.best.seconds
    quick = find_plans(replace(question, proof=False))
    assert quick.best.seconds <= best.seconds * 1.01


def test_equal_devices_have_the_price_of_one_type(work):
    """Two types that are alike in one plan: seconds and bytes are those of the ordinary search."""
    v100 = MACHINES["v100"]
    kinds = {"one": v100, "other": v100}
    search = PlanSearch(asked(work, machines=kinds, counts={"one": 4, "other": 4}, batch=16))
    alone = PlanSearch(PlanRequest(work=work, machine=v100, devices=(8,), batch=16))
    seen = set()
    for combination in layouts(search):
        d, m = combination.degrees.data, combination.degrees.microbatches
        if combination.devices < 8 or combination.degrees.tensor > 1 or 16 % (d * m):
            continue
        degrees = combination.sized(16 // (d * m))
        some = search.sharing(combination, (16 // (d * m),) * len(combination.layout.classes))
        p, units = combination.degrees.pipeline, len(search.row)
        borders = (0, *(n * units // p for n in range(1, p)), units)
        mixed, plain = some.planned(borders), alone.candidate(degrees).planned(borders)
        assert mixed.seconds == pytest.approx(plain.seconds, rel=1e-12)
        assert mixed.bytes == pytest.approx(plain.bytes, rel=1e-12)
        seen.add((p > 1, combination.degrees.zero, m == 1))
    assert len(seen) > 8


@pytest.mark.parametrize("objective", ["frontier", "fastest"])
def test_one_group_has_the_answer_of_the_ordinary_search(work, objective):
    """Memory, seconds and frontier of eight equal devices."""
    v100 = MACHINES["v100"]
    group = asked(work, machines={"v100": v100}, counts={"v100": 8}, batch=16, objective=objective)
    mixed = find_plans(group)
    plain = find_plans(
        PlanRequest(work=work, machine=v100, devices=(8,), batch=16, objective=objective)
    )
    figures = [[(p.seconds, p.bytes, p.degrees) for p in one.points] for one in (mixed, plain)]
    assert figures[0] == figures[1]
    assert (mixed.chosen, mixed.bound, mixed.floor) == (plain.chosen, plain.bound, plain.floor)
    assert mixed.best.rank_kinds == ("v100",) * 8


# ---- what comes out -----------------------------------------------------------------------------


def test_both_types_together_are_faster_than_either_and_the_slow_one_takes_less(work):
    found = find_plans(asked(work, batch=96, objective="fastest", zero=(0,), tensor=(1,)))
    best = found.best
    assert dict(best.amounts) == {"v100": 2, "p100": 2}
    alone = [find_plans(asked(work, batch=96, objective="fastest", zero=(0,), tensor=(1,),
                                counts={kind: 2}, machines={kind: MACHINES[kind]}))
             for kind in MACHINES]  # fmt: skip
    assert best.seconds < 0.85 * min(one.best.seconds for one in alone)
    copies = {copy: one.kinds for one in best.classes for copy in one.copies}
    own = sample_shares(96, best)
    shares = {kinds: own[copy] for copy, kinds in copies.items()}
    if best.degrees.data > 1 and len(shares) > 1:
        assert shares[("v100",)] > shares[("p100",)]


def test_the_frontier_is_one_and_answers_are_the_same(work):
    question = asked(work, batch=32, tensor=(1,))
    found, again = find_plans(question), find_plans(question)
    assert found.points == again.points
    vectors = [(p.seconds, p.bytes, p.devices) for p in found.points]
    assert len(vectors) > 2
    for one, other in itertools.permutations(vectors, 2):
        assert not all(a <= b for a, b in zip(one, other, strict=True))
    assert vectors == sorted(vectors)


def test_whales_balance_takes_devices_by_memory_and_is_never_faster(work):
    question = asked(work, batch=96, objective="fastest", zero=(0,), tensor=(1,), proof=True)
    exact, whale = (find_plans(replace(question, balance=b)) for b in ("exact", "whale"))
    assert exact.best.seconds <= whale.best.seconds * (1 + 1e-12)
    assert whale.best.seconds < exact.best.seconds * 1.2
    order = next(iter(PlanSearch(replace(question, balance="whale")).combinations()))
    assert [kind for kind, _ in order.amounts] in (["v100"], ["p100"], ["v100", "p100"])


def test_a_runnable_point_is_a_plan_with_its_shares(work):
    found = find_plans(
        asked(work, batch=96, objective="fastest", recompute="pipeline", tensor=(1,))
    )
    for point in found.points:
        assert missing_in_executor(found.search, point) == ""
        plan = to_plan(found, point)
        assert plan.ranks == len(point.rank_kinds) == point.devices
        copies = plan.data_degree
        assert [len(plan.batch.share(c, copies)) for c in range(copies)] == list(
            sample_shares(96, point)
        )
        assert "96 samples" in explain(plan)
        for rank, kind in enumerate(point.rank_kinds):
            where = plan.mesh.coordinate(rank)
            copies = {copy: one.kinds for one in point.classes for copy in one.copies}
            assert copies[where.get("data", 0)][where.get("pipe", 0)] == kind


def test_what_the_executor_lacks_is_said(work):
    found = find_plans(asked(work, batch=8, zero=(3,), tensor=(2,), objective="fastest"))
    with pytest.raises(PlanError, match="cannot run this point") as caught:
        to_plan(found, found.best)
    lacks = missing_in_executor(found.search, found.best)
    assert list(caught.value.problems) == [f"not implemented: {lacks}"]
    assert "tensor axis" in lacks


def test_nothing_fits_says_what_there_is(small):
    with pytest.raises(NothingFits) as caught:
        find_plans(asked(small, memory=MIB))
    assert caught.value.problems[0] == "there are 2 x v100 with 1 MiB, 2 x p100 with 1 MiB"


def test_stages_begin_where_they_are_forced_to(work):
    question = asked(work, batch=8, objective="fastest", tensor=(1,))
    found = find_plans(replace(question, force=(("blocks.4", "stage"),)))
    starts = [found.search.row[stage.start].module for stage in found.best.stages]
    assert any(name.startswith("blocks.4") for name in starts)
    with pytest.raises(PlanError, match="what is forced is not legal"):
        find_plans(asked(work, force=(("nowhere", "stage"),)))
