"""ranks: `headway train --collective`: the program is in the plan's file, and stays there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.plans import Plan
from support.commands import events, headway_here
from support.link_graphs import SLOW_MESH

RECIPE = "support.recipes:mlp"


def train(cwd: Path, run: str, *words: str):
    return headway_here("train", RECIPE, "-d", run, "--device", "cpu", *words, cwd=cwd)


@pytest.mark.slow
def test_the_best_program_is_trained_saved_resumed_and_proved(tmp_path):
    """The losses are those of Gloo's ring; a resumed run goes on with the same trees; `verify` and
    `explain` take the plan."""
    (tmp_path / "mesh.toml").write_text(SLOW_MESH)
    auto = ("--collective", "auto", "--cluster", "mesh.toml")
    short = ("--set", "arguments.steps=3")
    plain = train(tmp_path, "plain", "-n", "4")
    assert plain.code == 0, plain.err
    done = train(tmp_path, "run", "-n", "4", *auto, *short)
    assert done.code == 0, done.err
    assert "collective auto: trees (" in done.err
    assert "next best:" in done.err
    first = Plan.load(tmp_path / "run" / "plan.json")
    assert first.exchange.collective == "trees"
    again = train(tmp_path, "run", "-n", "4", "--resume")
    assert again.code == 0, again.err
    assert "collective: trees, as before" in again.err
    assert Plan.load(tmp_path / "run" / "plan.json").hash == first.hash
    losses = [
        {event["step"]: event["loss"] for event in events(tmp_path / run, "step")}
        for run in ("plain", "run")
    ]
    assert losses[0].keys() == losses[1].keys()
    assert all(abs(losses[0][n] - losses[1][n]) < 1e-5 * losses[0][n] for n in losses[0])
    told = headway_here("explain", "run/plan.json", cwd=tmp_path)
    assert "by trees (" in told.out
    proved = headway_here(
        "verify", RECIPE, "--plan", "run/plan.json", "--steps", "2", "--json", cwd=tmp_path
    )
    assert proved.code == 0, proved.err
    assert json.loads(proved.out)[0]["equal"]
