"""ranks: flood-filling networks train on any number of ranks as on one, also after a kill."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from support.commands import events, headway_here, newest_tensors, none_left

MOVING = "support.floodfill_recipes:moving"


def train(tmp_path, run, ranks, *words):
    done = headway_here("train", MOVING, "-n", str(ranks), "-d", run, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    return {event["step"]: event["loss"] for event in events(tmp_path / run, "step")}


def visits(tensors):
    return [int(t) for name, t in tensors.items() if re.fullmatch(r"data\.\d+\.visit", name)]


def test_losses_of_1_2_and_4_ranks_are_equal(tmp_path):
    serial = train(tmp_path, "1", 1)
    assert len(serial) == 10
    for ranks in (2, 4):
        assert train(tmp_path, str(ranks), ranks) == pytest.approx(serial, rel=1e-12)
    values = [
        [event["metrics"]["f1"] for event in events(tmp_path / run, "validation")]
        for run in ("1", "2", "4")
    ]
    assert values[1] == pytest.approx(values[0])
    assert values[2] == pytest.approx(values[0])
    assert 0 < values[0][-1] < 1


def test_a_kill_in_the_middle_of_a_patch_changes_no_bit(tmp_path):
    whole = train(tmp_path, "whole", 2)
    killed = train(tmp_path, "killed", 2, "--fault", "kill rank 1 at step 8")
    assert {event["attempt"] for event in events(tmp_path / "killed", "step")} == {0, 1}
    assert killed == whole
    a, b = newest_tensors(tmp_path / "whole"), newest_tensors(tmp_path / "killed")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert max(visits(a)) > 0, "no patch is under way"
    assert none_left(tmp_path / "killed")


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    serial = train(tmp_path, "1", 1)
    train(tmp_path, "run", 2, "--set", "stop=6")
    assert max(visits(newest_tensors(tmp_path / "run"))) > 0, "no patch is under way"
    more = train(tmp_path, "run", 4, "--resume", "--set", "stop=10")
    assert more == pytest.approx(serial, rel=1e-12)
    assert all(b - a == 1 for a, b in pairwise(sorted(more)))


def test_the_command_proves_a_network_that_moves(tmp_path):
    done = headway_here("verify", MOVING, "-n", "2", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "EQUAL to the serial run" in done.out


@pytest.mark.slow
def test_the_bundled_workload_is_the_serial_run(tmp_path):
    words = ("arguments.depth=2", "arguments.features=4", "arguments.fov=[9, 9, 9]")
    sets = [word for setting in words for word in ("--set", setting)]
    done = headway_here("verify", "floodfill", "-n", "2", *sets, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
