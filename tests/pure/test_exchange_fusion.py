"""pure: which gradients travel together: the best cuts of all, DDP's rule, chunks, priority."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from headway.collective.model.gradient_buckets import (
    CHUNK_ALIGNMENT,
    SLACK,
    SLOWER,
    backward_order,
    chunk_spans,
    ddp_buckets,
    fill_buckets,
    merge_buckets,
)
from headway.collective.model.link_fit import LinkFit


def arrival(buckets, sizes, ready, link) -> float:
    """When the last bucket has arrived, sent one after the other in this order."""
    clock = -math.inf
    for bucket in buckets:
        clock = max(clock, max(ready[i] for i in bucket))
        clock += link.seconds(sum(sizes[i] for i in bucket))
    return clock


def all_cuts(order):
    """Every way to cut a sequence into neighbours: 2^(n - 1)."""
    n = len(order)
    for mask in range(2 ** (n - 1)):
        borders = [0, *(i for i in range(1, n) if mask >> (i - 1) & 1), n]
        yield tuple(tuple(order[a:b]) for a, b in itertools.pairwise(borders))


def backward(draw, n):
    """Gradients in forward order: sizes of very different kinds, and when they come."""
    sizes = [draw.choice([256, 4096, 2**18, 2**20, 2**22]) for _ in range(n)]
    clock, ready = 1.0, [0.0] * n
    for i in reversed(range(n)):
        clock += draw.choice([0.0, 0.001, 0.02, 0.2])
        ready[i] = clock
    return sizes, ready


def slow(link):
    return LinkFit(link.latency * SLOWER, link.seconds_per_byte * SLOWER)


def test_merged_buckets_are_the_best_of_all_cuts():
    """The last one arrives as soon as it can; no cut with fewer buckets does, also on a link that
    is slower than measured."""
    draw = random.Random(0)
    for number in range(40):
        sizes, ready = backward(draw, 1 + number % 10)
        link = LinkFit(draw.choice([0.0, 1e-4, 5e-3, 0.1]), draw.choice([0.0, 1e-9, 1e-7]))
        cuts = [*all_cuts(backward_order(ready))]
        best = min(arrival(cut, sizes, ready, link) for cut in cuts)
        worse = min(arrival(cut, sizes, ready, slow(link)) for cut in cuts)
        merged = merge_buckets(sizes, ready, link, slack=0)
        assert arrival(merged, sizes, ready, link) == pytest.approx(best, rel=1e-11)
        assert [i for bucket in merged for i in bucket] == backward_order(ready)
        for other in cuts:
            if len(other) < len(merged):
                assert (
                    arrival(other, sizes, ready, link) > best * (1 + 1e-12)
                    or arrival(other, sizes, ready, slow(link)) > worse
                )
        near = merge_buckets(sizes, ready, link)
        assert len(near) <= len(merged)
        spread = max(ready) - min(ready)
        assert arrival(near, sizes, ready, link) <= best + SLACK * spread + 1e-9


def test_what_is_hidden_anyway_is_fused():
    """All but the last gradient can travel while that one is made: leaving earlier gains nothing,
    and leaves room for a link that is a quarter slower."""
    sizes, ready = [100] * 6, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert merge_buckets(sizes, ready, LinkFit(0.0, 0.001)) == ((5, 4, 3, 2, 1), (0,))
    assert merge_buckets(sizes, ready, LinkFit(0.0, 0.0019)) == ((5,), (4, 3, 2, 1), (0,))


def test_with_nothing_but_latency_the_last_gradient_takes_all_that_would_be_late():
    sizes, ready = [100] * 6, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert merge_buckets(sizes, ready, LinkFit(10.0, 0.0)) == ((5, 4, 3, 2, 1, 0),)


def test_a_bias_does_not_travel_alone():
    """Weight and bias come together: one collective, whatever is gained by leaving early."""
    sizes, ready = [400, 4, 400, 4], [2.0, 2.0, 1.0, 1.0]
    assert merge_buckets(sizes, ready, LinkFit(1e-3, 1e-6), slack=0) == ((3, 2), (1, 0))


def test_waiting_is_worth_it_if_it_costs_less_than_the_latency():
    """MG-WFBP's rule, with its two cases."""
    link = LinkFit(latency=1.0, seconds_per_byte=0.0)
    assert len(merge_buckets([1, 1], [0.9, 0.0], link)) == 1
    assert len(merge_buckets([1, 1], [1.1, 0.0], link)) == 1  # the last one arrives at 2.1 anyway
    slow = LinkFit(latency=1.0, seconds_per_byte=1.0)
    assert len(merge_buckets([1, 1], [0.9, 0.0], slow)) == 1
    assert len(merge_buckets([1, 1], [1.5, 0.0], slow)) == 2


def test_of_equally_fast_cuts_the_fewest_buckets():
    assert merge_buckets([5, 5, 5], [1.0, 1.0, 1.0], LinkFit(0.0, 0.1)) == ((2, 1, 0),)


def test_order_of_the_arguments_is_free():
    """Unordered parameters, as a branching model has them."""
    merged = merge_buckets([1, 1, 1], [2.0, 3.0, 1.0], LinkFit(0.0, 0.1))
    assert merged == ((2, 0), (1,))


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 sizes but 1 times"):
        merge_buckets([1, 2], [1.0], LinkFit(0.0, 0.0))
    assert merge_buckets([], [], LinkFit(0.0, 0.0)) == ()


def test_ddp_s_default_overlaps_nothing_of_25_mib():
    """One bucket of 1 MiB, one of 24, which leaves at the end of the backward pass."""
    order = [*reversed(range(25))]
    buckets = ddp_buckets([2**20] * 25, order, (2**20, 25 * 2**20))
    assert [len(bucket) for bucket in buckets] == [1, 24]
    assert [len(b) for b in ddp_buckets([10] * 5, [*range(5)], (20,))] == [2, 2, 1]


def test_fixed_sizes_are_never_exceeded_but_by_a_single_gradient():
    draw = random.Random(3)
    sizes = [draw.randint(1, 30) for _ in range(60)]
    buckets = fill_buckets(sizes, range(60), 20, first=5)
    assert [i for bucket in buckets for i in bucket] == [*range(60)]
    assert all(len(b) == 1 or sum(sizes[i] for i in b) <= 20 for b in buckets)
    assert len(fill_buckets([1] * 10, range(10), 4, first=2)[0]) == 2
    assert fill_buckets([], [], 4) == ()
    # What would be nearly empty takes in the large gradient behind it, if both fit a bucket.
    assert fill_buckets([1, 8, 1, 9], range(4), 20, first=8) == ((0, 1), (2, 3))
    assert fill_buckets([1, 20, 1, 9], range(4), 20, first=8) == ((0,), (1,), (2, 3))


# -- chunks ------------------------------------------------------------------------------------


def test_chunks_cover_a_bucket_evenly():
    sizes, chunks = (1, 63, 64, 65, 1000, 4096, 2**20 + 4), (64, 100, 1000, 2**18)
    for size, chunk in itertools.product(sizes, chunks):
        spans = chunk_spans(size, chunk)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == size
        assert all(start % CHUNK_ALIGNMENT == 0 for start, _ in spans)
        assert max(stop - start for start, stop in spans) <= chunk + CHUNK_ALIGNMENT
        assert len(spans) <= math.ceil(size / chunk)
