"""single: failure records and root causes, the restart policy, stop requests, torch's errors."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from headway.channel.transport import ChannelTransport
from headway.errors import (
    CheckpointDamaged,
    DocumentError,
    PeerLost,
    PlanError,
    Stalled,
    UsageError,
    WorkerFailed,
)
from headway.launch import local
from headway.launch.agent_processes import SILENT
from headway.launch.restart_policy import AttemptFacts, RestartPolicy, Stop, explain_deaths
from headway.launch.worker import Job, _record_or_print
from headway.run.distributed.failure_record import (
    FailureRecord,
    describe_failure,
    read_failures,
    root_cause,
    summarize_exception,
    write_failure,
)
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World, translate_exception
from headway.run.training.stop_request import StopRequest

RANK_1 = replace(LaunchEnv(), rank=1, ranks=2, attempt=3)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


# -- records -------------------------------------------------------------------------------------


def test_a_record_comes_back_as_the_same_kind_of_error(tmp_path):
    error = CheckpointDamaged(
        "weights.bin is 3 bytes short", where="rank 1, step 17, step-50", why="3", fix="5"
    )
    write_failure(tmp_path, describe_failure(1, 3, raised(error)))
    assert os.listdir(tmp_path / "failures") == ["attempt-3-rank-00001.json"]
    (record,) = read_failures(tmp_path, 3)
    assert read_failures(tmp_path, 0) == []
    assert (record.rank, record.step, record.code, record.exit_code) == (1, 17, "HW-3102", 3)
    again = record.error()
    assert type(again) is CheckpointDamaged
    assert again.where == "rank 1, step 17, step-50"
    assert (again.what, again.why, again.fix) == (error.what, "3", "5")


@pytest.mark.parametrize(
    "error",
    [
        PlanError("no such plan", problems=["a", "b"], where="plan.json"),
        DocumentError("2 problems", where="recipe.toml", problems=["a", "b"]),
    ],
)
def test_lists_of_problems_survive(tmp_path, error):
    write_failure(tmp_path, describe_failure(1, 3, error))
    again = read_failures(tmp_path, 3)[0].error()
    assert type(again) is type(error)
    assert again.problems == ("a", "b")
    assert str(again) == str(error).replace(error.where, f"rank 1, {error.where}")


def test_a_foreign_exception_names_the_users_line():
    error = ValueError("negative")
    record = describe_failure(1, 3, raised(error))
    assert (record.kind, record.exit_code, record.step) == ("WorkerFailed", 3, None)
    assert record.where == "rank 1"
    assert record.why.startswith("ValueError: negative (")
    assert "test_failure.py:" in record.why
    assert record.why.endswith("in raised)")
    assert "raise error" in record.trace


def test_the_line_inside_torch_is_not_the_one_that_is_named():
    def loss():
        return torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError) as caught:
        torch.nn.Sequential().apply(lambda module: loss())
    assert "test_failure.py" in describe_failure(1, 3, caught.value).why


def test_of_a_long_text_the_beginning_is_shown():
    assert summarize_exception(ValueError("too small")) == "ValueError: too small"
    text = summarize_exception(RuntimeError("\n".join(f"kernel {number}" for number in range(40))))
    assert text.splitlines() == [
        "RuntimeError: kernel 0", "  kernel 1", "  kernel 2", "  kernel 3", "  ...",
    ]  # fmt: skip


def test_an_error_of_all_ranks_about_one_of_them_names_that_one():
    error = PlanError("wrong", where="rank 0 of those that share the batch, step 3", problems=["a"])
    record = describe_failure(1, 3, error)
    assert (record.rank, record.step, record.where) == (1, 3, error.where)


def test_where_is_not_said_twice():
    known = WorkerFailed("bad", where="rank 1, step 17")
    record = describe_failure(1, 3, known)
    assert (record.where, record.step) == ("rank 1, step 17", 17)
    record = describe_failure(1, 3, WorkerFailed("bad", where="step 17"))
    assert (record.where, record.step) == ("rank 1, step 17", 17)


def test_the_root_cause_is_the_first_primary_record():
    def record(rank: int, time: float, error: BaseException) -> FailureRecord:
        return replace(describe_failure(1, 3, error), rank=rank, time=time)

    lost = record(0, 1.0, PeerLost("gone"))
    assert lost.secondary
    early, late = record(3, 2.0, ValueError("early")), record(1, 3.0, ValueError("late"))
    twin = record(2, 2.0, ValueError("twin"))
    assert root_cause([late, lost, early]) is early
    assert root_cause([late, early, twin]) is twin
    assert root_cause([lost]) is None
    assert root_cause([]) is None


def test_an_error_that_cannot_be_written_down_is_printed(tmp_path, capsys):
    job = Job(
        entry="", arguments=(), outbox=tmp_path / "gone", directory=None, attempt=0, threads=1,
        environment={},
    )  # fmt: skip
    record = _record_or_print(job, 1, raised(ValueError("negative loss")))
    printed = capsys.readouterr().err
    assert printed.startswith("rank 1: an exception stopped this rank\n  ValueError: negative loss")
    assert printed.endswith(f"{record.trace}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_was_deleted_is_not_made_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_failure(tmp_path / "run", describe_failure(1, 3, WorkerFailed("bad")))
    assert not (tmp_path / "run").exists()


# -- what an attempt leaves ----------------------------------------------------------------------


def ending(outbox, statuses, **notes: str):
    job = Job(
        entry="", arguments=(), outbox=outbox, directory=None, attempt=3, threads=1, environment={}
    )
    for name, text in notes.items():
        (outbox / name.replace("_", "-")).write_text(text)
    return local._ending(job, 2, statuses, {}, None)


@pytest.mark.parametrize("death", ["before", "after", "never"])
def test_silence_is_the_cause_only_where_nobody_had_died(tmp_path, death):
    """After a verdict the silent rank is killed, which is not the cause; before it, it is."""
    record = describe_failure(0, 3, Stalled("rank 1 has sent no heartbeat for 5 s"))
    write_failure(tmp_path, record)
    seconds = {"before": record.time - 1, "after": record.time + 1}
    notes = {"gone_00001": repr(seconds[death])} if death in seconds else {}
    decision = RestartPolicy().decide([ending(tmp_path, {1: -9}, **notes)])
    assert (decision is None) == (death == "before")


def test_a_signal_of_the_agent_after_a_death_does_not_stop_the_job(tmp_path):
    """Rank 1 was killed at its end; the agent sent SIGTERM to rank 0, which was done."""
    facts = ending(tmp_path, {1: -9}, stopped_00000="SIGTERM", result_00000="N.")
    assert facts.stop is None
    assert RestartPolicy().decide([facts]) is None


def test_an_end_without_a_report_is_one_with_status_0(tmp_path):
    assert ending(tmp_path, {1: SILENT}).deaths == {1: 0}


# -- policy --------------------------------------------------------------------------------------


def killed(attempt: int, before: int = -1, after: int = -1) -> AttemptFacts:
    return AttemptFacts(
        attempt=attempt, deaths={1: -9}, progress_before=before, progress_after=after
    )


def test_an_exception_stops_the_job():
    record = describe_failure(1, 3, WorkerFailed("bad", where="step 17"))
    facts = AttemptFacts(attempt=0, records=(record,), deaths={0: -15}, stop="SIGTERM")
    decision = RestartPolicy().decide([facts])
    assert isinstance(decision, Stop)
    assert isinstance(decision.error, WorkerFailed)
    assert decision.error.where == "rank 1, step 17"


def test_a_death_by_a_signal_restarts():
    lost = replace(describe_failure(1, 3, PeerLost("gone")), rank=0)
    for facts, reason in (
        (replace(killed(0), records=(lost,)), "rank 1 was killed by SIGKILL"),
        (AttemptFacts(attempt=0, records=(lost,)), "rank 0 lost its peers"),
        (AttemptFacts(attempt=0, deaths={2: None}), "rank 2 died without a word"),
        (AttemptFacts(attempt=0, deaths={0: -15, 1: -9}), "rank 1 was killed by SIGKILL"),
    ):
        assert RestartPolicy().decide([facts]) is None
        assert explain_deaths(facts) == reason


def test_an_exit_without_a_word_stops():
    decision = RestartPolicy().decide([AttemptFacts(attempt=0, deaths={1: 7})])
    assert isinstance(decision, Stop)
    assert "rank 1: the process ended with exit code 7" in str(decision.error)


def test_what_torch_has_kept_of_an_exception_is_the_error():
    kept = AttemptFacts(attempt=0, deaths={1: 1}, messages={1: "OSError: no space"})
    decision = RestartPolicy().decide([kept])
    assert isinstance(decision, Stop)
    assert str(decision.error).splitlines()[:2] == [
        "rank 1: the process ended with exit code 1 outside of the training",
        "  OSError: no space",
    ]


def test_a_request_to_stop_is_no_error():
    decision = RestartPolicy().decide([AttemptFacts(attempt=0, stop="SIGINT", deaths={1: -9})])
    assert decision == Stop()


def test_restarts_without_progress_are_limited_and_progress_starts_anew():
    policy = RestartPolicy(limit=2)
    fruitless = [killed(0), killed(1)]
    assert policy.decide(fruitless) is None
    assert isinstance(policy.decide([*fruitless, killed(2)]), Stop)
    fruitful = [*fruitless, killed(2, -1, 50), killed(3, 50, 50)]
    assert policy.decide(fruitful) is None
    decision = policy.decide([*fruitful, killed(4, 50, 50)])
    assert isinstance(decision, Stop)
    assert isinstance(decision.error, WorkerFailed)
    assert "2 restarts in a row brought no new checkpoint (newest: step 50)" in str(decision.error)


def test_limit_0_never_restarts():
    assert isinstance(RestartPolicy(limit=0).decide([killed(0, -1, 50)]), Stop)


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_becomes_a_request_and_handlers_return(name):
    number = signal.Signals[name]
    inherited = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, rightly
    try:
        with StopRequest() as stop:
            assert stop.requested is None
            os.kill(os.getpid(), number)
            assert stop.requested == name
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_a_second_interrupt_is_at_once_but_its_echo_is_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("headway.run.training.stop_request.monotonic", lambda: now[0])
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        now[0] += 0.1
        signal.raise_signal(signal.SIGINT)
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGINT"


def test_sigterm_may_come_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("headway.run.training.stop_request.monotonic", lambda: now[0])
    with StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            now[0] += 5
        assert stop.requested == "SIGTERM"


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_inert_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body():
        with StopRequest() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# -- world ---------------------------------------------------------------------------------------


GLOO_CLOSED = "[/build/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
GLOO_LATE = "[/build/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"
NCCL_LATE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 60000 ms"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (GLOO_CLOSED, PeerLost),
        ("[../gloo/pair.cc:1] Read error [10.0.0.1]:1: Connection reset by peer", PeerLost),
        ("[../gloo/pair.cc:1] writev [10.0.0.1]:1: Broken pipe", PeerLost),
        ("Gloo connectFullMesh failed with [..]", PeerLost),
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error", PeerLost),
        (GLOO_LATE, Stalled),
        (NCCL_LATE, Stalled),
        ("wait timeout after 300000ms, keys: /x", Stalled),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", None),
        ("DataLoader timed out after 5 seconds", None),
        ("[gloo/pair.cc:1] Received data size doesn't match expected size", None),
    ],
)
def test_what_torch_says_about_other_ranks(text, kind):
    world = World(place=LaunchEnv(), device=torch.device("cpu"), timeout_seconds=7)
    error = translate_exception(RuntimeError(text), world, "the exchange of step 3")
    assert type(error) is (kind or type(None))
    if error is not None:
        assert "the exchange of step 3" in error.what
    if kind is PeerLost:
        assert "[../" not in error.why
        assert "/build" not in error.why


@pytest.mark.parametrize("kind", [PeerLost, Stalled])
def test_what_a_channel_says_of_the_rank_at_its_other_end(kind):
    world = World(place=LaunchEnv(), device=torch.device("cpu"), timeout_seconds=7)
    transport = Mock(spec=ChannelTransport, peer="rank 1", provider="shared_memory")
    said = {
        PeerLost: ChannelTransport.lost(transport, "vanished"),
        Stalled: ChannelTransport.late(transport, "put a tensor", 7),
    }
    with (
        pytest.raises(kind, match="the exchange of step 3"),
        world.explained("the exchange of step 3"),
    ):
        raise said[kind]


def test_torchs_own_network_errors_mean_a_lost_peer():
    world = World(place=LaunchEnv(), device=torch.device("cpu"))
    assert isinstance(translate_exception(dist.DistNetworkError("eof"), world, "x"), PeerLost)


def test_other_errors_pass_the_explanation_unchanged():
    world = World(place=LaunchEnv(), device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="shapes"), world.explained("x"):
        raise RuntimeError("shapes")
    with pytest.raises(PeerLost) as caught, world.explained("the tally"):
        raise RuntimeError(GLOO_CLOSED)
    assert caught.value.what == "another rank vanished during the tally"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_world_of_one_has_no_group():
    with World.join(LaunchEnv()) as world:
        assert (world.rank, world.ranks, world.backend) == (0, 1, "none")
        assert world.side_group is None
        assert not dist.is_initialized()
        world.barrier("nothing")
    world.leave()


def test_devices_are_checked(monkeypatch):
    assert World.join(LaunchEnv(), device="cpu").device == torch.device("cpu")
    with pytest.raises(UsageError, match="no device 'gpu'"):
        World.join(LaunchEnv(), device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert World.join(LaunchEnv(), device="auto").device == torch.device("cpu")
    with pytest.raises(UsageError, match="torch sees 0"):
        World.join(LaunchEnv(), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = replace(LaunchEnv(), local_rank=1, local_ranks=2)
    assert World.join(second, device="auto").device == torch.device("cuda", 1)
    third = replace(LaunchEnv(), local_rank=2, local_ranks=3)
    assert World.join(third, device="auto").device == torch.device("cpu")
