"""pure: where a row of units is cut into stages, against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from headway.planner.estimate.degrees import Degrees, state_per_byte
from headway.planner.estimate.degrees import combinations as degrees_of
from headway.planner.estimate.stage_cut import (
    LayerUnit,
    _StageProgramme,
    bar_intervals,
    cut_stages,
    intervals_by_length,
    unnameable_units,
)
from support.sampling import sampled


def numbered(length):
    of = np.full((length, length + 1), -1)
    pairs = [(i, j) for i in range(length) for j in range(i + 1, length + 1)]
    for number, pair in enumerate(pairs):
        of[pair] = number
    return of, len(pairs)


def exhaustive(of, times, microbatches):
    """Alpa, equation 2, over all cuts."""
    stages, length = len(times), len(of)
    best = np.inf
    for inner in combinations(range(1, length), stages - 1):
        each = [
            times[stages - 1 - place, of[pair]]
            for place, pair in enumerate(pairwise((0, *inner, length)))
        ]
        if np.isfinite(each).all():
            best = min(best, sum(each) + (microbatches - 1) * max(each))
    return best


@pytest.mark.parametrize("seed", sampled(range(120), 30))
def test_equals_all_cuts(seed):
    """C5: at most 8 units, at most 8 stages, some stretches that do not fit."""
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 9))
    stages = int(random.integers(1, length + 1))
    microbatches = int(random.integers(1, 12))
    of, classes = numbered(length)
    times = random.integers(1, 30, (stages, classes)).astype(float)
    times[random.random(times.shape) < 0.3] = np.inf
    found = cut_stages(of, times, microbatches)
    best = exhaustive(of, times, microbatches)
    assert (found.seconds(microbatches) if found else np.inf) == best
    assert cut_stages(of, times, microbatches, known=0.0) is None or 1 in (stages, microbatches)
    if found and microbatches > 1:
        assert cut_stages(of, times, microbatches, known=best * (1 + 1e-9) + 1e-9) == found


def of_kinds(kinds):
    """Classes of stretches with the same sequence of kinds."""
    length, known = len(kinds), {}
    of = np.full((length, length + 1), -1)
    for size in range(1, length + 1):
        for start in range(length - size + 1):
            sequence = tuple(kinds[start : start + size])
            of[start, start + size] = known.setdefault(sequence, len(known))
    return of, list(known)


def least_seconds(of, times, microbatches):
    """Alpa, equations 3 and 4: every bound, every border."""
    stages, length = len(times), len(of)
    best = np.inf
    for bound in np.unique(times[np.isfinite(times)]):
        left = np.append(np.full(length, np.inf), 0.0)
        for own in times:
            each = np.where(of >= 0, own[of], np.inf)
            left = np.append((np.where(each <= bound, each, np.inf) + left).min(axis=1), np.inf)
        best = min(best, left[0] + (microbatches - 1) * bound)
    assert len(left) == length + 1, stages
    return best


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_equal_units(seed):
    """Some units before and behind many equal ones, as in a transformer; less room in front."""
    random = np.random.default_rng(seed)
    blocks = int(random.integers(2, 24))
    of, sequences = of_kinds([0, 1, *[2] * blocks, 3, 4])
    stages, microbatches = int(random.integers(2, 14)), int(random.integers(1, 12))
    each = random.integers(1, 9, 5) if seed % 2 else random.integers(1, 9, 5) * [0, 0, 1, 0, 3]
    plain = np.array([sum(each[kind] for kind in sequence) for sequence in sequences], dtype=float)
    units = np.array([len(sequence) for sequence in sequences])
    times = np.stack([plain] * stages)
    for behind in range(stages):
        times[behind, units * (behind + 1) > 12] *= 1.5  # computes again
        times[behind, units * (behind + 1) > 40] = np.inf
    found = cut_stages(of, times, microbatches)
    assert (found.seconds(microbatches) if found else np.inf) == least_seconds(
        of, times, microbatches
    )
    if found:
        own = [times[stages - 1 - n, of[pair]] for n, pair in enumerate(pairwise(found.borders))]
        assert (sum(own), max(own)) == (found.total, found.slowest)


@pytest.mark.parametrize("seed", range(30))
def test_what_numbers_of_units_say_is_below_every_cut(seed):
    """And near to it where units are equal."""
    random = np.random.default_rng(seed)
    of, sequences = of_kinds([0, *[2] * int(random.integers(4, 20)), 1])
    each = random.integers(1, 9, 3) if seed % 2 else np.ones(3)
    plain = np.array([sum(each[kind] for kind in sequence) for sequence in sequences], dtype=float)
    stages = int(random.integers(2, 5))
    programme = _StageProgramme(intervals_by_length(of), np.stack([plain] * stages))
    for bound in np.unique(plain):
        found = programme.solve(bound)
        if found is None:
            continue
        assert programme.sum_of(bound) <= found.total
        assert programme.least <= found.slowest
        assert seed % 2 or programme.sum_of(bound) > 0.98 * found.total


def test_equal_stages_have_the_bubble_of_the_papers():
    """(p - 1) / m of the work."""
    of, _ = numbered(8)
    lengths = np.array([[j - i for j in range(9)] for i in range(8)], dtype=float)
    times = np.tile(lengths[of >= 0][np.argsort(of[of >= 0])], (4, 1))
    found = cut_stages(of, times, 12)
    assert found.borders == (0, 2, 4, 6, 8)
    assert found.seconds(12) == 12 * 2 * (1 + 3 / 12)


def test_more_stages_than_units():
    of, classes = numbered(2)
    assert cut_stages(of, np.ones((3, classes)), 4) is None


def test_combinations_are_all_that_multiply():
    found = list(degrees_of(8, 16, units=4, zero=(0, 1)))
    assert len(found) == len(set(found))
    for degrees in found:
        assert degrees.tensor * degrees.data * degrees.pipeline == 8
        assert degrees.data * degrees.microbatch * degrees.microbatches == 16
        assert degrees.pipeline <= 4
        assert degrees.data > 1 or degrees.zero == 0


def test_state_of_parameters():
    """18 bytes in 16 bits (Megatron), 6 + 12/d with a split optimiser; 16 bytes in 32 bits."""

    def per_parameter(itemsize, zero, data):
        degrees = Degrees(tensor=1, data=data, pipeline=1, microbatch=1, microbatches=2, zero=zero)
        return state_per_byte(itemsize, degrees) * itemsize

    assert per_parameter(2, 0, 8) == 18
    assert per_parameter(2, 1, 8) == 6 + 12 / 8
    assert per_parameter(2, 3, 8) == 18 / 8
    assert per_parameter(4, 0, 1) == 16


@pytest.mark.parametrize("seed", range(40))
def test_stages_begin_where_they_must_and_nowhere_else(seed):
    """Against every cut that has all starts and no barred unit."""
    random = np.random.default_rng(seed)
    length, stages = int(random.integers(3, 9)), int(random.integers(1, 4))
    of, classes = numbered(length)
    times = random.integers(1, 30, (stages, classes)).astype(float)
    some = random.permutation(range(1, length)).tolist()
    starts, barred = some[: seed % 3], some[seed % 3 :][: seed % 4]
    best = np.inf
    for inner in combinations(range(1, length), stages - 1):
        if set(starts) <= set(inner) and not set(barred) & set(inner):
            pairs = pairwise((0, *inner, length))
            each = [times[stages - 1 - n, of[pair]] for n, pair in enumerate(pairs)]
            best = min(best, sum(each) + 4 * max(each))
    found = cut_stages(bar_intervals(of, starts, barred), times, 5)
    assert (found.seconds(5) if found else np.inf) == best


def test_no_stage_begins_where_no_plan_can_name_it():
    """The first module, a loss, a mean, and the second call of a module."""
    names = ("", "stem", "block", "", "block", "head", "")
    row = [
        LayerUnit(start=n, stop=n + 1, kind=n, entry="", exit="", module=name)
        for n, name in enumerate(names)
    ]
    assert unnameable_units(row) == {1, 3, 4, 6}
    assert unnameable_units(row[1:]) == {2, 3, 5}
