"""ranks: servers, bounds, elastic centres, pairs and gossip, as processes; their histories."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.errors import UsageError
from headway.plans import Synchrony, data_parallel
from headway.run.distributed.world import World
from headway.run.synchrony.free_run import FreeRun
from headway.synchrony.actors import Address
from headway.synchrony.history import History, merged
from headway.verification.recording import FREE_STEPS
from support.ranks import run_ranks
from support.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

WAYS: dict[str, dict[str, Any]] = {
    "servers": {"topology": "sharded", "servers": 2},
    "backup": {"topology": "single", "backup_workers": 1},
    "backups": {"topology": "colocated", "backup_workers": 1},
    "asynchronous": {"kind": "asynchronous"},
    "single": {"kind": "asynchronous", "topology": "single", "reduce": "sum"},
    "downpour": {"kind": "asynchronous", "fetch_every": 3, "push_every": 2},
    "bounded": {"kind": "bounded", "delay_bound": 1},
    "eager": {"kind": "bounded", "delay_bound": 1, "remedy": "eager_push"},
    "snapshot": {"kind": "bounded", "delay_bound": 1, "read": "snapshot"},
    "ahead": {"kind": "bounded", "delay_bound": 2, "read": "ahead"},
    "value": {"kind": "bounded", "value_bound": 0.02},
    "reject": {"kind": "bounded", "delay_bound": 1, "on_violation": "reject"},
    "rate": {"kind": "asynchronous", "remedy": "staleness_rate"},
    "compensation": {"kind": "asynchronous", "remedy": "delay_compensation"},
    "elastic": {"merge": "elastic", "kind": "asynchronous", "local_steps": 2},
    "tree": {
        "merge": "elastic", "kind": "asynchronous", "topology": "tree", "period_up": 2,
        "period_down": 3,
    },
    "pairs": {"merge": "pairwise", "kind": "asynchronous"},
    "gossip": {"merge": "push_sum", "kind": "asynchronous", "probability": 0.5},
}  # fmt: skip
STEPS = 8


def data(samples: int = 46) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def executor(world: World, optimizer: str = "adam", **words: Any) -> headway.Executor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
    made: Any = (
        torch.optim.Adam(net.parameters(), lr=0.01)
        if optimizer == "adam"
        else torch.optim.SGD(net.parameters(), lr=0.05)
    )
    plan = data_parallel(
        10, processes=world.ranks, precision="float64", synchrony=Synchrony(**words)
    )
    return headway.Executor(
        net, made, loss=headway.criterion(nn.MSELoss()), plan=plan, world=world,
        scheduler=torch.optim.lr_scheduler.StepLR(made, 3, 0.5),
    )  # fmt: skip


def numbers(run: headway.Executor) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in run.model.parameters()]


def trained(
    run: headway.Executor, history: History | None = None, *, seed: int | None = None
) -> tuple[list[Any], History]:
    """Some steps; the parameters before each of them, and at the end, and this rank's history.

    Args:
        seed: Of random delays before the steps; None: no delays.
    """
    free = run.strategy.rounds
    assert isinstance(free, FreeRun)
    if history is not None:
        free.repeat(history)
    draw = random.Random(f"{seed} {run.world.rank}")
    seen = []
    for batch in run.batches(data(), epochs=None):
        if seed is not None:
            time.sleep(draw.random() * 0.03)
        run.step(batch)
        seen.append(numbers(run))
        if run.steps_done == STEPS:
            break
    run.finish()
    return [*seen, numbers(run)], free.history


def live(world: Any, words: dict[str, Any], folder: Path) -> list[Any]:
    found, history = trained(executor(World.adopt(), **words), seed=1)
    history.save(folder / f"{world.rank}")
    return found


def repeated(world: Any, words: dict[str, Any], folder: Path) -> list[Any]:
    history = merged({rank: History.load(folder / f"{rank}") for rank in range(world.size)})
    return trained(executor(World.adopt(), **words), history, seed=2)[0]


@pytest.mark.parametrize("name", sampled(list(WAYS), 5))
def test_a_live_run_is_repeated_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Under other delays: every worker's parameters before every step."""
    first = run_ranks(3, live, WAYS[name], tmp_path)
    again = run_ranks(3, repeated, WAYS[name], tmp_path)
    assert again == first
    assert all(found[-1] == first[0][-1] for found in first)  # all end with one model
    assert first[0][-1] != first[0][0]


def as_serial(world: Any, words: dict[str, Any]) -> list[Any]:
    return trained(executor(World.adopt(), "sgd", **words), seed=3)[0][-1]


def by_all_reduce(world: Any) -> list[Any]:
    run = executor(World.adopt(), "sgd")
    for batch in run.batches(data(), epochs=None):
        run.step(batch)
        if run.steps_done == STEPS:
            return numbers(run)
    raise AssertionError


