"""A recipe as an sbatch script: srun starts the ranks, the script starts them again.

A rank that dies ends the step (`--kill-on-bad-exit`), which is started again in the same
allocation. Before the time is over Slurm signals the script; the ranks save and end, and the job is
queued again. Slurm queues a job whose machine fails again, too. Each start resumes.
"""

from __future__ import annotations

import shlex

from headway.launch.job_files.request import LaunchRequest
from headway.launch.restart_policy import RESTARTS

WARNING_SECONDS = 120
"""Before the end of the job's time: for the current step, a checkpoint and the end."""
FIRST_RESTARTED = 3
"""Exit codes below it are mistakes of the recipe or of the command, the same at the next start."""

_SCRIPT = """\
set -u
mkdir -p {directory}

# Ranks prove with it that they belong to this job; it is new at every start, and in no file.
HEADWAY_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export HEADWAY_SECRET
# export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1   # the private network

ending=
# To the ranks, not to this script: they save a checkpoint and end with code 0.
trap 'ending=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

restarts={restarts}
while true; do
  srun --kill-on-bad-exit=1 \\
    {command} &
  step=$!
  wait "$step"
  code=$?
  # The signal interrupts the wait, not the step.
  while kill -0 "$step" 2> /dev/null; do
    wait "$step"
    code=$?
  done
  if [ -n "$ending" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
  fi
  # 0: complete; 1 and 2: a mistake, which would be the same at the next start.
  if [ "$code" -lt {first_restarted} ] || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
  echo "the ranks ended with code $code; they continue from the last checkpoint" >&2
done
"""


def slurm_script(
    request: LaunchRequest, *, time: str | None = None, partition: str | None = None
) -> str:
    """The sbatch script of a job.

    Args:
        time: Slurm's time limit, as in "1-00:00:00"; None: the partition's.
        partition: None: the cluster's default.
    """
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": request.processes,
        # Of the machine, not of a task: each process chooses its own by its number there.
        "gpus-per-node": request.processes if request.gpus else None,
        "time": time,
        "partition": partition,
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:USR1@{WARNING_SECONDS}",
    }
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value != "" else "")
        for name, value in options.items()
        if value is not None
    ]
    script = _SCRIPT.format(
        directory=shlex.quote(str(request.directory)),
        restarts=RESTARTS,
        first_restarted=FIRST_RESTARTED,
        command=shlex.join(("headway", *request.train_words)),
    )
    return "\n".join(["#!/bin/bash", *lines, "", script])
