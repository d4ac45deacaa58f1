"""ranks: headway launch --min-np: workers come, go and die; what was trained stays right."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headway.launch.elastic.worker_process import ElasticProcess
from support.commands import HEADWAY, environment, headway_here
from support.patience import patient

# Each step adds a number that all ranks make together, whoever they are.
TRAIN = """
import os, pathlib, time
import torch
import headway.horovod as hvd
hvd.init()
started = os.environ["HOROVOD_RANK"]
state = hvd.elastic.TorchState(total=0.0, step=0, sizes=[])
state.register_reset_callbacks([lambda: state.sizes.append(hvd.size())])

@hvd.elastic.run
def train(state):
    while state.step < 12:
        own = sum(float(number) for number in range(12)[hvd.rank() :: hvd.size()])
        total = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Sum, name="x")
        assert total == 66
        state.total += float(total) * (state.step + 1)
        state.step += 1
        if hvd.rank() == 0:
            act(state)
        if DIES == (started, state.step) and hvd.size() == 3:
            os.kill(os.getpid(), 9)
        state.commit()

def hosts(text, size):
    # The change must come before the steps are over.
    pathlib.Path("hosts").write_text(text)
    while hvd.size() != size and state._host_messages.empty():
        time.sleep(0.01)

train(state)
print(hvd.rank(), hvd.size(), state.total, state.step, os.environ["HOROVOD_HOSTNAME"], flush=True)
"""
CHANGES = """
DIES = None
def act(state):
    if state.step == 3:
        hosts("localhost:3", 3)
    if state.step == 8:
        hosts("localhost:1", 1)
"""
DEATH = """
DIES = ("1", 5)
def act(state):
    pass
"""
TOTAL = 66.0 * 12 * 13 / 2


def write(folder: Path, text: str, hosts: str) -> None:
    folder.joinpath("hosts").write_text(hosts)
    folder.joinpath("train.py").write_text(text)


def outputs(folder: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in sorted(folder.glob("out/*/stdout"))}


def launch(folder: Path, words: str):
    command = ("--host-discovery-script", "cat hosts", *words.split())
    return headway_here("launch", *command, "python", "train.py", cwd=folder)


@pytest.mark.timeout(180)
def test_two_workers_then_three_then_one(tmp_path):
    write(tmp_path, CHANGES + TRAIN, "localhost:2")
    done = launch(tmp_path, "-np 2 --min-np 1 --output-filename out --elastic-timeout 60")
    assert done.code == 0, done.err
    # Those without a place have ended without a word.
    assert outputs(tmp_path) == {
        "rank.0": f"0 1 {TOTAL} 12 localhost\n",
        "rank.1": "",
        "rank.2": "",
    }
    told = "hosts have changed: {}\nworld {}: {}\n"
    assert done.err.endswith(
        told.format("3 slots", 2, "3 processes") + told.format("1 slot", 3, "1 process")
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_worker_dies_and_its_host_is_excluded(tmp_path, monkeypatch, late):
    """Rank 1 shares its host with rank 2; rank 0 goes on with the state, and a host that waited.

    Also where the launcher hears of the death when the others have left their world long ago.
    """
    statuses, died = ElasticProcess.status, {}

    def status(process):
        found = statuses(process)
        since = died.setdefault(process, time.monotonic()) if found else 0.0
        return found if time.monotonic() >= since + late else None

    monkeypatch.setattr(ElasticProcess, "status", status)
    write(tmp_path, DEATH + TRAIN, "localhost:1\n127.0.0.1:2\n127.0.0.2:1\n")
    words = "-np 3 --min-np 2 --max-np 3 --output-filename out --elastic-timeout 60"
    done = launch(tmp_path, words)
    assert done.code == 0, done.err
    assert done.err == (
        "rank 1 on 127.0.0.1[0] was ended by SIGKILL; 127.0.0.1 is excluded\nworld 2: 2 processes\n"
    )
    assert outputs(tmp_path) == {
        "rank.0": f"0 2 {TOTAL} 12 localhost\n",
        "rank.1": f"1 2 {TOTAL} 12 127.0.0.2\n",
        "rank.2": "",
    }


# Without torch: what the launcher does with workers that never meet.
FAILS = """
import os, signal, time
if os.environ["HOROVOD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("hosts", "words", "code", "said"),
    [
        ("localhost:2", "-np 2", 3, "rank 1 on localhost[1] was ended by SIGKILL, and no host is"),
        (
            *("localhost:2", "-np 2 --elastic-timeout 1 --blacklist-cooldown-range 90 90"),
            *(5, "0 slots after 1 s, and --min-np wants 2"),
        ),
        ("localhost:1", "-np 2 --elastic-timeout 1", 5, "1 slot after 1 s, and -np wants 2"),
        ("localhost:a", "-np 2", 1, "the discovery script says 'localhost:a'"),
        (
            *("localhost:1\n127.0.0.1:1", "-np 2 --min-np 1 --elastic-timeout 1"),
            *(3, "rank 0 on localhost[0] has not left its world for 1 s"),
        ),
        (
            *("localhost:2", "-np 2 --reset-limit 0 --blacklist-cooldown-range 1 1"),
            *(3, "the workers of this job have changed 1 time\n  --reset-limit is 0"),
        ),
    ],
)
@pytest.mark.timeout(120)
def test_jobs_that_cannot_go_on_end(tmp_path, hosts, words, code, said):
    write(tmp_path, FAILS, hosts)
    done = launch(tmp_path, words)
    assert said in done.err
    assert done.code == code


SLEEPS = "import os, time\nopen(str(os.getpid()), 'w').close()\ntime.sleep(1000)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.timeout(120)
def test_workers_end_with_their_launcher(tmp_path, number):
    """Also those of another host: ssh is replaced by a shell, which ends with its input."""
    write(tmp_path, SLEEPS, "localhost:1\nthere:1\n")
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != there ]; do shift; done\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o700)
    words = ("launch", "-np", "2", "--host-discovery-script", "cat hosts", "python", "train.py")
    path = f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    launcher = subprocess.Popen(
        [*HEADWAY, *words], cwd=tmp_path, env=environment(PATH=path), stderr=subprocess.PIPE
    )
    try:
        workers: list[int] = []
        while len(workers) < 2 and launcher.poll() is None:
            workers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
        assert launcher.poll() is None, launcher.communicate()[1]
        ends = [os.pidfd_open(worker) for worker in workers]
        launcher.send_signal(number)
        for end in ends:
            assert wait(end), "a worker has outlived its launcher"
            os.close(end)
    finally:
        launcher.kill()
        launcher.communicate()


def wait(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], patient(30))[0])
