"""ranks: whatever silences a rank, the others say who it was and end within ten seconds.

Here every rank is a process that nobody watches, as on several machines; `launched` ranks have
headway's own launcher. Seconds count from the moment of the kill to the end of the last survivor.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from multiprocessing import connection
from pathlib import Path

import pytest

from headway.errors import Stalled, WorkerFailed
from headway.launch.local import launch_local
from headway.launch.restart_policy import RestartPolicy
from headway.run.distributed.failure_record import read_failures
from support import heartbeat_entries as entries
from support.ports import free_port
from support.ranks import PRELOAD

LIMIT = 15.0  # it is under 6 on a free machine
RANKS = 3


class Job:
    """A world without a launcher: each rank is a process on a "machine" of its own."""

    def __init__(
        self, folder: Path, how: str, victim: int, *, patience: float = 5.0, own: bool = False
    ) -> None:
        self.folder = folder
        self._frozen = victim if how == "stop" else None
        folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "support.heartbeat_entries"])
        port = free_port()
        self._processes = [
            context.Process(
                target=entries.live,
                args=(str(folder), how, victim, patience, own, rank, RANKS, port),
            )
            for rank in range(RANKS)
        ]
        for process in self._processes:
            process.start()
        threading.Thread(target=self._watch, daemon=True).start()
        self._ends: dict[int, float] = {}

    def _watch(self) -> None:
        running = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while running:
            for sentinel in connection.wait(list(running)):
                self._ends[running.pop(sentinel)] = time.time()

    def wait(self) -> Job:
        """Until the survivors have ended."""
        deadline = time.monotonic() + 60
        survivors = set(range(RANKS)) - {self._frozen}
        while not survivors <= self._ends.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.end()
        return self

    def end(self) -> None:
        """Nobody is left, stopped ranks included."""
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def seconds(self, *ranks: int) -> float:
        """From what happened to the end of these ranks."""
        when = float((self.folder / "when").read_text())
        return max(self._ends[rank] for rank in ranks) - when

    @property
    def terminal(self) -> str:
        """What all ranks wrote."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("terminal-*")))

    @property
    def told(self) -> list[str]:
        """The first lines of the errors that the ranks wrote."""
        return [line for line in self.terminal.splitlines() if line.startswith("HW-")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All worlds at the same time: they mostly wait."""
    folder = tmp_path_factory.mktemp("heartbeat")
    started = {
        "kill": Job(folder / "kill", "kill", 2),
        "kill rank 0": Job(folder / "kill-0", "kill", 0),
        "slow": Job(folder / "slow", "slow", 1),
        "stop": Job(folder / "stop", "stop", 1),
        "stop rank 0": Job(folder / "stop-0", "stop", 0),
        "raise": Job(folder / "raise", "raise", 2),
        "fork": Job(folder / "fork", "fork", 1),
        "late": Job(folder / "late", "late", 1, patience=2.0),
        "own": Job(folder / "own", "stop", 1, patience=3.0, own=True),
        "without": Job(folder / "without", "late", 1, patience=0.0),
    }
    yield started
    for job in started.values():
        job.end()


# -- ranks that nobody watches -------------------------------------------------------------------


def test_a_killed_rank_is_named_at_once_by_rank_0(jobs):
    job = jobs["kill"].wait()
    assert job.codes == [3, 3, -9]
    assert job.told == ["HW-3004 rank 0, step 8: rank 2 on node 2 vanished"]
    assert job.seconds(0, 1) < LIMIT / 2


def test_a_killed_rank_0_is_named_on_every_machine(jobs):
    job = jobs["kill rank 0"].wait()
    assert job.codes == [-9, 3, 3]
    assert job.told == [
        f"HW-3004 rank {rank}, step 8: rank 0 on node 0 vanished" for rank in (1, 2)
    ]
    assert job.seconds(1, 2) < LIMIT / 2


def test_ranks_in_slow_code_of_the_user_are_not_waited_for(jobs):
    job = jobs["slow"].wait()
    assert job.codes == [3, -9, 3]
    assert job.told == ["HW-3004 rank 0, step 8: rank 1 on node 1 vanished"]
    assert job.seconds(0, 2) < LIMIT


def test_a_rank_that_fails_tells_it_itself_and_the_others_follow(jobs):
    job = jobs["raise"].wait()
    assert job.codes == [3, 3, 3]
    assert job.told == ["HW-3003 rank 2: an exception stopped this rank"]
    assert job.seconds(0, 1, 2) < LIMIT / 2
    followed = {record.rank: record for record in read_failures(job.folder, 0)}
    assert [rank for rank, record in followed.items() if record.secondary] == [0, 1]
    assert "the sky is falling" in followed[2].why


def test_a_child_that_outlives_a_killed_rank_does_not_hide_its_death(jobs):
    job = jobs["fork"].wait()
    assert job.told == ["HW-3004 rank 0, step 8: rank 1 on node 1 vanished"]
    assert job.seconds(0, 2) < LIMIT / 2


def test_a_late_rank_is_not_a_lost_one(jobs):
    job = jobs["late"].wait()
    assert job.codes == [0, 0, 0], job.terminal
    assert job.terminal == ""


def test_without_patience_there_is_no_heartbeat(jobs):
    assert jobs["without"].wait().codes == [0, 0, 0]


def test_a_loop_of_the_users_own_gets_an_exception(jobs):
    job = jobs["own"].wait()
    for rank in (0, 2):
        caught = json.loads((job.folder / f"caught-{rank}").read_text())
        assert caught["kind"] == ("Stalled" if rank == 0 else "PeerLost")
        assert "rank 1 on node 1 has sent no heartbeat for 3 s" in caught["text"]
        assert caught["time"] - float((job.folder / "when").read_text()) < LIMIT / 2
        assert job.codes[rank] == 0


def test_a_silent_rank_is_named_within_ten_seconds(jobs):
    """Stopped, so that its connections stay open and its machine acknowledges everything."""
    job = jobs["stop"].wait()
    assert job.codes == [5, -signal.SIGKILL, 3]  # killed by rank 0, which sees its process
    assert 3 < job.seconds(0, 1, 2) < LIMIT
    assert job.told == ["HW-5001 rank 0, step 8: rank 1 on node 1 has sent no heartbeat for 5 s"]
    assert "The machine answers, the process does not" in job.terminal
    assert "Last report of rank 1" not in job.terminal


def test_a_silent_rank_0_is_named_on_every_machine(jobs):
    job = jobs["stop rank 0"].wait()
    assert job.codes == [-signal.SIGKILL, 5, 5], job.terminal
    assert 3 < job.seconds(0, 1, 2) < LIMIT
    assert job.told == [
        f"HW-5001 rank {rank}, step 8: rank 0 on node 0 cannot be reached from rank {rank} on "
        f"node {rank}"
        for rank in (1, 2)
    ]
    assert "The machine answers, the process does not" in job.terminal


@pytest.mark.slow
def test_c_code_that_holds_pythons_lock_is_seen_to_compute(tmp_path):
    job = Job(tmp_path / "busy", "busy", 1, patience=2.0).wait()
    assert job.codes == [0, 0, 0], job.terminal


# -- ranks of headway's own launcher -------------------------------------------------------------


def launched(*arguments: object, entry=entries.exchange, processes: int = 3):
    return launch_local(
        entry,
        arguments,
        processes=processes,
        preload=("support.heartbeat_entries",),
        policy=RestartPolicy(limit=0),
    )


def test_a_frozen_worker_is_named_once_and_ended(tmp_path):
    with pytest.warns(UserWarning, match="share"), pytest.raises(Stalled) as caught:
        launched(str(tmp_path), "stop", 1, 5.0)
    seconds = time.time() - float((tmp_path / "when").read_text())
    assert seconds < LIMIT
    assert str(caught.value).startswith("rank 0, step 8: rank 1 has sent no heartbeat for 5 s")
    for rank in range(3):
        assert not alive(int((tmp_path / f"pid-{rank}").read_text()))


def test_a_killed_worker_is_the_launchers_to_name(tmp_path):
    with (
        pytest.warns(UserWarning, match="share"),
        pytest.raises(WorkerFailed, match="rank 1 was killed by SIG"),
    ):
        launched(str(tmp_path), "slow", 1, 5.0)
    assert time.time() - float((tmp_path / "when").read_text()) < LIMIT


def test_a_stall_says_what_the_missing_rank_does():
    with pytest.raises(Stalled) as caught:
        launched(entry=entries.stalled, processes=2)
    text = str(caught.value)
    assert "the exchange of step 12: rank 1 did not come" in text
    assert re.search(r"rank 1: data of step 12, at .*_entries\.py:\d+ \(\w+\), for \d", text), text


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
