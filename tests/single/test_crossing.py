"""single: sums may be used in the step that releases them, never earlier."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from headway.comm.exchange.priority_exchange import BucketUpdater


class Slices:
    def __init__(self):
        self.steps: list[tuple[int, int]] = []

    def step(self, bucket, used):
        self.steps.append((bucket.number, bucket.step))


def a_bucket(number: int, step: int) -> Any:
    fused = SimpleNamespace(gradients=None)
    flight = SimpleNamespace(applied=0.0)
    return SimpleNamespace(number=number, step=step, fused=fused, flight=flight, used=(True,))


def an_applier() -> tuple[BucketUpdater, Slices]:
    applier, slices = BucketUpdater({0: 0, 1: 1}), Slices()
    applier.optimizers = cast(Any, slices)
    return applier, slices


def at_once(condition):
    assert condition()


def test_the_most_urgent_landed_bucket_is_used_first():
    applier, slices = an_applier()
    applier.landed(a_bucket(1, 1))
    applier.landed(a_bucket(0, 1))
    assert not applier.apply_one(), "nothing has been released"
    applier.release(1, 1.0, discard=False)
    while applier.apply_one():
        pass
    assert slices.steps == [(0, 1), (1, 1)]


def test_what_the_training_thread_took_does_not_let_the_next_sums_through():
    """The other thread's note of the bucket outlives its use; it must not open the next step."""
    applier, slices = an_applier()
    first = a_bucket(0, 1)
    applier.release(1, 1.0, discard=False)
    applier.landed(first)
    applier.wait_applied(first, at_once)
    applier.landed(a_bucket(0, 2))
    assert not applier.apply_one(), "step 2 has not been released"
    assert slices.steps == [(0, 1)]
    applier.release(2, 1.0, discard=False)
    assert applier.apply_one()
    assert not applier.apply_one()
    assert slices.steps == [(0, 1), (0, 2)]


def test_discarded_sums_are_never_used():
    applier, slices = an_applier()
    first = a_bucket(0, 1)
    applier.release(1, 1.0, discard=False)
    applier.landed(first)
    applier.wait_applied(first, at_once)
    applier.landed(a_bucket(0, 2))
    applier.apply_one()
    applier.release(2, 1.0, discard=True)
    while applier.apply_one():
        pass
    assert slices.steps == [(0, 1)]
    assert applier.applied == Counter({0: 2, 1: 0})