@pytest.mark.parametrize(
    "words",
    [
        {"topology": "single"},
        {"topology": "colocated"},
        {"kind": "bounded", "delay_bound": 0, "read": "snapshot"},
    ],
)
def test_synchronous_servers_equal_all_reduce(words: dict[str, Any]) -> None:
    """The last batch of an epoch is ragged: shares are weighted by their samples."""
    expected = run_ranks(2, by_all_reduce)[0]
    for found in run_ranks(2, as_serial, words):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-12, abs=1e-14)


def test_one_asynchronous_worker_equals_the_serial_run() -> None:
    expected = run_ranks(1, by_all_reduce)[0]
    assert run_ranks(1, as_serial, {"kind": "asynchronous"})[0] == expected


def keeps_up(world: Any, bound: int) -> list[int]:
    """How far the clocks of the workers are apart whenever a push comes, with a slow worker."""
    run = executor(World.adopt(), kind="bounded", delay_bound=bound, topology="single")
    free: Any = run.strategy.rounds
    gaps: list[int] = []
    if world.rank == 0:
        server = free._parts.holders[Address("server")]
        take = server._take

        def watched(worker: int, push: Any) -> None:
            take(worker, push)
            gaps.append(max(server._clocks.values()) - min(server._clocks.values()))

        server._take = watched
    for batch in run.batches(data(), epochs=None):
        time.sleep(0.03 if world.rank == 1 else 0.0)
        run.step(batch)
        if run.steps_done == STEPS:
            break
    run.finish()
    return gaps


def test_a_bound_holds_with_a_slow_worker() -> None:
    gaps = run_ranks(3, keeps_up, 2)[0]
    assert len(gaps) == 3 * STEPS
    assert max(gaps) == 3  # the fast ones wait at the bound: never more than bound + 1 apart


def passed_over(world: Any, folder: Path) -> int:
    """Steps that others have closed without this worker; worker 1 makes its second one last."""
    run = executor(World.adopt(), topology="single", backup_workers=1)
    left_out = 0
    for batch in run.batches(data(), epochs=None):
        free: Any = run.strategy.rounds
        if run.steps_done and free.is_closed(run.steps_done):
            before = run.record.loss
            assert run.step(batch) == before
            left_out += 1
        else:
            while world.rank == 1 and run.steps_done and len(list(folder.iterdir())) < 2:
                time.sleep(0.01)
            run.step(batch)
        if world.rank != 1 and run.steps_done == STEPS - 1:
            (folder / str(world.rank)).touch()
        if run.steps_done == STEPS:
            break
    run.finish()
    return left_out


def test_steps_end_without_the_slowest(tmp_path: Path) -> None:
    first, slow, last = run_ranks(3, passed_over, tmp_path)
    assert slow >= STEPS - 3
    assert first + last == 0


def recipe() -> headway.Recipe:
    return headway.Recipe(
        name="free",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        batch=10,
        stop="12 steps",
        synchrony=Synchrony(kind="asynchronous"),
    )


def test_a_training_run_is_replayed(tmp_path: Path) -> None:
    first = headway.train(recipe(), processes=3, directory=tmp_path / "first")
    again = headway.train(
        recipe(), processes=3, directory=tmp_path / "again", replay=tmp_path / "first"
    )
    assert again.loss == first.loss
    assert len(list((tmp_path / "first" / "history" / "attempt-000").iterdir())) == 3
    files = sorted((tmp_path / "first" / "checkpoints").rglob("*.safetensors"))
    assert files
    for file in files:
        other = tmp_path / "again" / file.relative_to(tmp_path / "first")
        assert other.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", sampled(["asynchronous", "snapshot", "value", "eager"], 1))
def test_a_model_of_fewer_parameters_than_servers(name: str) -> None:
    """The last server holds nothing."""
    small = replace(clipped(name), model=lambda: nn.Linear(4, 1))
    assert headway.verify(small, processes=3).holds


def test_a_run_of_other_steps_is_not_replayed(tmp_path: Path) -> None:
    headway.train(recipe(), processes=2, directory=tmp_path / "first")
    longer = replace(recipe(), stop="13 steps")
    with pytest.raises(UsageError, match="It made 12 steps, and this run makes 13"):
        headway.train(longer, processes=2, replay=tmp_path / "first", directory=tmp_path / "again")
    with pytest.raises(UsageError, match="a replay begins where its run began"):
        headway.train(recipe(), processes=2, replay=tmp_path / "first", resume=True)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no history to replay"):
        headway.train(recipe(), processes=3, replay=tmp_path)


def clipped(name: str) -> headway.Recipe:
    """With everything that a worker does to its gradient: dropout, a clipped norm, a schedule."""
    return headway.Recipe(
        name=f"free {name}",
        model=lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(6), nn.Linear(6, 1)
        ),
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        clip=0.3,
        batch=12,
        stop="12 steps",
        synchrony=Synchrony(**WAYS[name]),
    )


@pytest.mark.parametrize("name", sampled(list(WAYS), 5))
def test_a_run_is_verified_by_its_history(name: str) -> None:
    found = headway.verify(clipped(name), processes=3)
    assert found.holds
    assert max(one.step for one in found.runs[0].comparison.differences) == FREE_STEPS + 1
    assert "one process that makes the steps of each" in repr(found)
