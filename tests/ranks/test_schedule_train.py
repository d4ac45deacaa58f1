"""ranks: a table that was written to a file trains, and the run equals that of one process."""

from __future__ import annotations

import json

import pytest
import torch

from support.commands import events, headway_here, newest_tensors

STEPS = ("--set", "stop=4")


def train(folder, name, *words):
    done = headway_here(
        "train", "support.recipes:mlp", "--directory", name, *STEPS, *words, cwd=folder
    )
    assert done.code == 0, done.err
    return done


@pytest.mark.timeout(240)
def test_a_schedule_file_trains_what_one_process_trains(tmp_path):
    """Four steps of 12, 12, 12 and 4 samples; the default of processes is the table's ranks."""
    size = ("--stages", "2", "--microbatches", "4")
    shown = headway_here("schedule", "show", "1f1b", *size, "--csv", "x.csv", cwd=tmp_path)
    assert shown.code == 0, shown.err
    done = train(tmp_path, "split", "--schedule", "x.csv")
    assert "4 micro-batches" in done.err
    train(tmp_path, "whole")
    plan = json.loads((tmp_path / "split/plan.json").read_text())
    assert plan["pipeline"]["table"].startswith("# headway schedule\n# name = 1f1b")
    assert {axis["name"]: axis["size"] for axis in plan["mesh"]["axes"]} == {"data": 1, "pipe": 2}
    assert plan["batch"]["parts"] == 4
    assert len(events(tmp_path / "split", "step")) == len(events(tmp_path / "whole", "step"))
    split, whole = newest_tensors(tmp_path / "split"), newest_tensors(tmp_path / "whole")
    assert split.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
