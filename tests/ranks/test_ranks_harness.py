"""ranks: the harness itself: values come back, and every way to fail is named within seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.patience import patient
from support.ranks import RanksFailed, ranks, run_ranks

TESTS = Path(__file__).parent.parent


@ranks(4)
def test_four_ranks_add_up(world):
    ones = torch.ones(3, dtype=torch.float64)
    dist.all_reduce(ones, group=world.group)
    assert ones.tolist() == [4.0, 4.0, 4.0]
    assert world.size == dist.get_world_size() == 4
    assert world.rank == dist.get_rank()


def each_has_its_number(results):
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(torch.equal(values, torch.arange(rank + 1)) for rank, values, _ in results)
    assert len({size for _, _, size in results}) == 1


@pytest.mark.parametrize("factor", [1, 2])
@ranks(3, check=each_has_its_number)
def test_fixtures_reach_the_body_and_values_come_back(world, factor, tmp_path):
    assert factor in (1, 2)
    assert tmp_path.is_dir()
    return world.rank, torch.arange(world.rank + 1), factor


@ranks(2)
def test_ranks_compute_on_one_thread(world):
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


@ranks(2)
def test_ranks_share_a_directory(world):
    (world.directory / str(world.rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in world.directory.iterdir()) == ["0", "1"]


def environment(world):
    return os.environ["HEADWAY_TEST_WORD"], os.getcwd()


def test_variables_and_directory_of_the_test_reach_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_TEST_WORD", "fjord")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, environment) == [("fjord", str(tmp_path))] * 2


def write_line(world):
    print(f"line of {world.rank}")


def test_output_of_the_ranks_is_shown_in_order(capsys):
    run_ranks(2, write_line)
    assert capsys.readouterr().out == "line of 0\nline of 1\n"


def skip_on_one(world):
    if world.rank == 1:
        pytest.skip("no such hardware")


def test_a_rank_can_skip():
    with pytest.raises(pytest.skip.Exception, match="rank 1: no such hardware"):
        run_ranks(2, skip_on_one)


def fail_on_one(world, number):
    if world.rank == 1:
        guess = number + 1
        assert guess == number, "wrong guess"
    dist.barrier()


def test_a_failing_rank_is_named_with_its_traceback_and_variables():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, fail_on_one, 41)
    text = str(caught.value)
    assert text.startswith("rank 1 raised, ")
    assert text.index("rank 1 of 3 raised") < text.index("rank 0 of 3 raised")
    assert "AssertionError: wrong guess" in text
    assert "guess = 42" in text
    assert "in fail_on_one" in text


def hang_on_one(world):
    print("before the wait")
    if world.rank == 1:
        time.sleep(60)
    dist.barrier()


@pytest.mark.slow
def test_a_hanging_rank_times_out_with_the_stacks_of_all():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, hang_on_one, timeout=3)
    assert 3 <= time.monotonic() - start < patient(20)
    text = str(caught.value)
    late = r"did not end within [\d.]+ s"  # 3 s, more on a slow machine
    assert re.match(rf"rank 0 {late}, rank 1 {late}", text)
    assert text.count("in hang_on_one") == 2
    assert "in barrier" in text
    assert "before the wait" in text


def kill_one(world, number):
    if world.rank == 1:
        os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_at_once(number):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, kill_one, number, timeout=30)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert text.startswith(f"rank 1 was killed by {signal.Signals(number).name}")
    assert "rank 0 still ran 1 s after the first failure" in text
    assert "in kill_one" in text


def leave_abruptly(world):
    os._exit(7)


def test_a_rank_that_exits_without_a_result_is_named():
    with pytest.raises(RanksFailed, match="rank 0 exited with code 7 without a result"):
        run_ranks(1, leave_abruptly)


def die_as_planned(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.rank


def test_a_mortal_rank_may_be_killed():
    assert run_ranks(3, die_as_planned, mortal={1}) == [0, None, 2]


def warn(world):
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error():
    with pytest.raises(RanksFailed, match="DeprecationWarning: old"):
        run_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:old")
def test_a_warning_that_the_test_ignores_is_ignored_on_the_ranks():
    assert run_ranks(1, warn) == [None]


def leave_a_thread(world):
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="left over").start()


def test_a_rank_that_leaves_a_thread_fails():
    with pytest.raises(RanksFailed, match="left behind: thread left over"):
        run_ranks(1, leave_a_thread)


def return_unpicklable(world):
    return lambda: 0


def test_a_result_that_does_not_pickle_is_named():
    with pytest.raises(RanksFailed, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(1, return_unpicklable)


@ranks(1)
def forgotten_check(world):
    return 1


def test_values_without_a_check_are_an_error():
    with pytest.raises(pytest.fail.Exception, match="nobody looks at"):
        forgotten_check()


def tell_and_wait(world, path):
    (path / f"{world.rank}.early").write_text(str(os.getpid()))
    (path / f"{world.rank}.early").rename(path / str(world.rank))
    time.sleep(60)


OWNER = """
import pathlib, sys
from support.ranks import run_ranks
sys.path.insert(0, sys.argv[2])
from test_ranks_harness import tell_and_wait
run_ranks(2, tell_and_wait, pathlib.Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_no_rank_survives_a_killed_pytest(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(Path(__file__).parent)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() for file in files), 120)
    pids = [int(file.read_text()) for file in files]
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)


def wait_until(condition, patience):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
