"""ranks: job files of `headway launch`: the Slurm script trains on imitated nodes; schemas."""

from __future__ import annotations

import os
import re
import subprocess

import kubernetes_validate
import pytest
import yaml

from support.commands import environment, headway_here, newest_tensors, warm_variables
from support.patience import patient
from support.ports import free_port

SRUN = """#!/bin/bash
# Two "nodes" with a task each; the first start fails as if a machine were lost.
shift
[ -e {here}/started ] || {{ touch {here}/started; exit 137; }}
for rank in 0 1; do
  SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank \\
    SLURM_STEP_NODELIST=localhost,localhost SLURM_STEP_NUM_TASKS=2 \\
    SLURM_STEP_TASKS_PER_NODE='1(x2)' "$@" --device cpu &
done
wait
"""


def written(folder, *words):
    done = headway_here("launch", "support.recipes:mlp", "--nodes", "2", *words, cwd=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_the_slurm_script_trains_and_starts_lost_ranks_again(tmp_path):
    script = written(tmp_path, "--write", "slurm", "-d", str(tmp_path / "run"), "--set", "stop=3")
    assert "#SBATCH --requeue\n" in script
    (tmp_path / "job.sh").write_text(script)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN.format(here=tmp_path))
    (folder / "srun").chmod(0o755)
    variables = environment(**warm_variables(), SLURM_JOB_ID=str(free_port()))
    variables["PATH"] = f"{folder}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=patient(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "the ranks ended with code 137" in done.stdout
    assert newest_tensors(tmp_path / "run")


def test_the_slurm_script_is_bash(tmp_path):
    words = ("--write", "slurm", "-d", "/shared/it's", "--gpus", "--time", "1:00:00")
    script = written(tmp_path, *words, "--set", "optimizer.name='$(false)'")
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_kubernetes_manifest_keeps_its_schema(tmp_path):
    words = ("--write", "kubernetes", "-d", "/shared/runs/Points_1", "-n", "4", "--gpus")
    text = written(
        tmp_path, *words, "--image", "a/b:1", "--claim", "runs", "--set", "a='\U0001f600'"
    )
    documents = list(yaml.safe_load_all(text))
    assert [document["kind"] for document in documents] == ["Secret", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    secret = documents[0]["stringData"]["HEADWAY_SECRET"]
    assert text.startswith("# HEADWAY_SECRET belongs to this job alone")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in written(
        tmp_path, *words, "--image", "a/b:1", "--claim", "runs", "--set", "a='\U0001f600'"
    )
    assert "'\U0001f600'" in text.replace("'\"'\"'", "'")
