"""single: random draws belong to samples: any split of a batch draws the same numbers.

Also notices when torch's private dispatch mode, on which this stands, changes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from headway.run.step.batch import resize_batch
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraw,
    RandomDraws,
    generators_restored,
    mix_seeds,
    probe_random_draws,
    seed_everything,
)


class Attention(nn.Module):
    """Dropout by module, by function, inside attention, and over a flattened batch."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mha = nn.MultiheadAttention(dim, heads, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.25)
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        y = self.drop(y.transpose(1, 2).reshape(b * t, d)).view(b, t, d)
        y = y + self.mha(x, x, x)[0]
        y = F.dropout(y.transpose(0, 1), 0.5, self.training).transpose(0, 1)
        return y + torch.randn_like(y) * 0.1 + torch.rand(t, d, dtype=x.dtype)


class Recomputed(nn.Module):
    """A part that backward runs again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 8))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(checkpoint(self.inner, x, use_reentrant=False))


def loss(model, batch):
    return model(batch).square().mean()


def gradients(model, batch, cuts):
    """Gradients of the mean over `batch`, taken in micro-batches of the given sizes."""
    sites = probe_random_draws(model, loss, batch, resize_batch)
    model.zero_grad()
    start, outputs = 0, []
    for size in cuts:
        seed_everything(7, 0, 100)
        mode = LogicalRandomness(sites, range(start, start + size), 0)
        part = batch[start : start + size]
        with mode:
            value = loss(model, part) * size / len(batch)
            value.backward()
        outputs.append(float(value.detach()))
        start += size
    return sum(outputs), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("build", [Attention, Recomputed])
@pytest.mark.parametrize("cuts", [(3, 3), (1, 2, 2, 1), (5, 1)])
def test_any_split_gives_the_same_gradients(build, cuts):
    torch.manual_seed(0)
    model = build().double().train()
    batch = torch.randn(6, 5, 8, dtype=torch.float64)
    whole, expected = gradients(model, batch, (6,))
    parts, got = gradients(model, batch, cuts)
    assert abs(whole - parts) < 1e-12
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_recomputation_is_found_and_repeats_the_masks():
    """The gradient with checkpointing equals the one without, mask for mask."""
    torch.manual_seed(0)
    model = Recomputed().double().train()
    batch = torch.randn(4, 8, dtype=torch.float64)
    assert probe_random_draws(model, loss, batch, resize_batch).in_backward
    _, with_checkpoint = gradients(model, batch, (4,))
    model.forward = lambda x: model.drop(model.inner(x))
    assert not probe_random_draws(model, loss, batch, resize_batch).in_backward
    _, without = gradients(model, batch, (4,))
    for a, b in zip(with_checkpoint, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_probe_finds_where_samples_lie():
    model = Attention().double().train()
    sites = probe_random_draws(
        model, loss, torch.randn(6, 5, 8, dtype=torch.float64), resize_batch
    ).forward
    assert RandomDraw(0, 5) in sites  # the flattened batch: five rows belong to a sample
    assert RandomDraw(1, 1) in sites  # the transposed batch
    assert sites[-2:] == (RandomDraw(0, 1), RandomDraw(None))  # randn_like, and the shared rand


def test_the_probe_puts_back_parameters_that_the_forward_pass_changes():
    class Teacher(nn.Module):
        """As DINO and BYOL: a copy that follows the weights by a moving average."""

        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.view(-1).lerp_(self.student.weight.view(-1), 0.1)
                torch._foreach_mul_([self.teacher.bias], 0.9)
            return self.student(x) - self.teacher(F.dropout(x, 0.5))

    model = Teacher()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe_random_draws(model, loss, torch.randn(4, 8), resize_batch)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_probe_leaves_no_attributes_behind():
    """A state that the forward pass keeps would keep the graph of the probe's pass."""

    class Recurrent(nn.Linear):
        state, calls = None, 0

        def forward(self, x):
            self.calls += 1
            self.before, self.state = self.state, torch.tanh(F.dropout(super().forward(x)))
            return self.state

    model = Recurrent(8, 8)
    before = set(vars(model))
    probe_random_draws(model, loss, torch.randn(4, 8), resize_batch)
    assert set(vars(model)) == before
    assert (model.state, model.calls) == (None, 0)


