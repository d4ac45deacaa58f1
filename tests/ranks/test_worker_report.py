"""ranks: what the report shows of workers that do not agree at every step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.plans import Synchrony
from headway.report.history.reader import read_history
from headway.report.page.workers import WorkersSection, workers_section
from headway.report.write import write_report
from headway.simulator.synchrony import StillReplica, VirtualMachines, simulate_run
from headway.synchrony.actors import Gradient
from headway.synchrony.programs import make_run

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")
STEPS = 24


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(48, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def one_is_slow(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.02 if os.environ.get("RANK") == "1" else 0.002)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(directory: Path, **words: Any) -> tuple[WorkersSection, str]:
    recipe = headway.Recipe(
        name="report",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=data,
        loss=one_is_slow,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 8, 0.5),
        batch=12,
        stop=f"{STEPS} steps",
        synchrony=Synchrony(**words),
    )
    headway.train(recipe, processes=3, directory=directory)
    section = workers_section(read_history(directory))
    assert section is not None
    return section, write_report(directory).html.read_text()


def test_a_bounded_run_waits_at_its_bound(tmp_path: Path) -> None:
    section, page = trained(tmp_path / "run", kind="bounded", delay_bound=2, topology="single")
    assert [row[:3] for row in section.rows] == [(str(n), str(STEPS), "96") for n in range(3)]
    shares = [int(row[4].removeprefix("bound ").removesuffix(" %")) for row in section.rows]
    assert min(shares[0], shares[2]) > 50 > shares[1]
    stale = [float(row[5]) for row in section.rows]
    assert stale[1] > max(stale[0], stale[2])  # two others push while the slow one computes
    facts = {fact.name: fact for fact in section.facts}
    assert facts["Waiting"].detail == "of the time, for: bound"
    headings = [heading for heading, _ in section.pictures]
    assert headings == [
        "Staleness", "What workers wait for", "Speed", "Learning rate by time", "Loss by samples",
        "Loss by time",
    ]  # fmt: skip
    assert all(f"<h3>{heading}</h3>" in page for heading in headings)


def test_a_simulated_run_is_stale_and_waits_as_the_live_one(tmp_path: Path) -> None:
    """With one worker ten times slower the bound decides, not chance: what is late is the same."""
    words: dict[str, Any] = {"kind": "bounded", "delay_bound": 2, "topology": "single"}
    trained(tmp_path / "run", **words)
    live = read_history(tmp_path / "run").rank_steps
    run = make_run(Synchrony(**words), [StillReplica(1) for _ in range(3)], [StillReplica()])
    seconds = {0: 0.002, 1: 0.02, 2: 0.002}
    played = simulate_run(
        run,
        VirtualMachines(compute=lambda worker, step: seconds[worker]),
        steps=STEPS,
        gradient=lambda *_: Gradient((0.0,)),
    )
    pairs = [one for rows in live.values() for row in rows for one in row.staleness]
    for worker in range(3):
        stale = [updates for own, updates in pairs if own == worker]
        mean = sum(stale) / len(stale)
        theirs = played.staleness[worker]
        assert len(theirs) == STEPS
        assert len(stale) == STEPS  # also those after the last step of the server's own worker
        assert mean == pytest.approx(sum(theirs) / STEPS, abs=0.6)
    for worker in (0, 2):
        waited = sum(row.waits.get("bound", 0.0) for row in live[worker])
        share = waited / sum(row.seconds for row in live[worker])
        assert share == pytest.approx(played.waits[worker]["bound"] / played.seconds, abs=0.25)
    assert "bound" not in played.waits[1]


def test_models_that_meet_are_apart(tmp_path: Path) -> None:
    section, page = trained(tmp_path / "run", kind="asynchronous", merge="pairwise")
    assert "Distance between models that met" in [heading for heading, _ in section.pictures]
    assert all(row[5:] == ("", "") for row in section.rows)  # nothing is stale
    rates = [int(row[3].replace(",", "")) for row in section.rows]
    assert min(rates[0], rates[2]) > 1.5 * rates[1]  # nobody waits for the slow one
    assert "3 workers (kind=asynchronous, merge=pairwise)" in page
