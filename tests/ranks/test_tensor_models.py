"""ranks: users' models split in one to three dimensions equal the serial run; checkpoints."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import PlanError
from headway.parallel.split_layers import apply_split_decisions, infer_split, split_model
from headway.parallel.tensor import ProcessGrid, SplitSettings, SplitTensor
from headway.plans.tensor_layout import TensorGrid
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support import split_models as models
from support.ranks import run_ranks

CASES = {
    "separate": (
        lambda: models.Gpt("separate", drop=0.2, recompute=True),
        models.language_loss,
        models.words,
    ),
    "fused": (lambda: models.Gpt("fused", drop=0.2), models.language_loss, models.words),
    "grouped": (lambda: models.Gpt("grouped", tied=False), models.language_loss, models.words),
    "encoder": (models.Encoder, models.language_loss, models.words),
    "translator": (models.Translator, models.language_loss, models.words),
    "tower": (models.Tower, models.square_loss, models.vectors),
    "bundled": (
        lambda: TransformerLM(
            TransformerConfig(vocabulary=32, window=8, width=16, layers=2, heads=4, dropout=0.1)
        ),
        models.language_loss,
        models.words,
    ),
}
TWO = {"classic": TensorGrid.classic(2), "(2, 1, 1)": TensorGrid.cuboid(2, 1, 1)}
FOUR = {
    "2-D": TensorGrid.summa(2),
    "(1, 2, 2)": TensorGrid.cuboid(1, 2, 2),
    "(4, 1, 1)": TensorGrid.cuboid(4, 1, 1),
    "(1, 4, 1)": TensorGrid.cuboid(1, 4, 1),
}
EIGHT = {
    "2.5-D": TensorGrid.summa(2, depth=2),
    "(2, 2, 2)": TensorGrid.cuboid(2, 2, 2),
    "(1, 2, 4)": TensorGrid.cuboid(1, 2, 4),
    "(4, 1, 2)": TensorGrid.cuboid(4, 1, 2),
}
FEWER = {
    "(2, 1, 1)": tuple(name for name in CASES if name != "translator"),
    "(4, 1, 1)": ("fused", "bundled"),
    "(1, 4, 1)": ("fused", "bundled", "encoder"),
    "2.5-D": ("fused", "bundled", "grouped"),
    "2-D": tuple(name for name in CASES if name != "translator"),
    "(1, 2, 2)": tuple(name for name in CASES if name != "translator"),
    "(2, 2, 2)": tuple(name for name in CASES if name != "translator"),
    "(1, 2, 4)": ("fused", "bundled"),
    "(4, 1, 2)": ("fused", "bundled", "encoder"),
}
"""Models on a grid; all of them where there is no entry."""


def build(name):
    torch.manual_seed(0)
    make, loss, data = CASES[name]
    return make().double(), loss, data()


def backward(model, loss, batch):
    """The loss and all gradients; masks are drawn from one seed."""
    torch.manual_seed(7)
    value = loss(model, batch)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


def update(model):
    """A clipped step; the norm. Adam would magnify gradients that are 0 but for rounding."""
    parameters = list(model.parameters())
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    return norm


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor | SplitTensor) else tensor


def close(found, expected, what):
    scale = max(1.0, float(expected.abs().max()))
    assert (full(found) - expected).abs().max() <= 1e-12 * scale, what


def equal_to_serial(grid, name, decisions, settings=None):
    """Forward and every gradient; of some models the clipped norm and a step."""
    model, loss, batch = build(name)
    serial = copy.deepcopy(model)
    names = [(n, p.shape) for n, p in model.named_parameters()]
    parts = apply_split_decisions(model, grid, decisions, settings=settings)
    assert names == [(n, p.shape) for n, p in model.named_parameters()]
    expected, found = backward(serial, loss, batch), backward(model, loss, batch)
    close(found[0], expected[0], "loss")

    def same(theirs, ours):
        for key, value in theirs.items():
            part = parts.held(key, value.detach()).to_local()
            close(ours[key].to_local(), part, f"{name} {key}")

    same(expected[1], found[1])
    if name == "fused" and grid.plan.ranks < 8:  # DTensor is slow in 3 dims
        close(update(model), update(serial), "norm")
        same(dict(serial.named_parameters()), dict(model.named_parameters()))
    model.eval(), serial.eval()
    with torch.no_grad():
        close(model(batch[0]), serial(batch[0]), "evaluated")
    return parts


def on_grids(world, surveys):
    grids = {}
    for (plan, name), decisions in surveys.items():
        grid = grids.get(plan) or grids.setdefault(plan, ProcessGrid.of(decisions.plan))
        parts = equal_to_serial(grid, name, decisions)
        if decisions.plan.form == "cuboid" and name == "grouped":
            equal_to_serial(grid, name, decisions, SplitSettings(keep=False, chunks=2))
            held = sum(p.to_local().numel() for p in parts.model.parameters())
            whole = sum(p.numel() for p in parts.model.parameters())
            scales = sum(p.numel() for n, p in parts.model.named_parameters() if "norm" in n)
            assert held == (whole - scales) // decisions.plan.ranks + scales


def surveyed(plans):
    """Decided once for all ranks, as any of them would."""
    found = {}
    for plan, name in itertools.product(plans, CASES):
        if plan in FEWER and name not in FEWER[plan]:
            continue
        model, loss, batch = build(name)
        found[plan, name] = infer_split(model, loss, batch, plans[plan])
    return found


@pytest.mark.slow
def test_two_ranks():
    run_ranks(2, on_grids, surveyed(TWO), timeout=90)


@pytest.mark.slow
def test_four_ranks():
    run_ranks(4, on_grids, surveyed(FOUR), timeout=120)


@pytest.mark.slow
def test_eight_ranks():
    run_ranks(8, on_grids, surveyed(EIGHT), timeout=150)


# -- what travels -----------------------------------------------------------------------------


def exchanged(world):
    """Elements of a classic block: two all-reduces forward, two backward, of samples x width."""
    block = models.Block(models.SeparateAttention(), models.Gelu(), nn.LayerNorm).double()
    x, _ = models.vectors()
    x = x.repeat(1, 3, 1)[:, : models.LENGTH].requires_grad_()
    grid = ProcessGrid.of(TensorGrid.classic(world.size))

    def loss(model, batch):
        return model(batch).square().mean()

    parts = split_model(block, grid, loss, x)
    assert not parts.decisions.left
    loss(block, x.detach()).detach()
    grid.received.clear()
    value = loss(block, x)
    once = 2 * (world.size - 1) * x.numel() // world.size
    assert grid.count == 2 * once
    value.backward()
    assert grid.count == 4 * once
    return {n: (p.to_local().numel(), p.numel()) for n, p in block.named_parameters()}


def test_elements_and_shares_of_a_classic_block():
    for sizes in run_ranks(4, exchanged):
        for name, (local, whole) in sizes.items():
            cut = name.startswith(("attention.", "mlp.")) and not name.endswith(
                ("o.bias", "2.bias")
            )
            assert local == (whole // 4 if cut else whole), name


# -- checkpoints ------------------------------------------------------------------------------


def loaded(world, folder, expected):
    for plan in (TensorGrid.classic(2), TensorGrid.cuboid(1, 2, 1)):
        model, loss, batch = build("fused")
        split_model(model, ProcessGrid.of(plan), loss, batch)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        for key, value in model.state_dict().items():
            assert torch.equal(full(value), expected[key]), key
        model.load_state_dict(expected)  # of an unsplit model
        serial = build("fused")[0]
        serial.load_state_dict(expected)
        model.eval(), serial.eval()
        with torch.no_grad():
            close(model(batch[0]), serial(batch[0]), "after loading")


def save_then_return(world, folder):
    model, loss, batch = build("fused")
    parts = split_model(model, ProcessGrid.of(TensorGrid.cuboid(2, 2, 2)), loss, batch)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    assert "in 3 blocks" in parts.explain()
    return {k: full(v).clone() for k, v in model.state_dict().items()}


@pytest.mark.slow
def test_saved_on_a_cube_loaded_on_others_and_serially(tmp_path):
    expected = run_ranks(8, save_then_return, tmp_path)[0]
    run_ranks(2, loaded, tmp_path, expected)
    state = {"model": build("fused")[0].state_dict()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=tmp_path)
    assert all(torch.equal(v, expected[k]) for k, v in state["model"].items())


# -- refusals ---------------------------------------------------------------------------------


def refused(world):
    model, loss, batch = build("separate")
    parts = split_model(model, ProcessGrid.of(TensorGrid.cuboid(2, 1, 1)), loss, batch)
    with pytest.raises(PlanError, match="of a micro-batch: 3 over i = 2; legal degrees: 1, 3"):
        model(batch[0][:3])
    logits = model(batch[0])
    with pytest.raises(PlanError, match="cumsum cannot be carried out on a tensor"):
        logits.cumsum(0)
    with pytest.raises(Exception, match="another grid or another model"):
        apply_split_decisions(build("fused")[0], parts.grid, parts.decisions)


def test_at_work_what_has_no_rule_is_refused():
    run_ranks(2, refused)
