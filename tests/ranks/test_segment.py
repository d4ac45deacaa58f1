"""ranks: `headway segment`: processes, files, deaths, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from headway.floodfill.array_files import open_array
from support.bubbles import bubbles, write_brightness_weights
from support.commands import HEADWAY, environment, headway, headway_here, none_left, warm_variables
from support.open_ports import descendants
from support.patience import patient

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

SHAPE = (40, 44, 48)
OPTIONS = ("--fov", "9,9,9", "--deltas", "3,3,3", "--min-size", "20", "--weights", "w.safetensors")


@pytest.fixture
def volume(tmp_path) -> Path:
    np.save(tmp_path / "balls.npy", bubbles(SHAPE, 30))
    write_brightness_weights(tmp_path / "w.safetensors")
    return tmp_path


def segmented(folder: Path, out: str, *more: str) -> tuple[np.ndarray, dict]:
    words = ("segment", "balls.npy", "--out", out, "--json", *OPTIONS, *more)
    done = headway_here(*words, cwd=folder)
    assert done.code == 0, done.err
    prefix, name = ("precomputed:", out[12:]) if out.startswith("precomputed:") else ("", out)
    return np.asarray(open_array(f"{prefix}{folder / name}")[:]), json.loads(done.out)


def test_any_number_of_processes_writes_the_same_volume(volume):
    one, facts = segmented(volume, "one.npy")
    two, split = segmented(volume, "two.h5", "-n", "2")
    assert (one == two).all()
    assert facts["objects"] == split["objects"] == one.max() > 5
    assert facts["moves"] == split["moves"]
    assert facts["in_vain"] == 0
    assert not list(volume.glob("*.work"))
    assert none_left(volume)


def test_sub_volumes_are_put_together_for_any_number_of_processes(volume):
    cut = ("--subvolume", "28,44,30", "--overlap", "12,12,12")
    one, facts = segmented(volume, "one.h5", *cut)
    two, split = segmented(volume, "precomputed:two", *cut, "-n", "2")
    three, _ = segmented(volume, "three.npy", *cut, "-n", "3")
    assert (one == two).all()
    assert (one == three).all()
    assert facts["moves"] == split["moves"]
    assert set(np.unique(one)) == set(range(facts["objects"] + 1))
    # Nobody's voxels are lost where the volume is cut.
    whole, _ = segmented(volume, "whole.npy")
    assert np.count_nonzero(one) > 0.9 * np.count_nonzero(whole)


def test_zarr(volume):
    # In processes of their own: zarr's threads never end.
    one, _ = segmented(volume, "one.npy")
    for words in (
        ("segment", "balls.npy", "--out", "ids.zarr", *OPTIONS),
        ("evaluate", "ids.zarr", "one.npy", "--dust", "0", "--json"),
    ):
        done = headway(*words, cwd=volume)
        assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["split"], facts["merge"], facts["coverage"]) == (0, 0, 1)
    assert facts["bodies"] == one.max()


# -- deaths ---------------------------------------------------------------------------------------


@pytest.fixture
def long_job(tmp_path):
    """Starts a segmentation by two processes that takes a second and more."""
    np.save(tmp_path / "balls.npy", bubbles(SHAPE, 60))
    write_brightness_weights(tmp_path / "w.safetensors", features=12, depth=3)
    jobs = []

    def begin(out: str, *more: str) -> subprocess.Popen[str]:
        words = ("segment", "balls.npy", "--out", out, *OPTIONS, "-n", "2", *more)
        jobs.append(
            subprocess.Popen(
                [*HEADWAY, *words], cwd=tmp_path, env=environment(**warm_variables()), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def wait_until_settled(folder: Path, seeds: int, job: subprocess.Popen[str]) -> None:
    counts = folder / "ledger-00000" / "counts.npy"
    deadline = time.monotonic() + patient(90)
    while not counts.exists() or np.load(counts)[0] < seeds:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(job: subprocess.Popen[str]) -> list[int]:
    def parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return job.pid  # it has just ended

    return sorted(pid for pid in descendants(job.pid)[1:] if parent(pid) != job.pid)


def finish(job: subprocess.Popen[str]) -> str:
    _, err = job.communicate(timeout=patient(120))
    assert job.returncode == 0, err
    return err


@pytest.mark.parametrize("cut", [(), ("--subvolume", "40,44,30", "--overlap", "12,12,12")])
def test_after_a_death_and_after_the_death_of_all_the_result_is_the_same(cut, long_job, tmp_path):
    whole, _ = segmented(tmp_path, "whole.npy", *cut)
    job = long_job("killed.npy", *cut)
    work = tmp_path / "killed.npy.work"
    wait_until_settled(work, 3, job)
    os.kill(workers_of(job)[-1], signal.SIGKILL)
    wait_until_settled(work, 6, job)
    # Now everybody: the command and its workers.
    for pid in [job.pid, *descendants(job.pid)]:
        os.kill(pid, signal.SIGKILL)
    job.communicate()
    before = int(np.load(work / "ledger-00000" / "counts.npy")[0])
    assert not (tmp_path / "killed.npy").exists()
    again = long_job("killed.npy", *cut)
    err = finish(again)
    assert before >= 6
    assert "killed by SIGKILL" not in err
    assert (whole == np.load(tmp_path / "killed.npy")).all()
    assert whole.max() > 5


def test_deaths_between_which_seeds_are_settled_do_not_add_up(long_job, tmp_path):
    job = long_job("out.npy", "--restarts", "1")
    counts = tmp_path / "out.npy.work" / "ledger-00000" / "counts.npy"
    wait_until_settled(tmp_path / "out.npy.work", 1, job)
    for _ in range(2):
        wait_until_settled(tmp_path / "out.npy.work", int(np.load(counts)[0]) + 1, job)
        workers = workers_of(job)
        os.kill(workers[-1], signal.SIGKILL)
        # What the other one settles until it is ended is not of the next attempt.
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            time.sleep(0.01)
    assert "killed by SIGKILL" in finish(job)


def test_after_too_many_deaths_it_says_how_to_go_on(long_job, tmp_path):
    job = long_job("out.npy", "--restarts", "0")
    wait_until_settled(tmp_path / "out.npy.work", 2, job)
    os.kill(workers_of(job)[-1], signal.SIGKILL)
    _, err = job.communicate(timeout=patient(60))
    assert job.returncode > 0
    assert "a smaller --subvolume or fewer processes; the same command goes on" in err


def test_a_signal_ends_it_in_order(long_job, tmp_path):
    job = long_job("out.npy")
    wait_until_settled(tmp_path / "out.npy.work", 2, job)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=patient(60))
    assert job.returncode == 128 + signal.SIGTERM, err
    assert "the same command goes on" in err
    assert none_left(tmp_path)
    words = ("segment", "balls.npy", "--out", "out.npy", *OPTIONS, "--move", "0.8")
    other = headway_here(*words, cwd=tmp_path)
    assert other.code == 1
    assert "was begun with other options" in other.err


def test_a_second_command_for_the_same_result_is_refused(long_job, tmp_path):
    job = long_job("out.npy")
    wait_until_settled(tmp_path / "out.npy.work", 1, job)
    words = ("segment", "balls.npy", "--out", "out.npy", *OPTIONS)
    other = headway_here(*words, cwd=tmp_path)
    assert other.code == 1
    assert "another command is at work on this result" in other.err
    finish(job)
    assert (tmp_path / "out.npy").exists()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("balls.npy", "--out", "balls.npy"), "exists already"),
        (("balls.npy", "--out", "out.tif"), "not written"),
        (("none.npy", "--out", "out.npy"), "No such file"),
        (("balls.npy", "--out", "out.npy", "--fov", "9,9"), "--fov"),
        (("balls.npy", "--out", "out.npy", "--deltas", "3,-3,3"), "--deltas: three whole numbers"),
        (("balls.npy", "--out", "out.npy", "--deltas", "3,3,5"), "half of its size at most"),
        (("balls.npy", "--out", "out.npy", "--share", "0.4"), "more than 0.5"),
        (("balls.npy", "--out", "out.npy", "--move", "0.99"), "no object could begin"),
        (("balls.npy", "--out", "out.npy", "-n", "0"), "--processes 0"),
        (("balls.npy", "--out", "out.npy", "--fov", "49,49,49"), "the field of view 49 x 49 x 49"),
        (
            ("balls.npy", "--out", "out.npy", "--subvolume", "20,20,20", "--overlap", "4,4,4"),
            "an overlap must be more than 8",
        ),
    ],
)
def test_what_cannot_be_segmented_is_refused(words, said, volume):
    given = dict(zip(OPTIONS[::2], OPTIONS[1::2], strict=True))
    kept = [part for pair in given.items() if pair[0] not in words for part in pair]
    done = headway_here("segment", *words, *kept, cwd=volume)
    assert done.code == 1
    assert said in done.err
    assert not list(volume.glob("*.work"))