def test_the_probe_leaves_everything_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = torch.randn(6, 8)
    state = torch.get_rng_state()
    probe_random_draws(model, loss, batch, resize_batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_permutation_of_the_samples_is_a_doubt():
    """Mix-up: which sample goes with which depends on the micro-batch."""

    def mixed(model, batch):
        return model(batch + batch[torch.randperm(len(batch))]).square().mean()

    sites = probe_random_draws(nn.Linear(8, 8), mixed, torch.randn(6, 8), resize_batch)
    assert "randperm mixes the samples" in sites.doubts[0]


def test_reentrant_checkpointing_repeats_the_masks():
    torch.manual_seed(0)
    model = Recomputed().double().train()
    model.lead = nn.Linear(8, 8).double()
    model.forward = lambda x: model.drop(checkpoint(model.inner, model.lead(x), use_reentrant=True))
    batch = torch.randn(4, 8, dtype=torch.float64)
    assert probe_random_draws(model, loss, batch, resize_batch).in_backward
    _, with_checkpoint = gradients(model, batch, (4,))
    model.forward = lambda x: model.drop(model.inner(model.lead(x)))
    _, without = gradients(model, batch, (4,))
    for a, b in zip(with_checkpoint, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_batch_that_cannot_be_resized_is_no_error():
    def graph(model, batch):
        sources, targets = batch["edges"]
        y = model(batch["x"])
        return (y[sources] - y[targets]).square().mean()

    batch = {"x": torch.randn(6, 8), "edges": torch.randint(6, (2, 9))}
    assert probe_random_draws(nn.Linear(8, 8), graph, batch, resize_batch) == RandomDraws(
        (), in_backward=False
    )
    dropping = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert "cannot be cut" in probe_random_draws(dropping, graph, batch, resize_batch).doubts[0]


def test_an_error_of_the_model_is_shown_as_it_is():
    def wrong(model, batch):
        raise ValueError("not my shape")

    with pytest.raises(ValueError, match="not my shape"):
        probe_random_draws(nn.Linear(8, 8), wrong, torch.randn(6, 8), resize_batch)


def test_seeding_is_quick():
    """torch.manual_seed takes a stack trace for accelerators that are not there, every time."""
    if torch.accelerator.is_available():
        pytest.skip("has an accelerator to seed")
    calls = []
    original = torch.manual_seed
    torch.manual_seed = lambda seed: calls.append(seed)
    try:
        seed_everything(1, 2, 3)
    finally:
        torch.manual_seed = original
    first = torch.rand(3)
    seed_everything(1, 2, 3)
    assert torch.equal(first, torch.rand(3))
    assert calls == []


def test_models_without_randomness_have_no_sites():
    assert probe_random_draws(
        nn.Linear(8, 8), loss, torch.randn(6, 8), resize_batch
    ) == RandomDraws((), in_backward=False)


def test_attention_without_dropout_costs_nothing():
    """The operator is marked as random by torch, and draws only with dropout."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x):
            y = self.line(x)[:, None]
            return F.scaled_dot_product_attention(y, y, y)

    batch = torch.randn(6, 5, 8)
    assert probe_random_draws(Plain(), loss, batch, resize_batch) == RandomDraws(
        (), in_backward=False
    )


class Entangled(nn.Module):
    """A draw that mixes samples: no split can repeat it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * F.dropout(x @ x.T, 0.5, self.training)


def test_a_draw_that_mixes_samples_is_reported():
    sites = probe_random_draws(Entangled(), loss, torch.randn(6, 8), resize_batch)
    assert len(sites.doubts) == 1
    assert "cut into samples" in sites.doubts[0]


def test_different_samples_and_steps_draw_different_numbers():
    sites = RandomDraws((RandomDraw(0),), in_backward=False)

    def draw(step, positions):
        seed_everything(1, 0, step)
        with LogicalRandomness(sites, positions, 0):
            return F.dropout(torch.ones(len(positions), 64), 0.5)

    first = draw(0, range(4))
    assert torch.equal(first, draw(0, range(4)))
    assert len({tuple(row.tolist()) for row in first}) == 4
    assert not torch.equal(first, draw(4, range(4)))
    assert torch.equal(first[2:], draw(0, range(2, 4)))


def test_masks_keep_the_right_share():
    sites = RandomDraws((RandomDraw(0),), in_backward=False)
    seed_everything(3)
    with LogicalRandomness(sites, range(200), 0):
        kept = (F.dropout(torch.ones(200, 500), 0.3) > 0).double()
    assert abs(float(kept.mean()) - 0.7) < 5 * (0.21 / 100_000) ** 0.5
    assert float(kept.mean(0).std()) < 1.3 * (0.21 / 200) ** 0.5


def test_generators_are_restored():
    state = torch.get_rng_state()
    with generators_restored():
        torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())


def test_mix_is_a_fixed_function():
    """Golden: a changed key would change every run that is resumed."""
    assert mix_seeds(0) == 0x032DB10DAE10213C
    assert mix_seeds(1, 2) == 0xD13C8240626AA172
    assert mix_seeds(2, 1) == 0x98B5E08CBBD08FB5
    assert len({mix_seeds(a, b) for a in range(64) for b in range(64)}) == 4096


class Recurrent(nn.Module):
    """Two layers with dropout between them, over padded or packed sequences (x_BTF, lengths_B)."""

    def __init__(self, kind, *, packed, dropout=0.4):
        super().__init__()
        self.packed = packed
        self.cells = kind(4, 5, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x):
        lengths = x[:, 0, 0].round().long().clamp(1, x.shape[1])
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.cells(x)[0]


def summed(model, batch):
    out = model(batch)
    return (out.data if isinstance(out, PackedSequence) else out).square().sum() / len(batch)


def sequences():
    torch.manual_seed(0)
    batch = torch.randn(6, 7, 4, dtype=torch.float64)
    batch[:, 0, 0] = torch.tensor([7.0, 3.0, 5.0, 2.0, 6.0, 4.0])
    return batch


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("packed", "dropout"), [(False, 0.4), (True, 0.0)])
def test_recurrent_layers_are_the_same_in_any_split(kind, packed, dropout):
    batch = sequences()
    model = Recurrent(kind, packed=packed, dropout=dropout).double().train()
    found = []
    for cuts in ((6,), (2, 3, 1)):
        sites = probe_random_draws(model, summed, batch, resize_batch)
        assert not sites.doubts
        model.zero_grad()
        start = 0
        for size in cuts:
            seed_everything(7, 0, 100)
            with LogicalRandomness(sites, range(start, start + size), 0):
                (summed(model, batch[start : start + size]) * size).backward()
            start += size
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_dropout_between_the_layers_of_packed_sequences_is_named():
    model = Recurrent(nn.LSTM, packed=True).double().train()
    (doubt,) = probe_random_draws(model, summed, sequences(), resize_batch).doubts
    assert "cells (nn.LSTM, dropout=0.4)" in doubt
    assert "packed sequence" in doubt
    assert not model.cells._forward_pre_hooks
    assert not probe_random_draws(model.eval(), summed, sequences(), resize_batch).doubts
