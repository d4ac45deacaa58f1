"""pure: closed forms of the shortest step, and what the planner says limits one."""

from __future__ import annotations

import itertools
import random

import pytest

from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import (
    LinkLoad,
    diagnose,
    sharp_step_bound,
    simulate_link,
    step_bound,
)
from headway.collective.model.priority_order import planned_order


@pytest.mark.parametrize("crossing", [False, True])
def test_no_order_is_faster_than_the_bounds(crossing):
    draw = random.Random(0)
    for number in range(12):
        forward = draw.uniform(1, 4)
        loads = [
            LinkLoad(i, draw.randint(1, 20), draw.uniform(forward, 10), draw.uniform(0, forward))
            for i in range(1 + number % 5)
        ]
        compute = max(load.ready for load in loads)
        link = LinkFit(draw.uniform(0, 0.2), draw.uniform(0, 1))
        busy = sum(link.seconds_per_byte * load.num_bytes for load in loads)
        sharp = sharp_step_bound(loads, link, compute=compute, crossing=crossing)
        best = min(
            simulate_link(loads, link, order=order, crossing=crossing, credit=len(loads)).step
            for order in itertools.permutations(range(len(loads)))
        )
        assert sharp <= best + 1e-9
        if not crossing:
            assert step_bound(forward, compute - forward, busy, "overlap") <= best + 1e-9
            assert best == pytest.approx(max(sharp, compute), abs=1e-9)


def test_small_chunks_reach_the_sharp_bound():
    n, pieces = 25, 8
    loads = [
        LinkLoad((i, k), 1, 1 / 3 + (n - i) / n * 2 / 3, i / n / 3)
        for i in range(n)
        for k in range(pieces)
    ]
    for busy in (0.5, 1.0, 1.5, 3.0):
        link = LinkFit(0.0, busy / len(loads))
        sharp = sharp_step_bound(loads, link, compute=1.0, crossing=True)
        step = simulate_link(loads, link, order=planned_order(loads, link, credit=2)).step
        assert sharp * (1 - 1e-12) <= step <= sharp * 1.006


@pytest.mark.parametrize(("how", "expected"), [("none", 6.0), ("overlap", 5.0), ("crossing", 4.0)])
def test_closed_forms(how, expected):
    assert step_bound(1.0, 1.0, 4.0, how) == expected


def test_the_gain_of_crossing_is_largest_where_both_are_equal():
    forward, backward = 1.0, 2.0

    def gain(busy):
        return step_bound(forward, backward, busy, "overlap") / step_bound(
            forward, backward, busy, "crossing"
        )

    assert gain(3.0) == pytest.approx(1 + forward / (forward + backward))
    assert all(gain(busy) < gain(3.0) for busy in (1.0, 2.0, 2.9, 3.1, 5.0, 20.0))


@pytest.mark.parametrize(
    ("numbers", "limit", "seconds"),
    [
        # step, F, B, C, how, sharp
        ((3.05, 1.0, 2.0, 0.5, "overlap", 3.04), "compute", None),
        ((5.9, 1.0, 2.0, 3.0, "overlap", 4.1), "buckets", 1.8),  # DDP's default
        ((4.1, 1.0, 2.0, 3.0, "overlap", 4.05), "border", 1.0),
        ((3.2, 1.0, 2.0, 3.0, "crossing", 3.15), "ends", 0.15),
        ((9.1, 1.0, 2.0, 9.0, "crossing", 9.05), "bytes", 6.0),
        ((4.0, 1.0, 2.0, 1.0, "none", None), "overlap", 1.0),
        ((5.0, 1.0, 2.0, 3.0, "crossing", None), "buckets", 2.0),
    ],
)
def test_it_says_what_limits(numbers, limit, seconds):
    *given, sharp = numbers
    found = diagnose(*given, sharp=sharp)
    assert found.limit == limit
    if seconds is not None:
        assert found.seconds[limit] == pytest.approx(seconds)


@pytest.mark.parametrize("how", ["none", "overlap", "crossing"])
def test_the_parts_add_up_to_the_step(how):
    found = diagnose(9.0, 1.0, 2.0, 4.0, how, sharp=5.5)
    assert sum(found.seconds.values()) == pytest.approx(9.0 - 3.0)
    assert min(found.seconds.values()) >= 0


def test_the_sentence_has_numbers_and_a_remedy():
    text = diagnose(4.1, 1.0, 2.0, 3.0, "overlap").sentence
    assert text == (
        "a step of 4.1 s computes for 3 s and needs the link for 3 s: limited by the border of the "
        "step (1 s of it); let the exchange cross the border of the step (priority = true)"
    )
    assert "limited by compute; nothing" in diagnose(3.0, 1.0, 2.0, 1.0, "overlap").sentence
    assert "compress" in diagnose(9.0, 1.0, 2.0, 9.0, "crossing").sentence
