"""ranks: state that is kept in parts (ZeRO 1 to 3, hybrid) trains what one process trains."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.checkpoint.staging import local_data
from headway.errors import PlanError
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.device_mesh import state_mesh
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.commands import headway_here, resumed
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import flat, largest_error, train_serially
from support.tiny_models import (
    ComplexValued,
    Mlp,
    Points,
    Sentences,
    Tied,
    WithDropout,
    cross_entropy,
    ignoring_a_word,
)

SEED, STEPS = 3, 5


class Scaled(nn.Module):
    """A parameter of no dimension, one with fewer rows than ranks, blocks in a list.

    Args:
        gated: Which samples use the parameter of no dimension depends on them.
    """

    def __init__(self, gated=False):
        super().__init__()
        self.gated = gated
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(8, 4)

    def forward(self, x):
        chosen = (x[:, :1] > 0) | (not self.gated)
        x = self.enter(x)
        if chosen.any():
            x = torch.where(chosen, x * self.scale, x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "mean": (Mlp, Points, cross_entropy),
    "sum and count, tied": (Tied, Sentences, ignoring_a_word),
    "dropout": (WithDropout, Points, cross_entropy),
    "scaled": (Scaled, Points, cross_entropy),
    "gated": (partial(Scaled, gated=True), Points, cross_entropy),
}


class Tables(nn.Module):
    """Blocks that are tables of layers: a table is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(6), "inner": nn.Linear(6, 6)}) for _ in range(3)
        )
        self.leave = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["inner"](block["norm"](x)).tanh()
        return self.leave(x)


CASES["tables"] = (Tables, Points, cross_entropy)


class Repeated(nn.Module):
    """A block with dropout that is used three times, and computed again in backward."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 6))
        self.leave = nn.Linear(6, 4)

    def forward(self, x):
        for _ in range(3):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.leave(x)


CASES["dropout, computed again"] = (Repeated, Points, cross_entropy)


class Field(nn.Module):
    """A function of space in blocks that are gathered by themselves."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x)


def residual(model, batch):
    """Of a differential equation: what a derivative by the inputs is by the weights."""
    x = batch[0].clone().requires_grad_()
    value = model(x)
    (slope,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    return (slope.square().sum(1) * (1 + value[:, 0])).mean()


EVERYWHERE = tuple(CASES)
CASES["residual"] = (Field, Points, residual)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def split(world, case, batch, microbatch, length, zero, shards, clip):
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(
        batch, processes=world.size, microbatch=microbatch, precision="float64",
        zero=zero, shards=shards,
    )  # fmt: skip
    run = Executor(model, made, loss=loss, plan=plan, seed=SEED, clip=clip, world=World.adopt())
    history = []
    for _, part in zip(range(STEPS), run.batches(data(length), epochs=None), strict=False):
        found = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), found))
    with run.whole() as whole:
        held = flat({"parameter": dict(whole.named_parameters())}, found) if not world.rank else {}
    return history, [(tuple(p.shape), tuple(local_data(p).shape)) for p in model.parameters()], held


