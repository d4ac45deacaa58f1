"""ranks: whatever kills or stops a job, it goes on from a checkpoint as if nothing had happened.

The command is a process of its own where it is stopped, or where all that it prints is looked at;
it runs in the test's process where a worker is killed. "The same" is bit for bit for the same
number of processes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.report.history.reader import read_history
from support.commands import (
    HEADWAY,
    Done,
    command,
    environment,
    events,
    headway,
    headway_here,
    newest_tensors,
    none_left,
    wait_for_step,
    warm_variables,
)
from support.patience import patient
from support.ports import free_port
from support.sampling import sampled

STEPS = 20


def train(
    cwd: Path,
    run: str,
    *settings: str,
    processes: int = 2,
    resume: bool = False,
    command: Callable[..., Done] = headway,
) -> Done:
    words = [word for setting in settings for word in ("--set", setting)]
    return command(
        "train", "support.recipes:trapped", "-n", str(processes), "-d", run, "--device", "cpu",
        *words, *(["--resume"] if resume else []), cwd=cwd,
    )  # fmt: skip


def warm(**changes: str) -> dict[str, str]:
    """The variables of commands that are forked from a warm process."""
    return environment(**warm_variables(), **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The numbers that every disturbed run must end with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train(folder, "run")
    assert done.code == 0, done.err
    return newest_tensors(folder / "run")


def same(expected, got):
    assert set(expected) == set(got)
    assert len(got) > 10
    different = [name for name in expected if not torch.equal(expected[name], got[name])]
    assert not different, different


def each_sample_once(run: Path, steps: int = STEPS, samples: int = 40):
    """In the history that counts, the steps follow each other and cover every epoch once."""
    seen = [(s.step, s.epoch, s.position, s.samples) for s in read_history(run).steps]
    assert [step for step, *_ in seen] == list(range(1, steps + 1))
    epoch, position = 0, 0
    for _, at_epoch, at_position, count in seen:
        assert (at_epoch, at_position) == (epoch, position)
        position += count
        if position == samples:
            epoch, position = epoch + 1, 0


# The model's forward pass is called twice by the probe for random numbers, then once a step.
DEATHS = [
    ("kill", 0, 11),
    ("kill", 1, 6),  # rank 0 has written the first steps by then
    ("backward", 1, 15),
    ("optimizer", 1, 10),
    ("data", 0, 40),
]


@pytest.mark.parametrize(("what", "rank", "at"), sampled([*DEATHS], 2))
def test_kill_9_of_any_worker_at_any_time(tmp_path, undisturbed, what, rank, at):
    trap = tmp_path / "sprung"
    done = train(
        tmp_path, "run",
        f"arguments.what={what!r}", f"arguments.path='{trap}'",
        f"arguments.rank={rank}", f"arguments.at={at}", command=headway_here,
    )  # fmt: skip
    assert trap.exists()
    assert done.code == 0, done.err
    assert f"rank {rank} was killed by SIGKILL" in done.err
    attempts = {event["attempt"] for event in events(tmp_path / "run", "step")}
    assert attempts == {0, 1}
    same(undisturbed, newest_tensors(tmp_path / "run"))
    each_sample_once(tmp_path / "run")
    done_before = [e["step"] for e in events(tmp_path / "run", "step") if e["attempt"] == 0]
    first = min(e["step"] for e in events(tmp_path / "run", "step") if e["attempt"] == 1)
    lost = max(done_before, default=0) - first + 1
    # One interval, and what was done while the newest checkpoint was still being written.
    assert lost <= 2 * 3, f"{lost} steps were done again"
    assert none_left(tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_before_the_run_directory_is_described(tmp_path, rank):
    """The next attempt describes it; the first was killed before."""
    trap = tmp_path / "sprung"
    done = train(
        tmp_path, "run", "arguments.what='recipe'", f"arguments.path='{trap}'",
        f"arguments.rank={rank}", "arguments.steps=3", command=headway_here,
    )  # fmt: skip
    assert trap.exists()
    assert done.code == 0, done.err
    assert f"rank {rank} was killed by SIGKILL" in done.err
    assert {event["attempt"] for event in events(tmp_path / "run", "step")} == {1}
    assert (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.parametrize("name", sampled(["SIGTERM", "SIGINT"], 1))
def test_a_signal_stops_in_order_and_resume_goes_on(tmp_path, undisturbed, name):
    run = tmp_path / "run"
    words = ("train", "support.recipes:trapped", "-n", "2", "-d", "run", "--device", "cpu")
    job = subprocess.Popen(
        ("headway", *words, "--set", "arguments.pause=0.1"), cwd=tmp_path, env=warm(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(run, 4, job)
    job.send_signal(getattr(signal, name))
    out, err = job.communicate(timeout=patient(60))
    assert job.returncode == 128 + getattr(signal, name), out + err
    (stop,) = events(run, "stop")
    assert stop["reason"] == name
    assert 4 <= stop["step"] < STEPS
    assert max((run / "checkpoints").glob("step-????????")).name == f"step-{stop['step']:08d}"
    assert none_left(run)
    done = train(tmp_path, "run", resume=True)
    assert done.code == 0, done.err
    same(undisturbed, newest_tensors(run))
    each_sample_once(run)


@pytest.mark.slow
def test_resume_with_another_number_of_processes(tmp_path):
    """2, then 3, then 1 processes, in float64: the same to rounding as one process throughout."""
    double = "precision='float64'"
    for steps, processes in ((7, 2), (13, 3), (STEPS, 1)):
        done = train(
            tmp_path, "parts", f"arguments.steps={steps}", double,
            processes=processes, resume=steps > 7, command=headway_here,
        )  # fmt: skip
        assert done.code == 0, done.err
    assert train(tmp_path, "whole", double, processes=1, command=headway_here).code == 0
    whole, parts = (newest_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert set(whole) == set(parts)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    each_sample_once(tmp_path / "parts")


def failing(tmp_path: Path, what: str, at: int = 12) -> Done:
    done = train(
        tmp_path, "run", f"arguments.what={what!r}", f"arguments.path='{tmp_path / 'sprung'}'",
        "arguments.rank=1", f"arguments.at={at}",
    )  # fmt: skip
    assert none_left(tmp_path / "run")
    return done


def sound_checkpoint(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """The last good checkpoint is intact: going on from it ends where it should."""
    done = train(tmp_path, "run", resume=True, command=headway_here)
    assert done.code == 0, done.err
    assert events(tmp_path / "run", "resume")[-1]["step"] > 0
    same(undisturbed, newest_tensors(tmp_path / "run"))


def test_an_exception_in_one_rank_is_the_one_error_on_top(tmp_path, undisturbed):
    done = failing(tmp_path, "raise")
    assert done.code == 3
    lines = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert lines == ["HW-3003 rank 1, step 10: ValueError: the sky is falling"]
    assert "recipes.py" in done.err
    assert "Traceback" not in done.err
    sound_checkpoint(tmp_path, undisturbed)


def test_a_nan_loss_stops_the_job_before_the_update(tmp_path, undisturbed):
    done = failing(tmp_path, "nan")
    assert done.code == 3
    lines = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert len(lines) == 1
    assert "step 10: the loss is nan" in lines[0]
    sound_checkpoint(tmp_path, undisturbed)


def test_an_exit_with_status_0_is_an_error_and_no_restart(tmp_path):
    done = failing(tmp_path, "exit")
    assert done.code == 3
    lines = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert lines == ["HW-3003 rank 1: the code called os._exit(0)"]
    assert "recipes.py" in done.err
    assert "restart" not in done.err


def test_a_run_directory_that_is_deleted_ends_the_run(tmp_path):
    done = failing(tmp_path, "delete")
    assert done.code == 3
    (line,) = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert "has been deleted while the run was writing it" in line


def test_a_collective_of_one_rank_alone_is_named(tmp_path):
    """Under Gloo an abort or a wrong sum; the second attempt lets torch compare collectives."""
    done = failing(tmp_path, "collective")
    assert done.code == 3, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert "the ranks call different collectives: rank 0 calls" in line
    assert ", rank 1 calls allreduce of Float[1000]" in line


def test_a_vanished_data_file_is_named(tmp_path):
    data = tmp_path / "data.bin"
    data.write_bytes(bytes(range(256)) * 80)
    job = subprocess.Popen(
        ("headway", "train", "support.recipes:from_file", "-n", "2", "-d", "run", "--device", "cpu",
         "--set", f"arguments.path='{data}'"),
        cwd=tmp_path, env=warm(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 5, job)
    data.unlink()
    start = time.monotonic()
    _, err = job.communicate(timeout=patient(60))
    assert job.returncode == 1, err
    assert time.monotonic() - start < 25  # the agent kills those that wait after 30 s
    assert [line[:7] for line in err.splitlines() if line.startswith("HW-")] == ["HW-1301"]
    assert str(data) in err
    assert none_left(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    target = tmp_path / "disk"
    target.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"needs root, to mount a small disk: {made.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_job_and_leaves_the_last_checkpoint_whole(small_disk, tmp_path):
    run = small_disk / "run"
    done = headway(
        "train", "support.recipes:large", "-n", "2", "-d", str(run), "--device", "cpu", cwd=tmp_path
    )
    assert done.code in (1, 3), done.err
    lines = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert len(lines) == 1, done.err
    assert "No space left" in done.err
    assert none_left(run)
    shown = headway("checkpoint", "show", str(run), cwd=tmp_path)
    assert shown.code == 0, shown.err
    whole = sorted((run / "checkpoints").glob("step-????????"))
    assert whole
    for path in list(whole)[:-1]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    done = headway(
        "train", "support.recipes:large", "-n", "2", "-d", str(run), "--device", "cpu", "--resume",
        "--set", "checkpoint_keep=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert events(run, "resume")[-1]["step"] == int(whole[-1].name.removeprefix("step-"))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, undisturbed):
    assert train(tmp_path, "run", "arguments.steps=14", command=headway_here).code == 0
    newest = max((tmp_path / "run" / "checkpoints").glob("step-????????"))
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    done = train(tmp_path, "run", resume=True)
    assert done.code == 0, done.err
    assert newest.name in done.err
    assert events(tmp_path / "run", "resume")[-1]["step"] == 12
    same(undisturbed, newest_tensors(tmp_path / "run"))


def test_a_hang_is_named_after_the_time_out(tmp_path):
    done = headway(
        "train", "support.recipes:trapped", "-n", "2", "-d", "run", "--device", "cpu",
        "--timeout", "3 s", "--set", "arguments.what='hang'",
        "--set", f"arguments.path='{tmp_path / 'sprung'}'",
        "--set", "arguments.rank=1", "--set", "arguments.at=8", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 5, done.err
    assert "rank 1 did not come" in done.err
    assert re.search(r"rank 1: .*, at .*recipes\.py:\d+ \(forward\), for \d+ s", done.err), done.err
    assert none_left(tmp_path / "run")


def test_data_loading_processes_change_nothing_and_none_is_left(tmp_path, undisturbed):
    done = train(tmp_path, "run", "arguments.workers=2", command=headway_here)
    assert done.code == 0, done.err
    same(undisturbed, newest_tensors(tmp_path / "run"))
    assert none_left(tmp_path / "run")


def test_a_run_directory_holds_one_run(tmp_path):
    assert train(tmp_path, "run", "arguments.steps=2", command=headway_here).code == 0
    again = train(tmp_path, "run", command=headway_here)
    assert again.code == 1
    assert "HW-1003 run: already holds a run" in again.err
    assert "--resume" in again.err


def torchrun(port: int, node: int) -> tuple[str, ...]:
    return (
        "torchrun", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job",
        "--node-rank", str(node), "--max-restarts", "2", "-m", "headway",
    )  # fmt: skip


@pytest.mark.slow
def test_torchrun_on_two_nodes_with_a_kill(tmp_path, undisturbed):
    """Two agents on one machine; a rank is killed; no variable helps torch 2.13 to restart."""
    trap = tmp_path / "sprung"
    words = (
        "train", "support.recipes:trapped", "-d", "run", "--device", "cpu",
        "--set", "arguments.what='kill'", "--set", f"arguments.path='{trap}'",
        "--set", "arguments.rank=1", "--set", "arguments.at=11",
    )  # fmt: skip
    variables = warm()
    variables.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    port = free_port()
    agents = [
        subprocess.Popen(
            (*torchrun(port, node), *words), cwd=tmp_path, env=variables,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    texts = [agent.communicate(timeout=patient(120))[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(texts)
    assert trap.exists()
    same(undisturbed, newest_tensors(tmp_path / "run"))
    each_sample_once(tmp_path / "run")


def test_srun(tmp_path, undisturbed):
    """The variables of srun; rank 0 opens the store at the first node of the list."""
    words = ("headway", "train", "support.recipes:trapped", "-d", "run", "--device", "cpu")
    job_id = str(free_port())  # srun's ranks make the port of it
    jobs = []
    for rank in (0, 1):
        variables = warm(
            SLURM_JOB_ID=job_id, SLURM_STEP_ID="0", SLURM_NTASKS="2",
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0",
            SLURM_STEP_NODELIST="localhost", SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE="2",
        )  # fmt: skip
        jobs.append(
            subprocess.Popen(
                words, cwd=tmp_path, env=variables, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    texts = [job.communicate(timeout=patient(120))[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(texts)
    same(undisturbed, newest_tensors(tmp_path / "run"))


def test_more_processes_than_cores_is_a_warning(tmp_path):
    done = train(tmp_path, "run", "arguments.steps=2", processes=5, command=headway_here)
    assert done.code == 0
    assert "5 processes" in done.err
    assert "warning" in done.err


def test_python_dash_m_shows_help(tmp_path):
    assert "Usage: headway COMMAND" in command(*HEADWAY, "--help", cwd=tmp_path).out
