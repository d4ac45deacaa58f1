"""pure: what of an exchange shows, against playing every message on a serial network (D4)."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from headway.collective.model.gradient_buckets import fill_buckets
from headway.collective.model.scheme_ranking import FIRST_BUCKET
from headway.planner.estimate.gradient_exchange import (
    GradientArrivals,
    bucket_exchange,
    most_hidden,
    sharded_exchange,
    sharded_passes,
)

MIB = 2**20


def serial(jobs):
    """One lane: (ready, number, seconds) in the order of readiness; the end of each."""
    heapq.heapify(jobs)
    clock, ends = 0.0, {}
    while jobs:
        ready, number, seconds = heapq.heappop(jobs)
        clock = max(clock, ready) + seconds
        ends[number] = clock
    return ends


@pytest.mark.parametrize("seed", range(60))
def test_buckets_behind_the_last_backward(seed):
    random = np.random.default_rng(seed)
    units = int(random.integers(1, 9))
    backward = random.uniform(0.0, 1.0, units)
    count = int(random.integers(1, 30))
    places = np.sort(random.integers(0, units, count))[::-1]
    sizes = random.integers(1, 6 * MIB, count)
    latency, rate = random.uniform(0, 0.1), random.uniform(1, 40) * MIB
    shares = np.ones(units)
    limit = float(random.choice([1, 4, 8, 64]) * MIB)
    found = bucket_exchange(
        GradientArrivals(tuple(map(int, sizes)), tuple(map(int, places))),
        backward,
        shares,
        lambda size: latency + size / rate,
        limits=(limit,),
    )
    buckets = fill_buckets([int(s) for s in sizes], range(count), int(limit), FIRST_BUCKET)
    # Backward begins at 0 with the last unit; a bucket is ready when all its gradients are.
    done = {unit: backward[unit:].sum() for unit in range(units)}
    jobs = []
    for number, bucket in enumerate(buckets):
        ready = max(done[places[n]] for n in bucket)
        jobs.append((ready, number, latency + sum(int(sizes[n]) for n in bucket) / rate))
    whole = sum(job[2] for job in jobs)
    late = max(max(serial(jobs).values()) - backward.sum(), 0.0)
    assert found.exposed == pytest.approx(late, rel=1e-12, abs=1e-12)
    assert found.seconds == pytest.approx(whole, rel=1e-12)
    one = latency + sizes.sum() / rate  # the bound of rows: one message, all of backward
    assert found.exposed >= one - most_hidden(one, backward.sum(), 1.0) - 1e-12
    none = bucket_exchange(
        GradientArrivals(tuple(map(int, sizes)), tuple(map(int, places))),
        backward,
        shares,
        lambda size: latency + size / rate,
        limits=(limit,),
        overlap=0.0,
    )
    assert none.exposed == pytest.approx(whole)


def test_the_first_unit_is_always_exposed():
    """Das: its window is empty."""
    gradients = GradientArrivals((8 * MIB, 8 * MIB, 8 * MIB), (2, 1, 0))
    found = bucket_exchange(
        gradients, np.full(3, 10.0), np.ones(3), lambda s: 1.0 + 0 * s, limits=(MIB,)
    )
    assert found == (3.0, 1.0, MIB)


def test_the_best_bucket_is_chosen():
    """Latency makes buckets large, long windows make them small."""
    gradients = GradientArrivals((MIB,) * 64, tuple(range(63, -1, -1)))
    limits = (2.0 * MIB, 16.0 * MIB, 64.0 * MIB)

    def best(latency):
        price = lambda size: latency + size / MIB  # noqa: E731
        return bucket_exchange(gradients, np.ones(64), np.ones(64), price, limits=limits).bucket

    assert [best(x) for x in (1e-3, 2.0, 30.0)] == [2.0 * MIB, 16.0 * MIB, 64.0 * MIB]


class Enumerated:
    """FSDP on one device and one lane, event by event: weights of the next unit are asked for when
    a unit begins to compute; its gradients are scattered when its backward has ended."""

    def __init__(self, forward, backward, scatters, gathers, microbatches):
        units = len(forward)
        turn = []
        for _ in range(microbatches):
            turn += [(forward[u], gathers[u], 0.0) for u in range(units)]
            turn += [(backward[u], gathers[u], scatters[u]) for u in reversed(range(units))]
        clock = lane = 0.0
        queue = []  # (asked, number, seconds, cell whose weights they are)
        there = [0.0] * len(turn)
        self.number = 0

        def ask(time, seconds, cell):
            heapq.heappush(queue, (time, self.number, seconds, cell))
            self.number += 1

        def drain(until):
            nonlocal lane
            while queue and queue[0][0] <= until:
                time, _, seconds, cell = heapq.heappop(queue)
                lane = max(lane, time) + seconds
                if cell is not None:
                    there[cell] = lane

        ask(0.0, turn[0][1], 0)
        for cell, (compute, _, scatter) in enumerate(turn):
            drain(clock)
            start = max(clock, there[cell])
            if cell + 1 < len(turn) and turn[cell + 1][1]:
                ask(start, turn[cell + 1][1], cell + 1)
                drain(start)
            clock = start + compute
            if scatter:
                ask(clock, scatter, None)
        drain(np.inf)
        self.whole = max(clock, lane)


@pytest.mark.parametrize("seed", range(60))
def test_weights_in_front_of_passes_and_gradients_behind(seed):
    """ZeRO 2 (no gathers) and 3, a few and very many micro-batches."""
    random = np.random.default_rng(seed)
    units = int(random.integers(1, 6))
    forward, backward = random.uniform(0.1, 1.0, (2, units))
    slow = random.choice([0.1, 1.0, 3.0])
    scatters, gathers = slow * random.uniform(0.05, 1.0, (2, units))
    if seed % 3 == 0:
        gathers = np.zeros(units)
    number = int(random.choice([1, 2, 3, 40]))
    seconds, found = sharded_exchange(
        forward, backward, scatters, None if seed % 3 == 0 else gathers, number
    )
    exact = Enumerated(forward, backward, scatters, gathers, number).whole
    assert seconds == pytest.approx(exact, rel=1e-9)
    compute = number * (forward.sum() + backward.sum())
    assert found.exposed == pytest.approx(exact - compute, rel=1e-9, abs=1e-9)
    least = forward.sum() + gathers.sum() - most_hidden(gathers.sum(), forward.sum(), 1.0)
    sent = gathers.sum() + scatters.sum()
    least += backward.sum() + sent - most_hidden(sent, backward.sum(), 1.0)
    if seed % 3:
        assert seconds >= number * least * (1 - 1e-12) or number > 1
    ahead, back, late = sharded_passes(
        forward, backward, scatters, None if seed % 3 == 0 else gathers
    )
    assert ahead + back + late >= least * (1 - 1e-12)
