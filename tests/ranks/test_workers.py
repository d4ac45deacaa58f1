"""ranks: workers that meet in rounds: local SGD, post-local SGD, DiLoCo, EASGD, D-PSGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.errors import PlanError, UsageError
from headway.plans import Synchrony, data_parallel
from headway.run.distributed.world import World
from support.ranks import run_ranks
from support.sampling import sampled

# Four workers on two cores; see `launch.preflight`.
pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

WAYS: dict[str, dict[str, Any]] = {
    "local": {"merge": "mean", "local_steps": 3},
    "post-local": {"merge": "mean", "local_steps": 3, "warm_up": 2},
    "kept": {"merge": "mean", "local_steps": 2, "state": "keep"},
    "reset": {"merge": "mean", "local_steps": 2, "state": "reset"},
    "slow momentum": {
        "merge": "mean", "local_steps": 2, "outer": "momentum", "outer_momentum": 0.6,
        "outer_rate": 0.9,
    },
    "diloco": {
        "merge": "mean", "local_steps": 2, "outer": "nesterov", "outer_momentum": 0.9,
        "outer_rate": 0.7,
    },
    "copies": {"merge": "mean", "local_steps": 3, "copies": 2},
    "elastic": {"merge": "elastic", "local_steps": 2, "alpha": 0.3, "beta": 0.2},
    "ring": {"merge": "neighbour"},
    "exponential": {"merge": "neighbour", "topology": "exponential", "local_steps": 2},
    "torus": {"merge": "neighbour", "topology": "torus"},
    "weights": {
        "merge": "neighbour",
        "weights": (
            (0.5, 0.5, 0.0, 0.0), (0.25, 0.5, 0.25, 0.0), (0.0, 0.0, 0.5, 0.5),
            (0.25, 0.0, 0.25, 0.5),
        ),
    },
}  # fmt: skip


def data(samples: int = 46) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))


def recipe(synchrony: Synchrony | None = None, **options: Any) -> headway.Recipe:
    made = {
        "name": "workers", "model": model, "data": data, "loss": nn.MSELoss(),
        "optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        "batch": 10, "stop": "12 steps", "clip": 1.0, "synchrony": synchrony,
    }  # fmt: skip
    return headway.Recipe(**{**made, **options})


@pytest.mark.parametrize("name", sampled(list(WAYS), 4))
def test_every_worker_does_what_one_process_makes_of_it(name: str) -> None:
    """A ragged last batch is among the steps, of six samples for four workers."""
    verdict = headway.verify(recipe(Synchrony(**WAYS[name])), processes=4, steps=6)
    verdict.check()
    assert "all workers equal" in repr(verdict)
    assert not verdict.runs[0].comparison.wrong
    assert len(verdict.runs[0].comparison.differences) > 100


def executor(world: World, **words: Any) -> headway.Executor:
    torch.manual_seed(0)
    net = model()
    return headway.Executor(
        net,
        torch.optim.Adam(net.parameters(), lr=0.01),
        loss=headway.criterion(nn.MSELoss()),
        plan=data_parallel(
            10, processes=world.ranks, precision="float64", synchrony=Synchrony(**words)
        ),
        world=world,
    )


DILOCO = WAYS["diloco"]


def trained(run: headway.Executor) -> list[list[float]]:
    run.flush()
    return [p.detach().flatten().tolist() for p in run.model.parameters()]


def resumed_as_uninterrupted(world: Any, path: Path) -> None:
    whole = executor(World.adopt(), **DILOCO)
    for batch in whole.batches(data(), epochs=2):
        whole.step(batch)
        assert whole.met == (whole.steps_done % 2 == 0)
        if whole.steps_done == 6:
            whole.save(path)
    begun = executor(World.adopt(), **DILOCO)
    assert begun.resume(path) == 6
    for batch in begun.batches(data(), epochs=2):
        begun.step(batch)
    assert trained(begun) == trained(whole)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    run_ranks(2, resumed_as_uninterrupted, tmp_path / "checkpoints")


def no_checkpoint_between(world: Any, path: Path) -> None:
    run = executor(World.adopt(), merge="mean", local_steps=3)
    for batch in run.batches(data()):
        run.step(batch)
        break
    with pytest.raises(UsageError, match=r"(?s)different models.*Save where run.met"):
        run.save(path)
    run.finish()
    assert run.met
    run.save(path)


def test_a_checkpoint_between_meetings_is_refused(tmp_path: Path) -> None:
    run_ranks(2, no_checkpoint_between, tmp_path)


def test_training_saves_and_validates_when_workers_have_met(tmp_path: Path) -> None:
    plan = Synchrony(merge="mean", local_steps=4)
    made = recipe(plan, checkpoint_every=3, validate_every=5, validation=data)
    headway.train(made, processes=2, directory=tmp_path / "run")
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.is_dir())
    assert [name[-2:] for name in kept] == ["08", "12"]
    text = (tmp_path / "run" / "events.jsonl").read_text()
    validated = [line for line in text.splitlines() if '"validation"' in line]
    assert [int(line.split('"step": ')[1].split(",")[0]) for line in validated] == [8, 12]


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        ({"merge": "mean"}, {"stages": 2}, "stages with workers"),
        ({"merge": "mean"}, {"zero": 3}, "memory.zero 3 with workers"),
        ({"merge": "mean", "topology": "master"}, {}, "taken by an all-reduce"),
        ({"kind": "asynchronous", "copies": 2}, {}, "workers of several ranks"),
        ({"merge": "penalty", "kind": "soft_bounded"}, {}, "synchrony"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    words: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError, match="cannot run this plan") as raised:
        headway.train(recipe(Synchrony(**words), **options), processes=4)
    assert told in str(raised.value)
