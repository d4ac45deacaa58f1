"""ranks: workers started by `launch`, worlds joined under the real torchrun, real kills."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.errors import DataError, Stalled, UsageError, WorkerFailed
from headway.launch.agent_processes import WorkerProcess, Workers
from headway.launch.forkserver import forkserver_status
from headway.launch.local import launch_local
from headway.launch.restart_policy import RestartPolicy
from headway.launch.worker import run_rank_here
from headway.run.distributed.failure_record import read_failures
from headway.run.distributed.launch_env import LaunchEnv
from support import launch_entries as entries
from support.patience import patient
from support.ports import free_port
from support.sampling import sampled

PRELOAD = ("pytest", "support.launch_entries")
SUPPORT = Path(entries.__file__).parent
PATIENCE = 90.0


def launch(entry, *arguments, processes=2, **options):
    return launch_local(entry, arguments, processes=processes, preload=PRELOAD, **options)


# -- results -------------------------------------------------------------------------------------


def test_results_come_back_by_rank_and_nothing_stays_changed(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_TEST_SEEN", "set after the forkserver started")
    monkeypatch.setenv("RANK_OF_NOTHING", "1")
    get_temp_dir()  # multiprocessing's own, which stays until the end of the process
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    before = dict(os.environ)
    result = launch(entries.answer, 3, threads=1)
    assert dict(os.environ) == before
    assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert list(tmp_path.iterdir()) == []
    assert (result.stopped_by, result.attempts) == (None, 1)
    for rank, seen in enumerate(result.results):
        assert seen["rank"] == rank
        assert seen["total"] == (3 + 4) * 2
        assert seen["launcher"] == "headway"
        assert seen["threads"] == 1
        assert seen["seen"] == "set after the forkserver started"
        assert seen["death_signal"] == signal.SIGKILL  # of the forkserver; torch asks for SIGINT
        assert seen["collector"] == (True, True)  # on, and what was imported is left alone
        assert_gone(seen["pid"])


def test_one_process_makes_no_group():
    assert launch(entries.alone, processes=1).results == [(1, False)]


def test_worlds_can_follow_each_other_in_one_process():
    assert launch(entries.twice).results == [[1.0, 1.0, 1.0]] * 2


def test_processes_are_checked():
    with pytest.raises(UsageError, match="cannot start 0 processes"):
        launch(entries.alone, processes=0)


def test_more_processes_than_cores_is_a_warning(monkeypatch):
    monkeypatch.setattr("headway.launch.preflight.cores", lambda: 1)
    with pytest.warns(UserWarning, match="2 processes share 1 CPU cores"):
        launch(entries.answer, 0)


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "where", "text"),
    [
        ("value", WorkerFailed, "rank 1", "ValueError: negative loss value"),
        ("data", DataError, "rank 1, train.npy", "Copy it again"),
        ("exit", WorkerFailed, "rank 1", "sys.exit(7)"),
        ("_exit", WorkerFailed, "rank 1", "the code called os._exit(0)\n  Called at "),
        ("busy", WorkerFailed, "rank 1", "negative loss busy"),
    ],
)
def test_an_exception_in_one_rank_stops_all_with_its_place(tmp_path, how, kind, where, text):
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        launch(entries.fail, str(tmp_path), how, directory=tmp_path)
    assert time.monotonic() - start < 25  # the agent kills those that wait after 30 s
    assert caught.value.where == where
    assert text in str(caught.value)
    for rank in range(2):
        assert_gone(int((tmp_path / f"pid-{rank}").read_text()))
    primary = [record for record in read_failures(tmp_path, 0) if not record.secondary]
    assert [record.rank for record in primary] == [1]
    assert "launch_entries.py" in primary[0].trace + primary[0].why or how == "exit"


def test_a_worker_that_cannot_begin_says_why():
    with pytest.raises(WorkerFailed, match="FileNotFoundError: no such namespace"):
        launch(entries.alone, emulated=entries.NoNode())


def test_what_torch_kept_of_an_exception_is_shown(monkeypatch):
    monkeypatch.setattr("headway.launch.local.run_worker", entries.fail_outside)
    with pytest.raises(WorkerFailed, match="exit code 1 outside of the training") as caught:
        launch(entries.alone)
    assert "BrokenPipeError: nobody reads this\n  File " in str(caught.value)
    assert "in fail_outside" in str(caught.value)


def test_an_end_with_status_0_that_python_does_not_see_is_no_kill():
    with pytest.raises(WorkerFailed, match="ended with exit code 0 and left no error") as caught:
        launch(entries.leave_by_c, on_restart=lambda *_: pytest.fail("restarted"))
    assert caught.value.where == "rank 1"


def test_ranks_that_all_end_so_are_not_waited_for():
    with pytest.raises(WorkerFailed, match="ended with exit code 0 and left no error"):
        launch(entries.all_leave_by_c, on_restart=lambda *_: pytest.fail("restarted"))


def test_collectives_that_differ_are_named_after_one_restart():
    restarts: list[str] = []
    with pytest.raises(WorkerFailed) as caught:
        launch(entries.differ, "shape", on_restart=lambda _, why: restarts.append(why))
    assert "the ranks call different collectives: rank 0 calls allreduce of Float[1000], " in str(
        caught.value
    )
    assert "rank 1 calls allreduce of Float[4000]" in str(caught.value)
    assert "(number 3 of their group)" in str(caught.value)
    assert restarts
    assert "SIGABRT" in restarts[0]
    assert len(restarts) == 1


def test_with_the_debug_level_collectives_are_compared_at_once(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(WorkerFailed, match=r"rank 0 calls allreduce .*, rank 1 calls broadcast "):
        launch(entries.differ, "operation", on_restart=lambda *_: pytest.fail("restarted"))


def test_an_error_on_all_ranks_is_raised_once_and_not_retried():
    with pytest.raises(UsageError, match="asked for something impossible"):
        launch(entries.usage)


def test_a_rank_that_does_not_arrive_is_named():
    with pytest.raises(Stalled, match="rank 1 did not arrive"):
        launch(entries.late)


def test_a_rank_that_does_not_come_to_an_exchange_is_named():
    with pytest.raises(Stalled, match="exchange of step 2: rank 1 did not come") as caught:
        launch(entries.hang)
    assert caught.value.where == "rank 0"


# -- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", sampled([0, 1], 1))
def test_a_killed_worker_is_replaced(tmp_path, victim):
    told: list[tuple[int, str]] = []
    result = launch(
        entries.kill_once,
        str(tmp_path),
        1,
        victim,
        directory=tmp_path,
        on_restart=lambda attempt, reason: told.append((attempt, reason)),
    )
    assert result.attempts == 2
    assert [seen["attempt"] for seen in result.results] == [1, 1]
    assert told == [(1, f"rank {victim} was killed by SIGKILL")]
    recovery = result.results[0]["first"] - float((tmp_path / "killed").read_text())
    print(f"from the kill to the first exchange of the next attempt: {recovery:.2f} s")
    assert recovery < 15  # 0.6 s on two idle cores; the tests may share them


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_before_a_worker_has_read_what_to_do(monkeypatch, tmp_path, victim):
    """multiprocessing finds a closed pipe where it sends the worker its arguments.

    The worker that was there already is stopped by a signal, for which nobody has asked.
    """
    start, made, told = WorkerProcess.start, [], []

    def start_or_not(worker):
        made.append(worker)
        if len(made) - 1 == victim:
            while victim == 1 and not (tmp_path / "ready-0").exists():
                time.sleep(0.01)
            raise BrokenPipeError
        start(worker)

    monkeypatch.setattr(WorkerProcess, "start", start_or_not)
    monkeypatch.setattr("headway.launch.local._DEATH_SECONDS", 0.1)
    result = launch(
        entries.stop_first_attempt, str(tmp_path), on_restart=lambda *words: told.append(words)
    )
    assert told == [(1, "a worker was killed before it began")]
    assert (result.results, result.stopped_by) == ([1, 1], None)


def test_a_signal_while_the_agent_makes_its_files_leaves_none(monkeypatch, tmp_path):
    """Files for tracebacks, which torch makes and deletes before it starts a worker."""
    get_temp_dir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def interrupted(path):
        made.append(path)
        raise KeyboardInterrupt

    torch = importlib.import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(torch, "os", SimpleNamespace(unlink=interrupted, environ=os.environ))
    assert launch(entries.alone).stopped_by == "SIGINT"
    assert made
    assert "pytorch-errorfile-" in made[0]
    assert list(tmp_path.iterdir()) == []
    assert tempfile.gettempdir() == str(tmp_path)


def test_a_second_signal_while_the_first_one_is_put_in_order(monkeypatch):
    ended = Workers.end_stopped_workers

    @contextmanager
    def interrupted(self, seconds):
        with ended(self, seconds):
            yield
        # By the handler that torch has set, and not in the agent any more.
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Workers, "end_stopped_workers", interrupted)
    assert launch(entries.alone).stopped_by == "SIGINT"


@pytest.mark.slow
def test_a_kill_of_the_forkserver_ends_its_workers_and_restarts_all(tmp_path):
    told: list[tuple[int, str]] = []
    result = launch(
        entries.forkserver_killed, str(tmp_path), on_restart=lambda *words: told.append(words)
    )
    assert result.results == [1, 1]
    assert told == [(1, "the process that forks the workers was killed")]
    for path in tmp_path.glob("pid-*"):
        assert_gone(int(path.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("before_the_next", [True, False])
def test_a_kill_of_the_forkserver_while_workers_are_born(monkeypatch, tmp_path, before_the_next):
    """multiprocessing starts another one, of which the later workers are born."""
    start, made, told = WorkerProcess.start, [], []

    def start_and_wait(worker):
        start(worker)
        made.append(worker)
        while before_the_next and len(made) == 1 and forkserver_status() is None:
            time.sleep(0.001)

    monkeypatch.setattr(WorkerProcess, "start", start_and_wait)
    result = launch(
        entries.note_attempt,
        entries.ForkserverKilledOnArrival(tmp_path),
        on_restart=lambda *words: told.append(words),
    )
    assert told == [(1, "the process that forks the workers was killed")]
    assert result.results == [1, 1]
    # No signal had been chosen yet for the death of its parent.
    assert_gone(int((tmp_path / "orphan").read_text()))


def test_a_worker_that_stands_still_where_no_heartbeat_runs_is_named(monkeypatch):
    monkeypatch.setattr("headway.launch.agent_processes._LOOK_SECONDS", 0.1)
    with pytest.raises(Stalled, match="rank 1 has stood still for 0 s"):
        launch(entries.stand_still, stopped_seconds=0.2)


@pytest.mark.slow
def test_restarts_without_progress_are_limited(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL") as caught:
        launch(entries.kill_once, str(tmp_path), 9, policy=RestartPolicy(limit=1))
    assert "1 restarts in a row brought no new checkpoint (newest: none)" in str(caught.value)
    assert caught.value.where == "attempt 1"


# -- signals to the launcher ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(["SIGTERM", "SIGINT"], 1))
def test_a_signal_to_the_launcher_stops_the_workers_in_order(tmp_path, name):
    with program("until_stopped", tmp_path) as launcher:
        pids = ready(tmp_path)
        launcher.send_signal(signal.Signals[name])
        output, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, errors
    assert output.strip() == f"{name} ['{name}', '{name}'] killed []"
    assert errors == ""
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)] == [name, name]
    assert_gone(*pids)


@pytest.mark.slow
def test_workers_that_do_not_stop_are_killed(tmp_path):
    with program("deaf", tmp_path) as launcher:
        pids = ready(tmp_path)
        start = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output, errors = launcher.communicate(timeout=PATIENCE)
    assert 2 < time.monotonic() - start < 45  # they would end by themselves after 60 s
    assert output.strip() == "SIGTERM [None, None] killed [0, 1]", errors
    assert_gone(*pids)


@pytest.mark.parametrize("with_its_workers", [False, True])
def test_nothing_survives_the_launcher(tmp_path, with_its_workers):
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as temporary,
        program("deaf", tmp_path, temporary) as launcher,
    ):
        pids = ready(tmp_path)
        assert len(own_files(Path(temporary))) == 1  # beside torch's cache, which stays
        launcher.kill()
        for pid in pids if with_its_workers else ():
            os.kill(pid, signal.SIGKILL)
        launcher.communicate(timeout=PATIENCE)
        assert_gone(*pids, seconds=5)
        assert_empty(Path(temporary))


# -- in a world that torchrun made ---------------------------------------------------------------


@pytest.mark.slow
def test_joins_and_restarts_under_torchrun(tmp_path):
    """Plain torchrun fails here (torch 2.13): a restart meets the addresses of dead processes."""
    with torchrun(tmp_path, "--standalone", "--nproc-per-node=2", "kill") as agent:
        _, errors = agent.communicate(timeout=PATIENCE * 2)
    assert agent.returncode == 0, errors
    assert (tmp_path / "killed").read_text() == "0"
    seen = [(tmp_path / f"done-{rank}").read_text() for rank in range(2)]
    assert seen == ["2 3.0 1 True"] * 2


@pytest.mark.slow
def test_joins_and_restarts_under_two_agents(tmp_path):
    """The agents count restarts differently (only one has lost a worker): all ranks agree on 1."""
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    options = (endpoint, "--rdzv-backend=c10d", "--rdzv-id=7", "--nnodes=2", "--nproc-per-node=1")
    with torchrun(tmp_path, *options, "kill") as first, torchrun(tmp_path, *options, "kill") as two:
        errors = [agent.communicate(timeout=PATIENCE * 2)[1] for agent in (first, two)]
    assert [first.returncode, two.returncode] == [0, 0], errors
    assert (tmp_path / "killed").exists()
    seen = [(tmp_path / f"done-{rank}").read_text() for rank in range(2)]
    assert seen == ["2 3.0 1 True"] * 2


def test_a_failure_in_a_found_world_is_told_recorded_and_ends_the_process(tmp_path, monkeypatch):
    told, ended, before = [], [], signal.getsignal(signal.SIGTERM)

    def tell(error):
        # torchrun sends it when another rank has ended before this one has said why.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        told.append(error)

    def end(status):
        ended.append(status)
        raise InterruptedError

    monkeypatch.setattr("headway.launch.worker.end_process", end)
    with pytest.raises(InterruptedError):
        run_rank_here(entries.usage, (), place=LaunchEnv(), directory=tmp_path, tell=tell)
    assert ended == [1]
    assert signal.getsignal(signal.SIGTERM) is before
    assert [error.what for error in told] == ["asked for something impossible"]
    assert [record.kind for record in read_failures(tmp_path, 0)] == ["UsageError"]


# -- helpers -------------------------------------------------------------------------------------


class program:  # noqa: N801  # reads as a function
    """A child process that is killed, with its pipes closed, when the test is done with it."""

    def __init__(self, entry: str, folder: Path, temporary: str = "") -> None:
        self._command = [sys.executable, str(SUPPORT / "launch_program.py"), entry, str(folder)]
        # Else longer than a Unix socket's name may be.
        self._temporary = Path(temporary or folder / ("temporary" * 6))

    def __enter__(self) -> subprocess.Popen[str]:
        self._temporary.mkdir(exist_ok=True)
        own = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=own | {"TMPDIR": str(self._temporary)},
        )
        return self._process

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


class torchrun(program):  # noqa: N801
    """The real torchrun with `launch_entries.py FOLDER ...`."""

    def __init__(self, folder: Path, *options: str) -> None:
        *flags, mode = options
        script = [str(SUPPORT / "launch_entries.py"), str(folder), mode]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2"]
        self._command = [*launcher, "--monitor-interval=0.1", *flags, *script]
        self._temporary = folder / "temporary"


def ready(folder: Path) -> list[int]:
    """The process ids of both workers, once they are at work."""
    deadline = time.monotonic() + PATIENCE
    files = [folder / f"ready-{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def assert_empty(folder: Path, seconds: float = 10.0) -> None:
    """The forkserver ends last, and removes what is left."""
    deadline = time.monotonic() + patient(seconds)
    while own_files(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert own_files(folder) == []


def own_files(folder: Path) -> list[Path]:
    return [*folder.glob("pymp-*"), *folder.glob("headway-*")]


def assert_gone(*pids: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    alive = set(pids)
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if running(pid)}
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive, f"still running after {seconds} s: {alive}"


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
