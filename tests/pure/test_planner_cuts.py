"""pure: where a row of units is cut into stages, against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from headway.planner import pipeline_cuts
from headway.planner.degrees import combinations as degrees_of
from headway.planner.degrees import state_per_byte
from headway.planner.pipeline_cuts import cut


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


@pytest.mark.parametrize("seed", range(120))
def test_equals_all_cuts(seed, monkeypatch):
    """C5: at most 8 units, at most 8 stages, some stretches that do not fit."""
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 9))
    stages = int(random.integers(1, length + 1))
    microbatches = int(random.integers(1, 12))
    of, classes = numbered(length)
    times = random.integers(1, 30, (stages, classes)).astype(float)
    times[random.random(times.shape) < 0.3] = np.inf
    found = cut(of, times, microbatches)
    monkeypatch.setattr(pipeline_cuts, "_CELLS", 0)  # as with many units
    assert cut(of, times, microbatches) == found
    best = exhaustive(of, times, microbatches)
    assert (found.seconds(microbatches) if found else np.inf) == best
    assert cut(of, times, microbatches, known=0.0) is None or 1 in (stages, microbatches)
    if found and microbatches > 1:
        assert cut(of, times, microbatches, known=best * (1 + 1e-9) + 1e-9) == found


def test_equal_stages_have_the_bubble_of_the_papers():
    """(p - 1) / m of the work."""
    of, _ = numbered(8)
    lengths = np.array([[j - i for j in range(9)] for i in range(8)], dtype=float)
    times = np.tile(lengths[of >= 0][np.argsort(of[of >= 0])], (4, 1))
    found = cut(of, times, 12)
    assert found.borders == (0, 2, 4, 6, 8)
    assert found.seconds(12) == 12 * 2 * (1 + 3 / 12)


def test_more_stages_than_units():
    of, classes = numbered(2)
    assert cut(of, np.ones((3, classes)), 4) is None


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
    assert state_per_byte(2, 0, 8) * 2 == 18
    assert state_per_byte(2, 1, 8) * 2 == 6 + 12 / 8
    assert state_per_byte(2, 3, 8) * 2 == 18 / 8
    assert state_per_byte(4, 0, 1) * 4 == 16
