"""ranks: `headway compare` with frameworks that work, fail, hang and compute something else."""

from __future__ import annotations

import csv
import json

import pytest

from support.commands import headway_here

# The fixture below starts some forty processes, and two of them hang until their limit.
pytestmark = pytest.mark.timeout(400)
USERS = """
import os, time
import torch
from torch import nn
from headway import Recipe, criterion
from headway.comparison.frameworks.ddp import Ddp
from headway.comparison.frameworks.plain import Independent


def data():
    draw = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(64, 4, generator=draw), torch.arange(64) % 3
    )


def recipe():
    return Recipe(
        name="small", model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), data=data,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5), batch=8, stop="9 steps",
    )


class Dies(Ddp):
    def step(self, batch):
        if self.job.rank == 1:
            os.kill(os.getpid(), 9)
        return super().step(batch)


class Fails(Ddp):
    def prepare(self, job):
        raise RuntimeError("no such accelerator")


class Hangs(Ddp):
    def step(self, batch):
        time.sleep(600)


class Wrong(Independent):
    def step(self, batch):
        return super().step(batch) * 1.001
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    (folder / "users.py").write_text(USERS)
    names = ",".join(
        ["ddp", "headway", *(f"users:{name}" for name in ("Dies", "Fails", "Hangs", "Wrong"))]
    )
    words = f"users:recipe --with {names} --processes 2 --steps 3 --warm-up 1 --rounds 2"
    done = headway_here(
        "compare", *words.split(), "--limit", "40 s", "-d", "out", "--json", cwd=folder
    )
    assert done.code == 0, done.err
    return folder / "out", {cell["framework"]: cell for cell in json.loads(done.out)["cells"]}


def test_the_same_work_is_said_to_be_equal(compared):
    _, cells = compared
    for name in ("ddp", "headway"):
        assert cells[name]["work"]["step"] is None
        assert cells[name]["work"]["difference"] < 1e-5
        assert set(cells[name]["rounds"]) == set(cells["serial"]["rounds"]) == {"0", "1"}
        assert cells[name]["work"]["note"] == "without dropout"  # which each draws in its own way
    assert cells["users:Wrong"]["work"]["step"] == 0


def test_figures_are_those_of_the_processes(compared):
    _, cells = compared
    one = cells["ddp"]["rounds"]["1"]
    # Weights and biases of a layer of 4 x 3, in float32.
    assert one["model_bytes"] == 15 * 4
    assert one["sent_bytes"] > 60
    assert len(one["seconds"]) == 3
    assert len(one["losses"]) == 4
    assert one["first_step"] > max(one["seconds"])
    assert one["peak_bytes"] > 100e6
    assert one["cpu_seconds"] > 0


def test_failures_say_who_and_where_and_the_others_are_measured(compared):
    _, cells = compared
    assert cells["users:Dies"]["failure"].startswith("process 1 was killed by SIGKILL")
    assert "RuntimeError: no such accelerator" in cells["users:Fails"]["failure"]
    assert (
        "not finished after 40 s: 2 processes still running, process 0 in step (users.py:"
        in (cells["users:Hangs"]["failure"])
    )


def test_the_files_are_there(compared):
    out, _ = compared
    lines = (out / "compare.csv").read_text().splitlines()
    rows = {row["framework"]: row for row in csv.DictReader(lines)}
    assert float(rows["headway"]["step_s"]) > 0
    # The plain process runs with 1, though 2 alone are asked for: it is what the others reach.
    assert float(rows["serial"]["to_target_s"]) > 0
    assert rows["serial"]["target_loss"] == rows["ddp"]["target_loss"]
    assert rows["users:Dies"]["step_s"] == ""
    page = (out / "report.html").read_text()
    assert "What hinders each" in page
    assert "no such accelerator" in page
    for name in ("time", "learning", "costs"):
        assert (out / f"{name}.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("users:recipe", "--with", "ddpp"), "did you mean ddp"),
        (("users:recipe", "--with", "ddp", "--processes", "3"), "no 3 equal shares"),
        (("users:recipe", "--processes", "0"), "at least 1 each"),
        (("users:recipe", "--processes", "two"), "not a list of whole numbers"),
        (("users:recipe", "--limit", "soon"), "--limit"),
        ((), "needs a recipe"),
    ],
)
def test_mistakes_are_told(tmp_path, words, message):
    (tmp_path / "users.py").write_text(USERS)
    done = headway_here("compare", *words, cwd=tmp_path)
    assert done.code == 1
    assert message in done.err
    assert not (tmp_path / "runs").exists()
