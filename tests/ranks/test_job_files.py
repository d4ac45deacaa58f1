"""ranks: job files of `headway launch`: the Slurm script trains on imitated nodes; schemas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

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
code=0
for rank in 0 1; do
  SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank \\
    SLURM_STEP_NODELIST=localhost,localhost SLURM_STEP_NUM_TASKS=2 \\
    SLURM_STEP_TASKS_PER_NODE='1(x2)' "$@" --device cpu &
  echo $! >> {here}/ranks
done
for rank in $(cat {here}/ranks); do
  wait "$rank" || code=$?
done
exit $code
"""
# What they are asked is written down; signals go to the ranks, as of a real scancel.
SCANCEL = """#!/bin/bash
echo "scancel $*" >> {here}/asked
kill -TERM $(cat {here}/ranks)
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> {here}/asked
rm {here}/ranks
"""


def written(folder, *words):
    done = headway_here("launch", "support.recipes:mlp", "--nodes", "2", *words, cwd=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_the_slurm_script_trains_and_starts_lost_ranks_again(tmp_path):
    script = written(tmp_path, "--write", "slurm", "-d", str(tmp_path / "run"), "--set", "stop=3")
    assert "#SBATCH --requeue\n" in script
    with started(tmp_path, script) as job:
        said, _ = job.communicate(timeout=patient(120))
    assert job.returncode == 0, said
    assert "the ranks ended with code 137" in said
    assert newest_tensors(tmp_path / "run")


@pytest.mark.slow
def test_the_slurm_script_queues_itself_again_before_its_time_is_over(tmp_path):
    words = ("--write", "slurm", "-d", str(tmp_path / "run"), "--set", "stop=1000000")
    script = written(tmp_path, *words)
    (tmp_path / "started").touch()
    number = str(free_port())
    with started(tmp_path, script, number) as job:
        deadline = time.monotonic() + patient(60)
        while not events(tmp_path / "run", "step") and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)  # to the batch script alone, as by --signal=B:
        said, _ = job.communicate(timeout=patient(60))
    assert job.returncode == 0, said
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"scancel --signal=TERM {number}", f"scontrol requeue {number}",
    ]  # fmt: skip
    (stop,) = events(tmp_path / "run", "stop")
    assert stop["reason"] == "SIGTERM"
    with started(tmp_path, script.replace("stop=1000000", f"stop={stop['step'] + 2}")) as job:
        said, _ = job.communicate(timeout=patient(120))
    assert job.returncode == 0, said
    assert [row["step"] for row in events(tmp_path / "run", "resume")] == [stop["step"]]
    assert events(tmp_path / "run", "stop")[-1]["reason"] == "complete"


def started(folder, script, number=None):
    """The batch script of a job whose cluster is imitated by the files in FOLDER/bin."""
    (folder / "job.sh").write_text(script)
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text.format(here=folder))
        (tools / name).chmod(0o755)
    variables = environment(**warm_variables(), SLURM_JOB_ID=number or str(free_port()))
    variables["PATH"] = f"{tools}{os.pathsep}{variables['PATH']}"
    return subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def events(directory, kind):
    file = directory / "events.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    rows = map(json.loads, whole.splitlines())
    return [row for row in rows if row["event"] == kind]


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
