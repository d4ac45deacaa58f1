"""single: what torch's agent is given in place of multiprocessing's own queues and events."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from headway.launch.agent_processes import (
    SILENT,
    OneShotEvent,
    ReturnQueue,
    WorkerProcess,
    _signals_deferred,
    process_state,
)
from headway.launch.worker import guarded_pids, noted_pids
from support.patience import patient

FORK = multiprocessing.get_context("fork")


def test_an_announcement_does_not_wait_for_who_was_stopped_or_killed_while_he_waited():
    """The event of multiprocessing waits for all who wait for it (torch says so, too)."""
    event = OneShotEvent()
    waiting = [FORK.Process(target=event.wait) for _ in range(3)]
    for process, number in zip(waiting, (signal.SIGSTOP, signal.SIGKILL, 0), strict=True):
        process.start()
        while process_state(process.pid) != "S":  # it waits
            pass
        os.kill(process.pid, number)
    waiting[1].join(patient(5))
    while process_state(waiting[0].pid) != "T":
        pass
    setter = threading.Thread(target=event.set, daemon=True)
    setter.start()
    setter.join(patient(5))
    assert not setter.is_alive()
    os.kill(waiting[0].pid, signal.SIGCONT)
    for process, status in zip(waiting, (0, -signal.SIGKILL, 0), strict=True):
        process.join(patient(5))
        assert process.exitcode == status


def test_a_value_is_there_once_it_was_put():
    queue = ReturnQueue()
    assert queue.empty()
    child = FORK.Process(target=queue.put, args=({"rank": 3},))
    child.start()
    assert queue.get() == {"rank": 3}
    assert queue.empty()
    child.join()


def test_neither_makes_a_file_in_shared_memory():
    """Locks of multiprocessing do, which stay if all processes are killed at once."""
    folder = Path("/dev/shm")
    if not folder.exists():
        pytest.skip("there is no /dev/shm")
    before = set(folder.glob("sem.mp-*"))
    held = ReturnQueue(), OneShotEvent()
    assert set(folder.glob("sem.mp-*")) <= before
    del held


@pytest.mark.parametrize(("reported", "status"), [(True, 0), (False, SILENT)])
def test_an_end_without_a_report_is_no_success(reported, status):
    worker = WorkerProcess(FORK.Process(target=int), lambda pid: reported, nullcontext)
    assert worker.exitcode is None
    worker.start()
    worker.join()
    assert worker.exitcode == status
    assert worker.wait(0)
    worker.close()


class Told(Exception):
    pass


@contextmanager
def signalled():
    yield
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def failing():
    yield
    raise Told


@pytest.mark.parametrize("starting", [signalled, failing])
def test_a_process_whose_start_is_interrupted_can_be_ended(starting):
    def tell(*_):
        raise Told

    before = signal.signal(signal.SIGTERM, tell)
    worker = WorkerProcess(FORK.Process(target=signal.pause), bool, starting)
    try:
        with pytest.raises(Told):
            worker.start()
        assert not worker.wait(0)
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(patient(5))
    finally:
        signal.signal(signal.SIGTERM, before)
        worker.kill()
        worker.join()
        worker.close()


def test_a_signal_in_the_middle_of_a_start_comes_at_its_end():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with _signals_deferred():
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_guardian_stands_for_a_worker_until_it_is_free(tmp_path: Path) -> None:
    for name, content in {
        "guardian-00000": "10",
        "pid-00000": "11",
        "guardian-00001": "20",
    }.items():
        (tmp_path / name).write_text(content)
    assert guarded_pids(tmp_path) == {10: 11}
    assert noted_pids(tmp_path) == {0: 10, 1: 20}
    (tmp_path / "free-00000").touch()
    assert guarded_pids(tmp_path) == {}
