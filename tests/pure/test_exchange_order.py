"""pure: the played step, and the planned order against every other order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import LinkLoad, ready_order, simulate_link
from headway.collective.model.priority_order import (
    SMALLEST_CHUNK,
    SequencedJob,
    carlier,
    chunk_size,
    planned_order,
    preemptive_end,
    schrage,
    sequence_end,
)


def layers(n, communication, pieces=1, latency=0.0):
    """n equal layers, forward 1/3 and backward 2/3 of a second; the model of the bound."""
    link = LinkFit(latency, communication / n / pieces)
    f, b = 1 / 3 / n, 2 / 3 / n
    loads = [
        LinkLoad((i, k), 1, 1 / 3 + (n - i) * b, i * f) for i in range(n) for k in range(pieces)
    ]
    return loads, link


def random_loads(draw, n):
    loads = [
        LinkLoad(i, draw.randint(1, 10), draw.uniform(5, 15), draw.uniform(0, 5)) for i in range(n)
    ]
    return loads, LinkFit(draw.uniform(0, 0.3), draw.uniform(0.01, 1))


def best_step(loads, link, credit):
    return min(
        simulate_link(loads, link, order=order, credit=credit).step
        for order in itertools.permutations(range(len(loads)))
    )


# -- playing -----------------------------------------------------------------------------------


def test_one_load_by_hand():
    load = LinkLoad("w", 100, ready=3.0, needed=0.5)
    played = simulate_link([load], LinkFit(0.25, 0.01), credit=1)
    trip = played.trips[0]
    assert trip.sent == 3.0
    assert trip.received == 4.25
    assert trip.waited == played.exposed == 0.75
    assert played.step == 3.75
    assert simulate_link([load], LinkFit(0.25, 0.01), crossing=False).step == 4.25


def test_credit_one_is_one_collective_after_the_other():
    loads = [LinkLoad(i, 10, 1.0, 0.0) for i in range(4)]
    link = LinkFit(0.5, 0.1)
    assert simulate_link(loads, link, credit=1).trips[3].received == pytest.approx(1 + 4 * 1.5)
    assert simulate_link(loads, link, credit=2).trips[3].received == pytest.approx(
        1 + 4 * 1.0 + 0.5
    )
    assert simulate_link(loads, link, credit=9).step == simulate_link(loads, link, credit=2).step


def test_short_loads_wait_for_credit():
    loads = [LinkLoad(i, 1, 0.0, 0.0) for i in range(4)]
    link = LinkFit(1.0, 0.1)
    received = [trip.received for trip in simulate_link(loads, link, credit=2).trips]
    assert received == pytest.approx([1.1, 1.2, 2.2, 2.3])


def test_encoding_overlaps_with_the_link_and_decoding_delays_use():
    loads = [LinkLoad(i, 10, 0.0, 0.0, encode=0.5, decode=0.25) for i in range(3)]
    trips = simulate_link(loads, LinkFit(0.0, 0.1), credit=2).trips
    assert [t.sent for t in trips] == pytest.approx([0.5, 1.5, 2.5])
    assert [t.received for t in trips] == pytest.approx([1.75, 2.75, 3.75])


def test_waits_add_up_and_are_counted_once():
    """Two layers wait; the second one only for what the first wait has not covered."""
    loads = [LinkLoad("a", 1, 10.0, 0.0), LinkLoad("b", 1, 10.0, 1.0)]
    played = simulate_link(loads, LinkFit(0.0, 3.0), order=(0, 1))
    assert [t.waited for t in played.trips] == [3.0, 2.0]
    assert played.step == 15.0
    assert played.step == max(
        t.received - load.needed for t, load in zip(played.trips, loads, strict=True)
    )


def test_the_fixed_order_waits_for_its_next_load():
    loads = [LinkLoad("early", 1, 1.0, 0.0), LinkLoad("late", 1, 5.0, 0.0)]
    assert simulate_link(loads, LinkFit(0.0, 1.0), order=(1, 0)).trips[0].sent == 6.0


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2)])
def test_a_wrong_order_is_refused(order):
    loads = [LinkLoad(0, 1, 0.0, 0.0), LinkLoad(1, 1, 0.0, 0.0)]
    with pytest.raises(ValueError, match="not an order of 2 loads"):
        simulate_link(loads, LinkFit(0.0, 1.0), order=order)
    with pytest.raises(ValueError, match="credit"):
        simulate_link(loads, LinkFit(0.0, 1.0), credit=0)


def test_nothing_to_send():
    assert simulate_link([], LinkFit(0.0, 1.0), compute=2.0).step == 2.0
    assert planned_order([], LinkFit(0.0, 1.0), credit=2) == ()


# -- ordering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [1, 2, 3])
def test_the_planned_order_is_the_best_of_all(credit):
    draw = random.Random(credit)
    for number in range(15):
        loads, link = random_loads(draw, 2 + number % 5)
        best = best_step(loads, link, credit)
        certain = planned_order(loads, link, credit=credit, jitter=0)
        assert simulate_link(loads, link, order=certain, credit=credit).step <= best * 1.001
        robust = planned_order(loads, link, credit=credit)
        assert simulate_link(loads, link, order=robust, credit=credit).step <= best * 1.02


def test_seven_loads_against_all_orders():
    loads, link = random_loads(random.Random(99), 7)
    order = planned_order(loads, link, credit=2)
    assert simulate_link(loads, link, order=order).step <= best_step(loads, link, 2) * 1.02


def test_the_priority_queue_alone_is_not_always_best():
    """It starts bulk just before the urgent load comes; the plan leaves the link idle for it."""
    loads = [LinkLoad("bulk", 100, 9.9, 5.0), LinkLoad("urgent", 1, 10.0, 0.0)]
    link = LinkFit(0.0, 0.04)
    queue = simulate_link(loads, link, order=(0, 1), credit=1)
    plan = simulate_link(
        loads, link, order=planned_order(loads, link, credit=1, jitter=0), credit=1
    )
    assert queue.step == pytest.approx(13.94)
    assert plan.step == pytest.approx(10.04)


def test_an_order_that_hangs_on_one_moment_is_left_alone():
    """The urgent gradient comes at the very moment at which the link becomes free: any delay of it
    would leave the link idle with bulk ready, and hold up all of that. Sending the bulk first costs
    0.02 of 3.55 seconds if nothing is late, and gains as soon as something is."""
    loads = [
        LinkLoad("first", 100, 1.0, 3.0),
        LinkLoad("urgent", 5, 2.0, 0.98),
        LinkLoad("bulk", 250, 1.5, 1.0),
        LinkLoad("last", 1, 3.0, 3.2),
    ]
    link = LinkFit(0.0, 0.01)
    certain = planned_order(loads, link, credit=1, jitter=0)
    robust = planned_order(loads, link, credit=1, jitter=0.05)
    assert certain[:3] == (0, 1, 2)
    assert robust[:3] == (0, 2, 1)
    assert simulate_link(loads, link, order=certain, credit=1).step == pytest.approx(3.55)
    assert simulate_link(loads, link, order=robust, credit=1).step == pytest.approx(3.57)
    late = [replace(load, ready=load.ready + 0.1 * (i == 1)) for i, load in enumerate(loads)]
    assert simulate_link(late, link, order=certain, credit=1).step == pytest.approx(3.65)
    assert simulate_link(late, link, order=robust, credit=1).step == pytest.approx(3.57)


def test_last_come_first_served_is_a_trap():
    """MLSL sends the newest gradient first, as a proxy for the first layer. Here the newest is that
    of a side branch which the next forward pass uses last, and the bulky embedding, whose weights
    are shared with the output layer, was ready before and is used first."""
    loads = [
        LinkLoad("embedding (shared)", 40, ready=9.0, needed=0.0),
        LinkLoad("block", 10, ready=9.5, needed=1.0),
        LinkLoad("skip branch", 40, ready=10.0, needed=4.0),
    ]
    link = LinkFit(0.0, 0.05)
    # At 9.0 the link is busy with an older load, so that all three are there when it is free.
    old = LinkLoad("bulk", 22, ready=8.9, needed=3.0)
    everything = [*loads, old]
    newest_first = (3, 2, 1, 0)
    planned = planned_order(everything, link, credit=1)
    lifo = simulate_link(everything, link, order=newest_first, credit=1, compute=10.0)
    best = simulate_link(everything, link, order=planned, credit=1, compute=10.0)
    assert planned.index(0) < planned.index(2)
    assert best.step < lifo.step * 0.85


def test_urgency_is_the_use_and_not_the_time_of_coming():
    """Two loads that come together in bulk: the one that is used first goes first."""
    loads = [LinkLoad("late use", 10, 1.0, 0.9), LinkLoad("early use", 10, 1.0, 0.1)]
    assert planned_order(loads, LinkFit(0.0, 0.1), credit=2) == (1, 0)


@pytest.mark.parametrize(
    ("communication", "fifo", "priority"),
    [
        (0.25, 1.01, 1.01),
        (0.5, 1.02, 1.02),
        (0.75, 1.11, 1.03),
        (1.0, 1.36, 1.05),
        (1.5, 1.86, 1.54),
        (2.0, 2.36, 2.04),
        (4.0, 4.36, 4.04),
    ],
)
def test_the_table_of_equal_layers(communication, fifo, priority):
    """25 equal layers: the specification's table, whose priority column has chunks smaller than a
    layer (a whole layer cannot be overtaken, which costs up to 0.03 more)."""
    loads, link = layers(25, communication)
    assert simulate_link(loads, link, crossing=False).step == pytest.approx(fifo, abs=0.006)
    assert simulate_link(loads, link).step == pytest.approx(
        fifo, abs=0.006
    )  # layer 0 is still last
    chunks, link = layers(25, communication, pieces=4)
    step = simulate_link(chunks, link, order=planned_order(chunks, link, credit=2)).step
    assert step == pytest.approx(priority, abs=0.01)
    order = planned_order(loads, link := LinkFit(0.0, communication / 25), credit=2)
    assert simulate_link(loads, link, order=order).step <= priority + 0.031


def test_the_first_layer_waits_for_no_more_than_the_credit():
    """MLSL: its sum is there at most (its bytes + credit chunks) / rate after it is ready, and by
    what is left of the margin for jitter, in whole chunks, later than that."""
    for credit in (1, 2, 4):
        loads, link = layers(25, 1.5, pieces=4)
        piece = link.seconds(1)
        for jitter, more in ((0.0, 0), (0.01, 1)):
            order = planned_order(loads, link, credit=credit, jitter=jitter)
            trips = simulate_link(loads, link, order=order, credit=credit).trips
            latest = max(t.received for t in trips[:4])
            assert latest <= 1.0 + (4 + credit + more) * piece + 1e-12


def test_the_plan_is_the_same_for_the_same_numbers():
    loads, link = random_loads(random.Random(5), 60)
    assert len({planned_order(loads, link, credit=2) for _ in range(3)}) == 1


def test_ready_order_puts_the_urgent_one_first_among_equals():
    loads = [LinkLoad(0, 1, 2.0, 0.5), LinkLoad(1, 1, 1.0, 0.5), LinkLoad(2, 1, 1.0, 0.1)]
    assert ready_order(loads) == (2, 1, 0)


# -- one machine -------------------------------------------------------------------------------


def test_branch_and_bound_finds_the_best_order():
    draw = random.Random(0)
    mended = 0
    for number in range(40):
        jobs = [
            SequencedJob(draw.uniform(0, 10), draw.uniform(0.5, 4), draw.uniform(0, 10))
            for _ in range(2 + number % 5)
        ]
        best = min(sequence_end(jobs, order) for order in itertools.permutations(range(len(jobs))))
        found = carlier(jobs)
        assert found.end == pytest.approx(best, rel=1e-9)
        assert sequence_end(jobs, found.order) == found.end
        assert preemptive_end(jobs) <= best + 1e-12
        assert found.bound <= best + 1e-12
        mended += sequence_end(jobs, schrage(jobs)) > best * (1 + 1e-9)
    assert mended > 4  # the queue alone would not do


def test_without_budget_the_queue_s_order_and_a_true_bound_come_back():
    draw = random.Random(1)
    jobs = [
        SequencedJob(draw.uniform(0, 9), draw.uniform(1, 3), draw.uniform(0, 9)) for _ in range(8)
    ]
    found = carlier(jobs, budget=0)
    assert found.order == schrage(jobs)
    assert found.bound == pytest.approx(preemptive_end(jobs))
    assert found.bound <= carlier(jobs).end


# -- chunks ------------------------------------------------------------------------------------


def test_the_smallest_chunk_whose_latency_is_below_three_per_cent():
    link = LinkFit(1e-3, 1e-8)
    size = chunk_size(link, largest=2**30)
    assert link.latency / link.seconds(size) <= 0.03 < link.latency / link.seconds(size - 4096)
    assert size % 4096 == 0


def test_chunks_are_neither_tiny_nor_larger_than_the_largest_bucket():
    assert chunk_size(LinkFit(0.0, 1e-8), largest=2**30) == SMALLEST_CHUNK
    assert chunk_size(LinkFit(1.0, 1e-8), largest=2**22) == 2**22
    assert chunk_size(LinkFit(1e-3, 0.0), largest=2**22) == 2**22
    assert chunk_size(LinkFit(0.0, 1e-8), largest=1000) == 1000
