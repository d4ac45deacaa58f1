"""single: `headway taxonomy`, and the taxonomy's words in `headway plan show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main as cli
from headway.plans import Plan, Synchrony, data_parallel


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    data_parallel(64, processes=4, synchrony=Synchrony(merge="mean", local_steps=8)).save(file)
    return file


def test_the_table_with_the_users_plan_as_a_row(own: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["taxonomy", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["(this", "plan)"]
    assert lines[1].split()[2:5] == ["data", "decentral", "sync"]
    assert "all-reduce, every 8 steps" in lines[1]
    assert any(line.startswith("TreeEASGD") for line in lines)
    assert any("Hogwild across hosts" in line and "nearest" in line for line in lines)
    assert lines[-1].startswith("data parallel, decentral, sync: best learning rate")


def test_the_same_as_data(own: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["taxonomy", str(own), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["systems"]) == 34
    assert found["plan"]["words"]["optimisation"] == "decentral"
    assert found["plan"]["rules"][0]["reproducible"] == "easy"


def test_a_systems_plan_is_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "petuum.json"
    assert cli.main(["taxonomy", "--write", "petuum", "--out", str(file)]) == 0
    assert Plan.load(file).synchrony.remedy == "eager_push"
    assert cli.main(["taxonomy", "--write", "Petum", "--out", str(file)]) == 1
    assert "did you mean Petuum" in capsys.readouterr().err
    assert cli.main(["taxonomy", "--write", "Petuum"]) == 1
    assert "go together" in capsys.readouterr().err


def test_plan_show_says_what_a_plan_is(own: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "show", str(own)]) == 0
    said = capsys.readouterr().out
    assert "taxonomy: parallelism data; optimisation decentral; scheduling sync" in said
    assert "best learning rate as the cluster grows: likely lower" in said
