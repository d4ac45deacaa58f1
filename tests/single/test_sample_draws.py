"""single: verification notices draws that do not belong to samples, and orders that miss some."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.data import Cursor, SampleOrder
from headway.data.source import TensorSource
from headway.errors import NotEqual
from headway.plans import BatchSplit
from headway.run.step.randomness import LogicalRandomness
from headway.verification.sample_draws import check_sample_draws
from headway.verification.samples import epoch_order, reference_batches


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_draws_belong_to_samples(seed):
    check_sample_draws(seed)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (lambda positions: [0] * len(positions), "same dropout mask"),
        (lambda positions: range(len(positions)), "depends on its batch"),
    ],
)
def test_draws_by_something_else_are_noticed(monkeypatch, key, said):
    original = LogicalRandomness.__init__
    monkeypatch.setattr(
        LogicalRandomness,
        "__init__",
        lambda self, sites, positions, epoch: original(self, sites, key(positions), epoch),
    )
    with pytest.raises(NotEqual, match=said):
        check_sample_draws(0)


def test_an_order_that_misses_samples_is_noticed(monkeypatch):
    original = SampleOrder.indices
    monkeypatch.setattr(SampleOrder, "indices", lambda self, *a: original(self, *a) // 2)
    with pytest.raises(NotEqual, match="every sample exactly once"):
        epoch_order(10, 0, 0)


def batches(split, copies=2):
    source = TensorSource(torch.arange(10.0), torch.arange(10))
    return list(reference_batches(source, split, copies, Cursor(seed=1), steps=4, drop_last=False))


def test_the_reference_reads_every_sample_once():
    found = batches(BatchSplit(samples=4, microbatch=1))
    read = [m.data[1] for step in found[:3] for share in step for m in share.micros]
    assert sorted(torch.cat(read).tolist()) == list(range(10))
    assert [step[0].samples for step in found] == [4, 4, 2, 4]
    assert [step[0].start.epoch for step in found] == [0, 0, 0, 1]
    assert np.array_equal(torch.cat(read).numpy(), SampleOrder(10, 1).indices(0, 0, 10))


def test_shares_that_overlap_are_noticed(monkeypatch):
    original = BatchSplit.share
    monkeypatch.setattr(BatchSplit, "share", lambda self, r, n, s=None: original(self, 0, n, s))
    with pytest.raises(NotEqual, match="not the global batch"):
        batches(BatchSplit(samples=4))
