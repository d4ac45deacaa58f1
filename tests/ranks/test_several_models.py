"""ranks: several models and optimisers in one loop give what one process makes of them.

Each case is one function that runs in float64 on one process over the whole batch, and on two ranks
over their shares; parameters are compared by logical name.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway
from headway.run.distributed.world import World
from support.ranks import run_ranks

STEPS, BATCH, NOISE = 6, 8, 3


def net(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def draw(step: int, width: int, rank: int | None, kind: int = 0) -> Tensor:
    """This rank's half of a step's batch; None: all of it."""
    generator = torch.Generator().manual_seed(100 * step + kind)
    whole = torch.randn(BATCH, width, generator=generator, dtype=torch.float64)
    return whole if rank is None else whole.chunk(2)[rank]


class Alone:
    """What one process does in place of an Exchange."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


def exchanges(rank: int | None, *models: nn.Module, **choices: Any) -> list[Any]:
    if rank is None:
        return [Alone(model, adam(model)) for model in models]
    world = World.adopt()
    return [headway.Exchange(m, adam(m), world=world, **choices) for m in models]


def bce(score: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(score, torch.full_like(score, real))


def gan(rank: int | None, way: str, **choices: Any) -> list[nn.Module]:
    """The loop of torch's DCGAN tutorial: two backward passes for D, and G's through D."""
    maker, judge = net(NOISE, 4, 1), net(4, 1, 2)
    makes, judges = exchanges(rank, maker, judge, **choices)
    for step in range(STEPS):
        real, noise = draw(step, 4, rank), draw(step, NOISE, rank, 1)
        judges.zero_grad()
        fake = maker(noise)
        if way == "one pass":
            (bce(judge(real), 1.0) + bce(judge(fake.detach()), 0.0)).backward()
        else:
            bce(judge(real), 1.0).backward()
            bce(judge(fake.detach()), 0.0).backward()
        judges.step()
        if way == "five to one" and step % 5 != 4:
            continue
        makes.zero_grad()
        bce(judge(fake), 1.0).backward()
        makes.step()
    makes.close()
    judges.close()
    return [maker, judge]


def actor_critic(rank: int | None, way: str, **choices: Any) -> list[nn.Module]:
    """Two heads on a shared trunk, a backward pass each, one optimiser."""
    trunk, actor, critic = net(4, 5, 1), net(5, 3, 2), net(5, 1, 3)
    model = nn.ModuleDict({"trunk": trunk, "actor": actor, "critic": critic})
    (exchange,) = exchanges(rank, model, **choices)
    for step in range(STEPS):
        x, y = draw(step, 4, rank), draw(step, 1, rank, 1)
        found = trunk(x)
        value = critic(found)
        gain = (y - value.detach()) * F.log_softmax(actor(found), 1)[:, :1]
        (-gain).mean().backward(retain_graph=True)
        F.mse_loss(value, y).backward()
        exchange.step()
    exchange.close()
    return [model]


def teacher_student(rank: int | None, way: str, **choices: Any) -> list[nn.Module]:
    student = net(4, 3, 1)
    teacher = copy.deepcopy(student).requires_grad_(False)
    (exchange,) = exchanges(rank, student, **choices)
    for step in range(STEPS):
        x = draw(step, 4, rank)
        with torch.no_grad():
            wanted = teacher(x + 0.1 * draw(step, 4, rank, 1))
        F.mse_loss(student(x), wanted + 0.3).backward()
        exchange.step()
        if rank is not None:
            exchange.flush()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
    exchange.close()
    return [student, teacher]


def cleared(rank: int | None, way: str, **choices: Any) -> list[nn.Module]:
    """A pass whose gradients are cleared again; the next one uses a part of the model only."""
    trunk, first, second = net(4, 5, 1), net(5, 3, 2), net(5, 1, 3)
    model = nn.ModuleDict({"trunk": trunk, "first": first, "second": second})
    optimizer = adam(model)
    exchange = (
        Alone(model, optimizer)
        if rank is None
        else headway.Exchange(model, optimizer, world=World.adopt(), **choices)
    )
    for step in range(STEPS):
        x = draw(step, 4, rank)
        first(trunk(x)).square().mean().backward()
        optimizer.zero_grad()
        second(trunk(x)).square().mean().backward()
        exchange.step()
    exchange.close()
    return [model]


LOOPS = {
    "cleared": cleared,
    "gan": gan,
    "actor and critic": actor_critic,
    "teacher and student": teacher_student,
}


def split(
    world: Any, cases: list[tuple[str, str, dict[str, Any]]]
) -> list[list[dict[str, Tensor]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [
            [model.state_dict() for model in LOOPS[what](world.rank, way, **choices)]
            for what, way, choices in cases
        ]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_several_models_in_a_loop_are_trained_as_on_one_process():
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("gan", "two passes", {}),
        ("gan", "one pass", {}),
        ("gan", "one pass", {"priority": True}),
        ("gan", "five to one", {}),
        ("actor and critic", "", {}),
        ("actor and critic", "", {"bucket": "100"}),
        ("teacher and student", "", {}),
        ("cleared", "", {}),
    ]
    for found in run_ranks(2, split, cases):
        for (what, way, _), models in zip(cases, found, strict=True):
            for model, whole in zip(models, LOOPS[what](None, way), strict=True):
                assert_same(model, whole.state_dict())


def executors() -> list[dict[str, Tensor]]:
    """A GAN with an Executor for each model; the noise comes with the data."""
    maker, judge = net(NOISE, 4, 1), net(4, 1, 2)
    data = TensorDataset(
        torch.cat([draw(step, 4, None) for step in range(3)]),
        torch.cat([draw(step, NOISE, None, 1) for step in range(3)]),
    )

    def judging(model: nn.Module, batch: Any) -> Tensor:
        real, noise = batch
        with torch.no_grad():
            fake = maker(noise)
        return bce(model(real), 1.0) + bce(model(fake), 0.0)

    def making(model: nn.Module, batch: Any) -> Tensor:
        return bce(judge(model(batch[1])), 1.0)

    judges = headway.Executor(judge, adam(judge), loss=judging, batch=BATCH)
    makes = headway.Executor(maker, adam(maker), loss=making, batch=BATCH)
    for batch in judges.batches(data, epochs=2):
        judges.step(batch)
        makes.step(batch)
    judges.flush()
    makes.flush()
    return [model.state_dict() for model in (maker, judge)]


def executors_here(world: Any) -> list[dict[str, Tensor]]:
    return executors()


def test_each_model_may_have_an_executor():
    """The generator's loss passes through the discriminator, whose exchange drops the gradients."""
    for found in run_ranks(2, executors_here):
        for model, whole in zip(found, executors(), strict=True):
            assert_same(model, whole)


def wrong_use(world: Any, what: str) -> str:
    maker, judge = net(NOISE, 4, 1), net(4, 1, 2)
    choices = {"overlap": True} if what == "two passes, overlapped" else {}
    makes, judges = exchanges(world.rank, maker, judge, **choices)
    said = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            real, noise = draw(step, 4, world.rank), draw(step, NOISE, world.rank, 1)
            fake = maker(noise)
            try:
                if what == "two passes, overlapped":
                    bce(judge(real), 1.0).backward()
                    bce(judge(fake.detach()), 0.0).backward()
                elif what == "not detached":
                    (bce(judge(real), 1.0) + bce(judge(fake), 0.0)).backward(retain_graph=True)
                else:
                    (bce(judge(real), 1.0) + bce(judge(fake.detach()), 0.0)).backward()
                judges.step()
                if what == "not detached":
                    fake = maker(noise)
                else:
                    judges.zero_grad()
                bce(judge(fake), 1.0).backward()
                makes.step()
            except headway.errors.RunError as error:
                said.append(str(error))
                break
    return " ".join([*said, *(str(one.message) for one in seen)])


def test_wrong_uses_are_named():
    for said in run_ranks(2, wrong_use, "not detached"):
        assert "0.weight" in said or "2.bias" in said
        assert "detach()" in said
        assert "zero_grad()" in said
    for said in run_ranks(2, wrong_use, "gradients left in the discriminator"):
        assert "zero_grad() before this model's own backward pass" in said
    for said in run_ranks(2, wrong_use, "two passes, overlapped"):
        assert "no_sync()" in said
        assert "overlap=False" in said
