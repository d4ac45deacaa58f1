"""emulated: the real command on emulated nodes trains the same, and survives what breaks there."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.cluster import Cluster, parse_fault
from headway.comm.traffic_shaper import TrafficShaper
from headway.launch.emulation import PacedCluster
from headway.launch.faults import FaultInjector, fault_actions
from headway.launch.namespaces import NETNS_FOLDER, command_json
from headway.run.distributed.launch_env import LaunchEnv
from support.commands import (
    HEADWAY,
    environment,
    events,
    headway,
    newest_tensors,
    none_left,
    wait_for_step,
)
from support.emulated import needs_root
from support.sampling import sampled

pytestmark = needs_root

TWO = 'nodes = 2\nbetween = { rate = "100 Mbit/s" }\n'
TWO_BY_TWO = f"processes = 2\n{TWO}"
RECIPE = "support.recipes:mlp"


def train(cwd: Path, run: str, *words: str, recipe: str = RECIPE):
    return headway("train", recipe, "-d", run, "--device", "cpu", *words, cwd=cwd, timeout=150)


def emulate(cwd: Path, text: str, run: str, *words: str, recipe: str = RECIPE):
    (cwd / "cluster.toml").write_text(text)
    return train(cwd, run, "--emulate", "cluster.toml", *words, recipe=recipe)


@pytest.mark.parametrize(("text", "ranks"), sampled([(TWO, 2), (TWO_BY_TWO, 4)], 1))
def test_the_same_numbers_as_on_plain_processes(tmp_path, text, ranks):
    plain = train(tmp_path, "plain", "-n", str(ranks))
    assert plain.code == 0, plain.err
    done = emulate(tmp_path, text, "nodes")
    assert done.code == 0, done.err
    assert "c10d" not in done.err  # no complaints of torch about addresses without names
    losses = [[e["loss"] for e in events(tmp_path / run, "step")] for run in ("plain", "nodes")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    expected, got = (newest_tensors(tmp_path / run) for run in ("plain", "nodes"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert none_left(tmp_path / "nodes")


def test_a_killed_rank_is_restarted_once(tmp_path):
    done = emulate(tmp_path, TWO_BY_TWO, "run", "--fault", "kill rank 1 at step 6")
    assert done.code == 0, done.err
    assert "rank 1 was killed by SIGKILL" in done.err
    told = [
        (e["text"], e["step"], e["rank"], e["attempt"]) for e in events(tmp_path / "run", "fault")
    ]
    assert told == [("kill rank 1 at step 6", 6, 1, 0)]
    steps = events(tmp_path / "run", "step")
    assert {step["attempt"] for step in steps} == {0, 1}
    assert steps[-1]["step"] == 8
    assert none_left(tmp_path / "run")


@pytest.mark.slow
def test_a_slow_link_is_seen_in_the_steps_until_it_recovers(tmp_path):
    """1.3 MB of gradients a step: 0.11 s at 100 Mbit/s, 2.1 s at a twentieth of it."""
    fault = "link a-b 20x slower from step 3 to step 5"
    done = emulate(
        tmp_path, TWO, "run", "--fault", fault, "--set", "arguments.steps=6",
        "--set", "arguments.every=100", recipe="support.recipes:large",
    )  # fmt: skip
    assert done.code == 0, done.err
    seconds = [event["seconds"] for event in events(tmp_path / "run", "step")]
    assert len(seconds) == 6
    assert min(seconds[2:4]) > 1.7
    assert min(seconds[1], *seconds[4:]) < 1.2
    told = [event["text"] for event in events(tmp_path / "run", "fault")]
    assert told == [fault, "link a-b back to 100 Mbit/s at step 5"]


def test_a_cut_link_ends_in_an_error_and_leaves_nothing(tmp_path):
    done = emulate(
        tmp_path, TWO, "run", "--fault", "cut link a-b at step 3", "--timeout", "5 s",
        "--restarts", "0",
    )  # fmt: skip
    assert done.code in (3, 5), done.err
    assert "HW-" in done.err
    assert none_left(tmp_path / "run")
    names = [path.name for path in NETNS_FOLDER.glob("headway-*")]
    assert all(Path(f"/proc/{name.split('-')[1]}").exists() for name in names)


def test_ranks_know_their_node(tmp_path):
    """The recipe is made on every rank: it writes down what its rank was told."""
    (tmp_path / "nodes.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from support.recipes import mlp\n"
        "from headway.run.distributed.launch_env import LaunchEnv\n"
        "def recipe():\n"
        "    place = LaunchEnv.here()\n"
        "    facts = (place.node, place.local_rank, place.local_ranks, place.node_rank)\n"
        "    Path(f'told-{place.rank}').write_text(repr(facts))\n"
        "    return mlp(steps=2)\n"
    )
    done = emulate(tmp_path, TWO_BY_TWO, "run", recipe="nodes:recipe")
    assert done.code == 0, done.err
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(4)]
    assert told == [
        "('a', 0, 2, 0)",
        "('a', 1, 2, 0)",
        "('b', 0, 2, 1)",
        "('b', 1, 2, 1)",
    ]


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    (tmp_path / "cluster.toml").write_text(TWO)
    words = ("train", "support.recipes:trapped", "-d", "run", "--device", "cpu")
    job = subprocess.Popen(
        (*HEADWAY, *words, "--emulate", "cluster.toml", "--set", "arguments.pause=0.1"),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 2, job)
    job.kill()
    job.communicate()
    assert none_left(tmp_path / "run")
    deadline = time.monotonic() + 8
    while list(NETNS_FOLDER.glob(f"headway-{job.pid}-*")) or any(
        f"hw{job.pid}." in link["ifname"] for link in command_json("ip", "link")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-n", "3"), "--processes 3 contradicts the 2 of the emulated cluster"),
        (("--fault", "kill rank 2 at step 1"), "there is no rank 2"),
        (("--fault", "cut link a-z at step 1"), "no node 'z'"),
        (("--fault", "smoke"), "'smoke' is no fault; write"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, words, said):
    done = emulate(tmp_path, TWO, "run", *words)
    assert done.code == 1
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_faults_without_nodes_kill_ranks_only(tmp_path):
    done = train(tmp_path, "run", "-n", "2", "--fault", "cut link a-b at step 1")
    assert done.code == 1
    assert "there is no link to change" in done.err
    assert "--emulate cluster.toml" in done.err


def test_gpus_and_other_launchers_are_refused(tmp_path, monkeypatch):
    (tmp_path / "cluster.toml").write_text(TWO)
    words = ("train", RECIPE, "-d", "run", "--emulate", "cluster.toml")
    done = headway(*words, "--device", "cuda", cwd=tmp_path)
    assert "nodes are emulated for CPUs only" in done.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = headway(*words, cwd=tmp_path)
    assert "--emulate needs processes that headway itself starts" in done.err


# ---- which rank does what, and when -----------------------------------------------------------


def place(rank: int, attempt: int = 0) -> LaunchEnv:
    return replace(LaunchEnv(), rank=rank, ranks=4, attempt=attempt)


class Links:
    """Writes down what is changed; has the cluster of the real thing."""

    def __init__(self):
        self.cluster = Cluster.of(2, 2, rate="100 Mbit/s")
        self.done = []

    def set_link(self, first, second, rate):
        self.done.append((first, second, rate))

    def cut(self, first, second):
        self.done.append((first, second, "cut"))


def test_one_rank_acts_once_and_a_resumed_run_catches_up(tmp_path):
    texts = ["link b-a 10x slower from step 3 to step 5", "cut link a-b at step 9"]
    links = Links()

    def launch(first_attempt=0):
        return FaultInjector(
            faults=tuple(map(parse_fault, texts)), directory=tmp_path,
            first_attempt=first_attempt, emulated=links,
        )  # fmt: skip

    first, other = launch(), launch()
    for step in range(1, 5):
        first(place(2), step)
        other(place(0), step)
    assert links.done == [("b", "a", 1_250_000.0)]
    again = launch()  # a restart: what has happened has
    for step in range(2, 7):
        again(place(2, attempt=1), step)
    assert links.done[1:] == [("b", "a", 12_500_000.0)]
    resumed = launch(first_attempt=2)  # a new launch on new links
    resumed(place(2, attempt=2), 4)
    assert links.done[2:] == [("b", "a", 1_250_000.0)]
    resumed(place(0, attempt=2), 12)
    assert links.done[3:] == [("a", "b", "cut")]
    assert [deed.step for deed in fault_actions(parse_fault(texts[0]), links)] == [3, 5]
    assert len(events(tmp_path, "fault")) == 4


def test_a_kill_is_not_made_up_for(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    faults = FaultInjector(faults=(parse_fault("kill rank 1 at step 3"),), directory=tmp_path)
    for step in (1, 2, 4):
        faults(place(1), step)
    assert killed == []
    faults(place(1), 3)
    assert len(killed) == 1


def test_without_root_the_faults_change_the_pace(tmp_path):
    paced = PacedCluster(cluster=Cluster.of(2, 2, rate="100 Mbit/s"))
    where = {name: paced.pace(name, tmp_path) for name in "ab"}
    fault = parse_fault("link a-b 10x slower from step 3")
    faults = FaultInjector(faults=(fault,), directory=tmp_path, emulated=paced)
    faults(replace(place(0), pace=where["a"]), 3)
    for name in "ab":
        with TrafficShaper.of(*where[name]) as pace:
            assert pace.rate == 1_250_000
