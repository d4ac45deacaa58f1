"""ranks: recipes on a real local Ray: a killed worker, a recipe's error, a `Recipe` object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from headway.errors import WorkerFailed
from support.commands import events, headway_here, newest_tensors
from support.patience import patient

pytest.importorskip("ray.train", reason="needs the extra ray", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = """
import json, os, pickle, sys
import ray
import headway.ray
from support import recipes

def job(name, recipe, **options):
    trainer = headway.ray.trainer(recipe, processes=2, directory=f"{HERE}/{name}", **options)
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        return [[type(e).__name__, str(e)] for e in error.worker_failures.values()]
    return [result.metrics, result.checkpoint.path]

HERE = sys.argv[1]
paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": paths})
trap = ("arguments.rank=1", "arguments.at=14", f"arguments.path={HERE}/trap")
found = {
    "killed": job("killed", "support.recipes:trapped", overrides=("arguments.what=kill", *trap)),
    "object": job("object", recipes.mlp(steps=6)),
}
os.remove(f"{HERE}/trap")
found["raised"] = job(
    "raised", "support.recipes:trapped", overrides=("arguments.what=raise", *trap), restarts=0
)
ray.shutdown()
with open(f"{HERE}/found.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run directories, what `fit()` gave, and what stood in the terminal."""
    folder = tmp_path_factory.mktemp("ray")
    script = folder / "job.py"
    script.write_text(textwrap.dedent(PROGRAM))
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], cwd=folder, text=True,
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=patient(300),
    )  # fmt: skip
    (folder / "terminal.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text())


def test_a_killed_worker_is_restarted_and_ends_with_the_undisturbed_numbers(folder, found):
    assert (folder / "trap").exists()  # sprung in the last job; the first removed its own
    metrics, checkpoint = found["killed"]
    assert metrics["steps"] == 20
    assert checkpoint == str(folder / "killed/checkpoints/step-00000020")
    done = headway_here("train", "support.recipes:trapped", "-n", "2", "-d", "plain", cwd=folder)
    assert done.code == 0, done.err
    expected, got = newest_tensors(folder / "plain"), newest_tensors(folder / "killed")
    assert set(expected) == set(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert max(start["step"] for start in events(folder / "killed", "start")) >= 3


def test_a_recipe_object_trains(found):
    metrics, _ = found["object"]
    assert metrics["steps"] == 6
    assert metrics["loss"] == pytest.approx(1.3968019783496857, abs=1e-12)


def test_an_error_of_the_recipe_is_raised_and_shown_in_headways_words(folder, found):
    said = [text for kind, text in found["raised"] if kind == WorkerFailed.__name__]
    assert said, found["raised"]
    assert "rank 1" in said[0]
    assert "the sky is falling" in said[0]
    assert f"{WorkerFailed.code} rank 1" in (folder / "terminal.txt").read_text()
