#!/bin/bash
#SBATCH --job-name=shapes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=2:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

set -u
mkdir -p /shared/runs/shapes

# Ranks prove with it that they belong to this job; it is new at every start, and in no file.
HEADWAY_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export HEADWAY_SECRET
# export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1   # the private network

ending=
# To the ranks, not to this script: they save a checkpoint and end with code 0.
trap 'ending=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

restarts=3
while true; do
  srun --kill-on-bad-exit=1 \
    headway train image_classifier:recipe --directory /shared/runs/shapes --resume &
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
  if [ "$code" -lt 3 ] || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
  echo "the ranks ended with code $code; they continue from the last checkpoint" >&2
done
