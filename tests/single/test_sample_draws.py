"""single: verification notices draws that do not belong to samples, and orders that miss some."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.data import Cursor, SampleOrder
from headway.data.order import sample_seeds
from headway.data.source import TensorSource
from headway.errors import NotEqual
from headway.plans import BatchSplit
from headway.run.step import randomness
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraw,
    RandomDraws,
    probe_random_draws,
)
from headway.verification.reference.batches import epoch_order, reference_batches
from headway.verification.reference.draw_sites import check_sites, unchanged
from headway.verification.reference.draws import seeds_of_samples, shuffled
from headway.verification.reference.random_laws import check_sample_draws


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


@pytest.mark.parametrize(("length", "seed", "epoch"), [(1, 0, 0), (10, 1, 0), (97, 2**40, 3)])
def test_orders_and_seeds_are_those_of_the_second_transcription(length, seed, epoch):
    order = SampleOrder(length, seed).indices(epoch, 0, length)
    assert np.array_equal(order, shuffled(length, seed, epoch))
    assert sample_seeds(seed, epoch, 2, 5) == seeds_of_samples(seed, epoch, range(2, 5))


def test_an_order_of_another_seed_is_noticed(monkeypatch):
    original = SampleOrder.indices
    monkeypatch.setattr(
        SampleOrder,
        "indices",
        lambda self, *places: original(SampleOrder(self.length, self.seed + 1), *places),
    )
    with pytest.raises(NotEqual, match="the order of epoch 0 is not the one"):
        epoch_order(97, 0, 0)


def test_draws_that_leave_out_the_epoch_are_noticed(monkeypatch):
    original = randomness.mix_seeds
    monkeypatch.setattr(
        randomness,
        "mix_seeds",
        lambda *parts: original(parts[0], parts[2]) if len(parts) == 3 else original(*parts),
    )
    with pytest.raises(NotEqual, match="is not the one that seed, epoch, draw and sample define"):
        check_sample_draws(2**63 + 1)


class Drawing(torch.nn.Module):
    """Draws with samples along the second dimension, draws for all samples, and not at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape[1])
        x = torch.nn.functional.dropout(x.t(), 0.5).t() + noise
        return torch.nn.functional.dropout(x, 0.5, training=False)


def total(model, data):
    return model(data).sum()


def test_where_a_model_draws_is_found_by_both_probes():
    data = torch.randn(5, 6)
    found = probe_random_draws(Drawing(), total, data, resize_batch)
    assert found.forward == (RandomDraw(None), RandomDraw(1))
    check_sites(Drawing(), total, data, found)
    for wrong in (
        RandomDraws((), in_backward=False),
        RandomDraws((RandomDraw(None), RandomDraw(None)), in_backward=False),
        RandomDraws((RandomDraw(None), RandomDraw(1, 3)), in_backward=False),
        RandomDraws((RandomDraw(None, draws=False), RandomDraw(1)), in_backward=False),
    ):
        with pytest.raises(NotEqual, match="random draw"):
            check_sites(Drawing(), total, data, wrong)


def test_a_probe_that_leaves_something_behind_is_noticed():
    model, data = torch.nn.BatchNorm1d(6), torch.randn(5, 6)
    with pytest.raises(NotEqual, match="changes running_mean"), unchanged(model):
        model(data)
    with pytest.raises(NotEqual, match="torch's generator"), unchanged(model):
        torch.rand(1)
    with unchanged(model):
        probe_random_draws(model, total, data, resize_batch)
