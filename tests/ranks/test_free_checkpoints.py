"""ranks: checkpoints of workers that do not meet, made while all of them go on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_free_workers import WAYS, data
from test_worker_deaths import same_checkpoints
from torch import nn

import headway
from headway.errors import HeadwayError, UsageError
from headway.plans import Synchrony, data_parallel
from headway.run.training.recorded_attempt import RecordedAttempt
from headway.run.training.run_directory import RunDirectory
from support.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")


def recipe(**words: Any) -> headway.Recipe:
    return headway.Recipe(
        name="saved",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        batch=12,
        stop="12 steps",
        precision="float64",
        checkpoint_every=5,
        checkpoint_keep=9,
        synchrony=Synchrony(**words) if words else None,
    )


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("name", sampled(list(WAYS), 3))
def test_checkpoints_are_made_on_the_way_and_repeated_bit_by_bit(name: str, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    headway.train(recipe(**WAYS[name]), processes=3, directory=first)
    late = 2 if "backup_workers" in WAYS[name] else 0  # a step may have been closed without it
    assert all(0 <= made - due <= late for made, due in zip(steps(first), [5, 10, 12], strict=True))
    headway.train(recipe(**WAYS[name]), processes=3, directory=again, replay=first)
    assert same_checkpoints(first, again)


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ({"topology": "single"}, 3),
        ({"topology": "sharded", "servers": 2}, 2),
        ({"kind": "bounded", "delay_bound": 0, "read": "snapshot"}, 2),
    ],
    ids=["single", "sharded", "snapshot"],
)
def test_another_plan_goes_on_from_one(
    words: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    """Equal to the serial run: parameters, the optimiser's state, the schedule, the data."""
    run, serial = tmp_path / "run", tmp_path / "serial"
    expected = headway.train(recipe(), processes=1, directory=serial)
    headway.train(recipe(**words), processes=processes, directory=run)
    for step in (10, 12):
        shutil.rmtree(next((run / "checkpoints").glob(f"*{step}")))
    whole = data_parallel(12, processes=2, precision="float64")
    found = headway.train(recipe(), plan=whole, directory=run, resume=True)
    assert found.steps == 12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert values(run) == pytest.approx(values(serial), rel=1e-10, abs=1e-13)


def values(run: Path) -> list[float]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in max((run / "checkpoints").iterdir()).glob("*.safetensors"):
        found |= load_file(file)
    assert any(name.startswith("optimizer.") for name in found)
    return [float(v) for name in sorted(found) for v in found[name].flatten()]


def test_who_leads_after_a_death_saves(tmp_path: Path) -> None:
    """Of pairs rank 0 can die, too; the next one saves its own model, and its own optimiser."""
    with pytest.warns(UserWarning, match="worker 0 died after step 6"):
        headway.train(
            replace(recipe(**WAYS["pairs"]), stop="40 steps"), processes=3,
            directory=tmp_path / "run", faults=["kill rank 0 at step 7"], restarts=0,
        )  # fmt: skip
    assert steps(tmp_path / "run")[-2:] == [35, 40]
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000040")
    assert len(values(tmp_path / "run")) > 3 * 37
    whole = data_parallel(12, processes=1, precision="float64")
    longer = replace(recipe(), stop="40 steps")
    found = headway.train(longer, plan=whole, directory=tmp_path / "run", resume=True)
    assert found.steps == 40


class Dies:
    """The process of rank 0 is killed after a step, once the checkpoint of step 5 is there."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run: Any) -> None:
        time.sleep(0.01)
        marker, newest = run.directory / "killed", run.directory / "checkpoints/step-00000005"
        if run.rank or run.step != self._step or marker.exists():
            return
        while not newest.exists():
            time.sleep(0.05)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", sampled(["single", "bounded", "eager", "elastic", "ahead"], 1))
def test_a_dead_server_comes_back_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """What was lost is said; the new attempt is repeated from the checkpoint, bit by bit, though
    later ones have come since; the history of the first one stays."""
    run, causes = tmp_path / "run", list[str]()
    one = replace(recipe(**WAYS[name]), callbacks=[Dies(8)], checkpoint_keep=1)
    found = headway.train(one, processes=3, directory=run, restarts=1, observer=Watching(causes))
    assert (found.steps, found.attempts) == (12, 2)
    assert steps(run) == [5, 12]
    told = "all go on from the checkpoint of step 5; lost: 3 steps of rank 0, "
    assert causes[0].startswith("rank 0 was killed by SIGKILL; " + told)
    assert any(told in row["text"] for row in RunDirectory(run).events("warning"))
    sizes = {path.name: len(list(path.iterdir())) for path in (run / "history").iterdir()}
    assert sizes == {"attempt-000": 3, "attempt-001": 3}
    assert RecordedAttempt(RunDirectory(run), 0).history().events
    plain = recipe(**WAYS[name])
    headway.train(plain, processes=3, directory=tmp_path / "again", replay=run)
    assert steps(tmp_path / "again") == [10, 12]
    assert same_checkpoint(run, tmp_path / "again", 12)
    shutil.rmtree(run / "checkpoints/step-00000005")
    with pytest.raises(UsageError, match="checkpoint of step 5, with which this history begins"):
        headway.train(plain, processes=3, directory=tmp_path / "refused", replay=run)


class Watching:
    """Notes why workers were started again."""

    def __init__(self, causes: list[str]) -> None:
        self._causes = causes

    def watch(self, directory: Path, *, launched: bool) -> Any:
        return nullcontext()

    def restarted(self, attempt: int, cause: str) -> None:
        self._causes.append(cause)

    def failed(self, error: HeadwayError) -> None: ...


def same_checkpoint(one: Path, other: Path, step: int) -> bool:
    files = sorted((one / f"checkpoints/step-{step:08d}").glob("*.safetensors"))
    assert files
    return all(f.read_bytes() == (other / f.relative_to(one)).read_bytes() for f in files)


class Stops:
    """Every rank stops at a step of its own."""

    def on_step_end(self, run: Any) -> None:
        time.sleep(0.02 * run.rank)
        if run.step == 8 - 2 * run.rank:
            run.stop()


@pytest.mark.parametrize("name", sampled(["asynchronous", "pairs", "gossip", "elastic"], 1))
def test_a_run_that_was_stopped_and_resumed_is_repeated(name: str, tmp_path: Path) -> None:
    run, plain = tmp_path / "run", recipe(**WAYS[name])
    headway.train(replace(plain, callbacks=[Stops()]), processes=3, directory=run)
    assert max(steps(run)) == 9
    headway.train(plain, processes=3, directory=tmp_path / "again", replay=run)
    assert same_checkpoints(run, tmp_path / "again")
    headway.train(plain, processes=3, directory=run, resume=True)
    headway.train(plain, processes=3, directory=tmp_path / "rest", replay=run)
    assert steps(tmp_path / "rest") == [10, 12]
    assert same_checkpoint(run, tmp_path / "rest", 12)


def test_synchronous_servers_go_on_from_one_as_if_nothing_had_been(tmp_path: Path) -> None:
    words = {"topology": "single"}
    headway.train(recipe(**words), processes=2, directory=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (10, 12):
        shutil.rmtree(next((tmp_path / "cut/checkpoints").glob(f"*{step}")))
    headway.train(recipe(**words), processes=2, directory=tmp_path / "cut", resume=True)
    assert values(tmp_path / "cut") == values(tmp_path / "whole")
