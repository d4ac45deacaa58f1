"""ranks: workers of free runs that die or stand still: the others go on, and can be replayed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_free_workers import WAYS, data, executor, trained
from torch import nn

import headway
from headway.errors import RunError
from headway.plans import Synchrony
from headway.run.distributed.world import World
from headway.run.synchrony.free_run import FreeRun
from headway.run.training.recorded_attempt import RecordedAttempt
from headway.run.training.run_directory import RunDirectory
from headway.synchrony.actors import Address
from headway.synchrony.history import Died, History, Joined, Resumed, Undone, merged
from support.ranks import run_ranks
from support.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

SURVIVING = {
    name: {**words, "topology": "single"} if words.get("merge") is None else words
    for name, words in WAYS.items()
    if name != "servers"
}
"""Rank 0 has what all need; the others can die."""


def dying(world: Any, words: dict[str, Any], folder: Path, seconds: float) -> list[Any]:
    run = executor(World.adopt(), **words)
    free = run.strategy.rounds
    assert isinstance(free, FreeRun)
    free.history.append_to(folder / f"{world.rank}")
    begin = free.begin

    def mortally(steps_done: int) -> None:
        begin(steps_done)
        if world.rank != 2 or steps_done:
            return
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()

    free.begin = mortally  # type: ignore[method-assign]
    return trained(run, seed=1)[0]


def again(world: Any, words: dict[str, Any], folder: Path) -> list[Any]:
    found = {rank: History.load(folder / f"{rank}", killed=True) for rank in range(world.size)}
    return trained(executor(World.adopt(), **words), merged(found), seed=2)[0]


@pytest.mark.parametrize("name", sampled(list(SURVIVING), 5))
def test_the_others_go_on_and_are_repeated_bit_by_bit(name: str, tmp_path: Path) -> None:
    words, seconds = SURVIVING[name], 0.15 * random.Random(name).random()
    first = run_ranks(3, dying, words, tmp_path, seconds, mortal=[2])
    assert first[2] is None
    history = merged({rank: History.load(tmp_path / f"{rank}", killed=True) for rank in range(3)})
    assert history.dead() == {2}
    assert any(entry == Died(2) for holder in history.logs for entry in history.entries(holder))
    repeated = run_ranks(3, again, words, tmp_path)
    assert repeated[:2] == first[:2]
    assert first[0][-1] == first[1][-1]


def recipe(name: str, **words: Any) -> headway.Recipe:
    return headway.Recipe(
        name="mortal",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        batch=12,
        stop="40 steps",
        validation=data,
        synchrony=Synchrony(**SURVIVING[name], **words),
    )


def same_checkpoints(one: Path, other: Path) -> bool:
    files = sorted((one / "checkpoints").rglob("*.safetensors"))
    assert files
    return all(f.read_bytes() == (other / f.relative_to(one)).read_bytes() for f in files)


@pytest.mark.parametrize(("name", "rank"), [("bounded", 2), ("pairs", 0)])
def test_a_training_run_outlives_a_worker(name: str, rank: int, tmp_path: Path) -> None:
    """Of pairs rank 0, too, which writes events and checkpoints while it lives."""
    with pytest.warns(UserWarning, match=rf"worker {rank} died after step 6: 34 of its steps"):
        found = headway.train(
            recipe(name), processes=3, directory=tmp_path / "run",
            faults=[f"kill rank {rank} at step 7"], restarts=0,
        )  # fmt: skip
    assert found.steps == 40
    assert found.validation is not None
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert any(f"worker {rank} died" in event.get("text", "") for event in events)
    headway.train(recipe(name), processes=3, directory=tmp_path / "again", replay=tmp_path / "run")
    assert same_checkpoints(tmp_path / "run", tmp_path / "again")


class Patient(nn.Module):
    """Takes its time until a fourth process makes a step: three, and one that has come back."""

    def __init__(self, begun: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self._begun = Path(begun)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(list(self._begun.iterdir())) < 4:
            time.sleep(0.1)
        found: torch.Tensor = self.layers(x)
        if found.requires_grad:  # backward: forward also runs before a worker has met the others
            found.register_hook(lambda _: (self._begun / str(os.getpid())).touch())
        return found


def patient(name: str, folder: Path) -> headway.Recipe:
    (folder / "begun").mkdir(exist_ok=True)
    return replace(
        recipe(name),
        model=lambda: Patient(str(folder / "begun")),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.005, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.5),
        stop="100 steps",
        checkpoint_every=30,
    )


def merged_history(run: Path) -> History:
    files = sorted((run / "history" / "attempt-000").glob("worker-*"))
    return merged({number: History.load(file) for number, file in enumerate(files)})


@pytest.mark.parametrize("name", sampled(list(SURVIVING), 4))
@pytest.mark.filterwarnings("ignore:.*batch normalisation")
def test_a_dead_worker_comes_back_and_the_run_is_repeated_bit_by_bit(
    name: str, tmp_path: Path
) -> None:
    rank = 0 if name in ("pairs", "gossip", "tree") else 2
    with pytest.warns(
        UserWarning, match=rf"worker {rank} died and came back with step \d+: \d+ of"
    ):
        found = headway.train(
            patient(name, tmp_path), processes=3, directory=tmp_path / "run",
            faults=[f"kill rank {rank} at step 7"],
        )  # fmt: skip
    assert (found.steps, found.attempts) == (100, 1)
    history = merged_history(tmp_path / "run")
    (life,) = history.lives(rank)
    assert not history.dead()
    # It has begun where the slowest of the others was, and made all steps behind.
    steps = RecordedAttempt(RunDirectory(tmp_path / "run"), 0).steps(rank)
    made = [step for step, _ in steps]
    assert made == [*range(1, 7), *range(life.step + 1, 101)]
    assert 9 <= life.step < 100
    again = patient(name, tmp_path)
    headway.train(again, processes=3, directory=tmp_path / "again", replay=tmp_path / "run")
    assert same_checkpoints(tmp_path / "run", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bounded", "pairs"])
def test_a_worker_comes_back_as_often_as_restarts_are_allowed(name: str, tmp_path: Path) -> None:
    """Also one that dies again, and then for good."""
    with pytest.warns(
        UserWarning, match=r"worker 2 died after step \d+, having come back with step"
    ):
        found = headway.train(
            patient(name, tmp_path), processes=3, directory=tmp_path / "run",
            faults=["kill rank 2 at step 7", "kill rank 2 at step 90"], restarts=1,
        )  # fmt: skip
    assert (found.steps, found.attempts) == (100, 1)
    assert merged_history(tmp_path / "run").dead() == {2}
    again = patient(name, tmp_path)
    headway.train(again, processes=3, directory=tmp_path / "again", replay=tmp_path / "run")
    assert same_checkpoints(tmp_path / "run", tmp_path / "again")


STILL = 1.5


def standing(world: Any, words: dict[str, Any], still: int) -> tuple[int, float]:
    """Steps made before a rank, stopped before its fourth one, goes on; all steps."""
    here = World.adopt()
    here.place = replace(here.place, note_folder=world.directory)
    (world.directory / f"pid-{world.rank:05d}").write_text(str(os.getpid()))
    run = executor(here, **words)
    ends: list[float] = []
    for batch in run.batches(data(), epochs=None):
        if world.rank == still and run.steps_done == 3:
            (world.directory / "stopped").write_text(str(time.time()))
            os.system(f"(sleep {STILL}; kill -CONT {os.getpid()}) &")
            os.kill(os.getpid(), signal.SIGSTOP)
        run.step(batch)
        ends.append(time.time())
        time.sleep(0.01)
        if run.steps_done == 12:
            break
    run.finish()
    since = float((world.directory / "stopped").read_text())
    return sum(end < since + 0.9 * STILL for end in ends), len(ends)


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ({"kind": "asynchronous", "topology": "single"}, 12, 12),
        ({"merge": "push_sum", "kind": "asynchronous"}, 12, 12),
        ({"merge": "pairwise", "kind": "asynchronous"}, 12, 12),
        ({"kind": "bounded", "delay_bound": 3, "topology": "single"}, 6, 7),
        ({"topology": "single"}, 3, 4),
    ],
    ids=["asynchronous", "gossip", "pairs", "bounded", "synchronous"],
)
def test_a_stopped_worker_holds_up_whom_the_plan_says(
    words: dict[str, Any], least: int, most: int
) -> None:
    """An asynchronous run not, a bounded one behind its bound, a synchronous one at once."""
    still = 0 if "merge" in words else 2  # whom the others of pairs ask
    found = run_ranks(3, standing, words, still)
    assert [steps for _, steps in found] == [12, 12, 12]
    assert all(least <= made <= most for made, _ in found[:still] + found[still + 1 :])


@pytest.mark.slow
def test_a_run_without_anybody_left_is_started_again(tmp_path: Path) -> None:
    """The last of the workers has nobody who goes on, and the models of pairs are gone."""
    found = headway.train(
        recipe("pairs"), processes=2, directory=tmp_path / "run",
        faults=["kill rank 0 at step 7", "kill rank 1 at step 7"], restarts=1,
    )  # fmt: skip
    assert (found.steps, found.attempts) == (40, 2)


@pytest.mark.slow
def test_a_dead_server_ends_the_run_and_all_begin_again(tmp_path: Path) -> None:
    found = headway.train(
        recipe("asynchronous"), processes=2, directory=tmp_path / "run",
        faults=["kill rank 0 at step 7"], restarts=1,
    )  # fmt: skip
    assert (found.steps, found.attempts) == (40, 2)
    headway.train(
        recipe("asynchronous"), processes=2, directory=tmp_path / "again", replay=tmp_path / "run"
    )
    assert same_checkpoints(tmp_path / "run", tmp_path / "again")


def test_a_history_is_whole_up_to_the_moment_of_a_kill(tmp_path: Path) -> None:
    history = History()
    history.append_to(tmp_path / "one")
    model = Address("model", 1)
    history.note(model, 1)
    history.add(model, Undone(2, 70_000))
    history.add(model, Died(2))
    history.add(model, Joined(2, 1, 70_001))
    history.add(model, Joined(1, 2, 9))
    history.add(model, Resumed(Address("server", 3), 2, 70_002))
    history.add(model, Undone(0, 4))
    history.note(Address("server"), 3)
    cut = tmp_path / "one"
    assert History.load(cut).logs == history.logs
    assert History.load(cut).undone(1) == {(2, 70_000)}
    assert History.load(cut).undone(1, 2) == {(0, 4)}
    assert (History.load(cut).dead(), History.load(cut).lives(2)) == (set(), [Joined(2, 1, 70_001)])
    assert not History.load(cut).lives(1), "nobody else has heard of it"
    assert list(History.load(cut).entries(model))[-2] == Resumed(Address("server", 3), 2, 70_002)
    assert list(History.load(cut).senders(model)) == [1]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert list(History.load(cut, killed=True).logs) == [model]
    assert History.load(cut, killed=True).events == 21
    with pytest.raises(RunError, match="ends in the middle"):
        History.load(cut)
