"""ranks: what the report shows of workers that do not agree at every step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.channel.channel import Channel
from headway.plans import Synchrony
from headway.report.history.reader import read_history
from headway.report.history.records import LoggedRankStep
from headway.report.page.workers import WorkersSection, workers_section
from headway.report.write import write_report
from headway.run.synchrony import messages
from headway.run.synchrony.messages import put_message
from headway.simulator.synchrony import StillReplica, VirtualMachines, simulate_run
from headway.synchrony.actors import Gradient
from headway.synchrony.programs import make_run
from headway.synchrony.servers import Push
from support.patience import patient

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")
STEPS = 24
QUICK, SLOW = 0.003, 0.05
LATENCY, UPDATE = 0.009, 0.009
"""Seconds."""


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(48, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def one_is_slow(model: nn.Module, batch: Any, stretch: float = 1.0) -> torch.Tensor:
    time.sleep(stretch * (SLOW if os.environ.get("RANK") == "1" else QUICK))
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(
    directory: Path,
    *,
    optimizer: Callable[..., torch.optim.SGD] = torch.optim.SGD,
    stretch: float = 1.0,
    **words: Any,
) -> tuple[WorkersSection, str]:
    recipe = headway.Recipe(
        name="report",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=data,
        loss=partial(one_is_slow, stretch=stretch),
        optimizer=lambda m: optimizer(m.parameters(), lr=0.05),
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
    words: dict[str, Any] = {"kind": "bounded", "delay_bound": 2, "topology": "single"}
    section, page = trained(tmp_path / "run", stretch=patient(1.0), **words)
    assert [row[:3] for row in section.rows] == [(str(n), str(STEPS), "96") for n in range(3)]
    shares = [dict(one.split()[:2] for one in row[4].split(", ")) for row in section.rows]
    bound = [int(causes.get("bound", 0)) for causes in shares]
    assert min(bound[0], bound[2]) > 45
    assert bound[1] < 10
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


def causes_of(rows: Sequence[LoggedRankStep]) -> set[str]:
    return {cause for row in rows for cause in row.waits}


class Late(torch.optim.SGD):
    """An optimiser that takes its time, for a server that is busy; its messages do, too."""

    def __init__(self, *arguments: Any, stretch: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stretch = stretch

        def put_late(channel: Channel, message: Any) -> None:
            # Of what is sent together, once: the second does not queue behind the first.
            if not isinstance(getattr(message, "message", None), Push):
                time.sleep(stretch * LATENCY)
            put_message(channel, message)

        # In the process of each rank.
        messages.put_message = put_late

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.stretch * UPDATE)
        return super().step(closure)


def test_a_simulated_run_is_stale_and_waits_as_the_live_one(tmp_path: Path) -> None:
    """With one worker six times slower the bound decides, not chance: what is late is the same, and
    the waits are split alike between the bound, the busy server and the messages' way."""
    words: dict[str, Any] = {"kind": "bounded", "delay_bound": 2, "topology": "single"}
    stretch = patient(1.0)  # shares of the time are the same, and the processor's part is smaller
    late = partial(Late, stretch=stretch)
    trained(tmp_path / "run", optimizer=late, stretch=stretch, **words)
    live = read_history(tmp_path / "run").rank_steps
    run = make_run(Synchrony(**words), [StillReplica(1) for _ in range(3)], [StillReplica()])
    seconds = {0: QUICK, 1: SLOW, 2: QUICK}
    played = simulate_run(
        run,
        VirtualMachines(
            compute=lambda worker, step: seconds[worker], latency=LATENCY, update=UPDATE
        ),
        steps=STEPS,
        gradient=lambda *_: Gradient((0.0,)),
    )
    pairs = [one for rows in live.values() for row in rows for one in row.staleness]
    for worker in range(3):
        stale = [updates for own, updates in pairs if own == worker]
        theirs = played.staleness[worker]
        assert len(theirs) == STEPS
        assert len(stale) == STEPS  # also those after the last step of the server's own worker
        assert sum(stale) == pytest.approx(sum(theirs), abs=0.6 * STEPS)
    for worker in range(3):
        # The first steps of a process take longer than the others.
        rows = live[worker][3:]
        whole = sum(row.seconds for row in rows)
        causes = {*played.waits[worker]} | causes_of(rows)
        assert causes <= {"bound", "server", "link"}
        for cause in causes:
            waited = sum(row.waits.get(cause, 0.0) for row in rows)
            expected = played.waits[worker].get(cause, 0.0) / played.seconds
            assert waited / whole == pytest.approx(expected, abs=0.15), (worker, cause)
    assert played.waits[2]["link"] > 0.1 * played.seconds
    assert played.waits[1]["server"] > 0.05 * played.seconds
    assert "link" not in causes_of(live[0]) | {*played.waits[0]}  # the server lives there
    assert "bound" not in played.waits[1]


def test_models_that_meet_are_apart(tmp_path: Path) -> None:
    # On a busy machine a step takes longer than the quick workers sleep, and all were alike.
    words = {"kind": "asynchronous", "merge": "pairwise"}
    section, page = trained(tmp_path / "run", stretch=patient(1.0), **words)
    assert "Distance between models that met" in [heading for heading, _ in section.pictures]
    assert all(row[5:] == ("", "") for row in section.rows)  # nothing is stale
    rates = [int(row[3].replace(",", "")) for row in section.rows]
    assert min(rates[0], rates[2]) > 1.5 * rates[1]  # nobody waits for the slow one
    assert "3 workers (kind=asynchronous, merge=pairwise)" in page
