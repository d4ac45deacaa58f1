"""single: `headway plan` on models whose parameters are their own, and that cannot be cut."""

from __future__ import annotations

import json

import pytest

from headway.cli.main import main
from headway.cli.plan.output import device_hours_sentence
from support.uncuttable import SQUARE

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from headway import Recipe, criterion

"""
MODULE += SQUARE
MODULE += """

class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(20, 400))
        self.w2 = nn.Parameter(torch.randn(400, 4))

    def forward(self, x):
        return torch.relu(x @ self.w1) @ self.w2


class Odd(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(20, 4000), nn.Linear(4000, 4), odd

    def forward(self, x):
        x = self.first(x)
        return self.second(Square.apply(x) if self.odd else x * x)


def recipe(model):
    return Recipe(
        name="words",
        model=model,
        data=lambda: TensorDataset(torch.randn(64, 20), torch.zeros(64, dtype=torch.int64)),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch="16 samples",
        stop="2 steps",
    )


def bare():
    return recipe(Bare)


def odd():
    return recipe(lambda: Odd(True))


def even():
    return recipe(lambda: Odd(False))
"""
SLOW_LINK = """
nodes = 1
processes = 2
[[levels]]
name = "node"
nodes = 1
rate = "1 MB/s"
latency = "10 us"
[devices.cpu]
peak = { fp32 = "50 GFLOP/s" }
memory = "4 GiB"
memory_rate = "10 GB/s"
dispatch = "5 us"
sharpness = 1.0
update = "1 ns"
"""
"""Sums of gradients take far longer than what goes from stage to stage."""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    (tmp_path / "word_models.py").write_text(MODULE)
    (tmp_path / "slow.toml").write_text(SLOW_LINK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(model, *words):
        code = main(["plan", f"word_models:{model}", *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_a_parameter_of_the_model_itself_is_forced_by_its_name(run):
    """And what lies in no module is called the model's."""
    asked = ("--cluster", "p3.16xlarge", "--devices", "2", "--objective", "fastest")
    code, out, err = run("bare", *asked, "--force", "w1=split", "--json")
    assert code == 0, err
    found = json.loads(out)
    (first, second) = (one for one in found["choices"] if one["parameters"])
    assert first["how"].startswith("split:")
    assert found["points"][found["chosen"]]["degrees"]["tensor"] == 2
    code, out, _ = run("bare", *asked, "--force", "w1=split")
    assert ": (model)" in out
    code, out, err = run("bare", *asked, "--force", "w2=replicate", "--force", "w1=split", "--json")
    assert code == 0, err
    (first, second) = (one for one in json.loads(out)["choices"] if one["parameters"])
    assert (first["how"][:5], second["how"][:5]) == ("split", "repli")
    code, _, err = run("bare", *asked, "--force", "w3=split")
    assert code == 2
    assert "legal: w1, w2" in err


def test_alternatives_without_what_is_forced_say_so(run):
    asked = ("--cluster", "p3.16xlarge", "--devices", "2", "--objective", "fastest")
    code, out, err = run("bare", *asked, "--force", "w1=split")
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("  time ")]
    free = [line.endswith("; without --force") for line in lines]
    assert free == ["tensor 2 ->" in line for line in lines]
    assert any(free)
    assert "; without --force" not in run("bare", *asked)[1]


def test_a_plan_whose_model_cannot_be_cut_does_not_run_today(run):
    for model, code in (("even", 0), ("odd", 0)):
        # Without --devices one device would do.
        asked = ("--cluster", "slow.toml", "--runnable", "--objective", "fastest", "--json")
        asked += ("--devices", "2")
        done, out, err = run(model, *asked)
        assert done == code, err
        found = json.loads(out)
        degrees = found["points"][found["chosen"]]["degrees"]
        assert (degrees["pipeline"] > 1) == (model == "even")
        said = "would be chosen, but cannot run: the forward of Odd cannot be cut into stages"
        assert (said in err) == (model == "odd")


def test_hours_are_written_out():
    assert "1,728 device-hours" in device_hours_sentence({"a100": 1728 * 3.6})
    assert "e+" not in device_hours_sentence({"a100": 1e9})
