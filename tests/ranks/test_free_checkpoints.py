"""ranks: checkpoints of workers that do not meet, made while all of them go on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_free_workers import WAYS, data
from test_worker_deaths import same_checkpoints
from torch import nn

import headway
from headway.plans import Synchrony, data_parallel
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


def test_synchronous_servers_go_on_from_one_as_if_nothing_had_been(tmp_path: Path) -> None:
    words = {"topology": "single"}
    headway.train(recipe(**words), processes=2, directory=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (10, 12):
        shutil.rmtree(next((tmp_path / "cut/checkpoints").glob(f"*{step}")))
    headway.train(recipe(**words), processes=2, directory=tmp_path / "cut", resume=True)
    assert values(tmp_path / "cut") == values(tmp_path / "whole")