def compare(case, ranks, *, batch=12, microbatch=None, length=40, zero=3, shards=None, clip=None):
    build, data, loss = CASES[case]
    arguments = (case, batch, microbatch, length, zero, shards, clip)
    found = run_ranks(ranks, split, *arguments)
    serial = train_serially(
        build, data(length), loss, adamw, batch=batch, steps=STEPS, seed=SEED, clip=clip
    )
    for rank, (history, sizes, _) in enumerate(found):
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-12, f"rank {rank}, step {step}: {name} differs by {error:.1e}"
        parts = shards or ranks
        assert all(kept[0] <= -(-whole[0] // parts) for whole, kept in sizes if whole)
    for name, tensor in found[0][2].items():
        assert torch.equal(tensor, found[0][0][-1][name]), name


@pytest.mark.parametrize(("case", "zero"), sampled([*product(EVERYWHERE, [1, 2, 3])], 2))
def test_it_is_the_serial_run(case, zero):
    """40 samples: the fourth batch has 4, so that with micro-batches of 2 some ranks idle."""
    compare(case, 3, zero=zero, microbatch=2, clip=0.5 if case == "mean" else None)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_gradient_that_is_differentiated_again(zero):
    compare("residual", 2, zero=zero, microbatch=2)


def test_a_parameter_of_no_dimension_that_some_ranks_do_not_use():
    """A sample per rank: in each step none uses it, or one rank, or both."""
    compare("gated", 2, batch=2)


@pytest.mark.parametrize("zero", sampled([1, 3], 1))
def test_hybrid_copies_of_parts(zero):
    compare("scaled", 4, zero=zero, shards=2, clip=0.3, microbatch=2)


@pytest.mark.slow
def test_a_batch_of_fewer_samples_than_ranks():
    compare("scaled", 3, batch=13, length=40)  # the fourth batch has one sample


@pytest.mark.slow
def test_any_plan_resumes_what_any_other_has_saved(tmp_path):
    """Copies of parts, then parts, then one process, as one process throughout."""
    stages = ((3, 4, ("zero=3", "shards=2")), (6, 3, ("zero=1",)), (8, 1, ()))
    found, whole = resumed(tmp_path, "support.recipes:mlp", stages)
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_the_command_proves_it(tmp_path):
    for recipe, *values in (("dropout", "zero=3"), ("tied", "zero=2", "shards=1")):
        words = [w for v in values for w in ("--set", v)]
        done = headway_here("verify", f"support.recipes:{recipe}", "-n", "2", *words, cwd=tmp_path)
        assert done.code == 0, done.err
        assert "EQUAL to the serial run" in done.out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"zero": 3, "exchange": ExchangePlan(compress="fp16")}, "exchange.compress"),
        ({"zero": 1, "exchange": ExchangePlan(priority=True)}, "exchange.priority"),
        ({"shards": 2}, "memory.zero is 0"),
        ({"zero": 2, "shards": 3}, "no whole number of groups of 3"),
    ],
)
def test_what_cannot_be_together_is_refused_by_name(wrong, words):
    with pytest.raises(PlanError, match=words):
        data_parallel(12, processes=4, **wrong)


class Indirect(Mlp):
    """Its loss calls a part of it."""

    def forward(self, x):
        raise AssertionError


def outside(world):
    model = Indirect()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    run = Executor(
        model, adamw(model), loss=lambda m, b: layers[0](b[0]).square().mean(),
        plan=data_parallel(4, processes=world.size, zero=3), world=World.adopt(),
    )  # fmt: skip
    with pytest.raises(PlanError, match="outside of the module that gathers it"):
        run.step(next(iter(run.batches(Points(8)))))


def test_a_parameter_that_nobody_gathers_is_named():
    run_ranks(2, outside)


def refused(world, build, loss, zero):
    model = build()
    plan = data_parallel(4, processes=world.size, zero=zero)
    try:
        run = Executor(model, adamw(model), loss=loss, world=World.adopt(), plan=plan)
        run.step(next(iter(run.batches(Points(8)))))
    except PlanError as error:
        return str(error)
    return "no error"


def test_a_gradient_whose_parameters_are_freed_behind_it_is_refused():
    for said in run_ranks(2, refused, Field, residual, 3):
        assert "differentiated again" in said
        assert "test_sharded_state.py" in said
        assert "zero) to 2" in said


@pytest.mark.parametrize("zero", sampled([1, 3], 1))
def test_complex_parameters_are_refused_by_name(zero):
    for said in run_ranks(2, refused, ComplexValued, cross_entropy, zero):
        assert "wave is of torch.complex64" in said


def groups_of_state(world):
    plan = data_parallel(4, processes=world.size, zero=3)
    mesh = state_mesh(plan, torch.device("cpu"))
    return dist.get_backend(mesh.get_group())


def test_parts_of_state_travel_over_the_own_backend():
    assert run_ranks(2, groups_of_state) == ["headway_state"] * 2
