"""Bodies of workers for the tests of `launch`, and the program that joins a world under torchrun.

As a program: `python launch_entries.py FOLDER [kill]` joins through `World.join`, sums the ranks,
and writes what it saw to FOLDER; with `kill`, rank 1 of the first attempt ends by SIGKILL.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from headway.errors import DataError, UsageError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.loop import StopRequest


def death_signal() -> int:
    """What the kernel sends this process when its parent dies (prctl, PR_GET_PDEATHSIG)."""
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))
    return found.value


def answer(place: LaunchEnv, number: int) -> dict[str, object]:
    """What a worker sees of itself."""
    with World.join(place, timeout_seconds=20) as world:
        total = torch.tensor([float(world.rank + number)])
        dist.all_reduce(total)
        twice = torch.tensor([1.0])
        dist.all_reduce(twice, group=world.side_group)
        return {
            "rank": world.rank,
            "total": total.item() * twice.item(),
            "threads": torch.get_num_threads(),
            "launcher": place.launcher,
            "seen": os.environ.get("HEADWAY_TEST_SEEN"),
            "parent": os.getppid(),
            "pid": os.getpid(),
            "death_signal": death_signal(),
            "collector": (gc.isenabled(), gc.get_freeze_count() > 100_000),
        }


def alone(place: LaunchEnv) -> tuple[int, bool]:
    with World.join(place) as world:
        return world.ranks, dist.is_initialized()


def fail(place: LaunchEnv, folder: str, how: str) -> None:
    """Rank 1 fails while the others are in an exchange or far from any."""
    (Path(folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
    with World.join(place, timeout_seconds=60) as world:
        if world.rank != 1:
            if how == "busy":
                time.sleep(60)
            with world.explained("the exchange of step 17"):
                dist.all_reduce(torch.ones(4))
        if how == "data":
            raise DataError("sample 5 is missing", where="train.npy", fix="Copy it again.")
        if how == "exit":
            sys.exit(7)
        if how == "_exit":
            os._exit(0)
        raise ValueError(f"negative loss {how}")


def differ(place: LaunchEnv, how: str) -> str:
    """The ranks call different collectives after three equal ones."""
    with World.join(place, timeout_seconds=20) as world, world.explained("sums of one's own"):
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        if how == "operation" and world.rank == 1:
            dist.broadcast(torch.ones(1000), 0)
        else:
            dist.all_reduce(torch.ones(4000 if world.rank == 1 else 1000))
        dist.all_reduce(torch.ones(4))
    return "not noticed"


def leave_by_c(place: LaunchEnv) -> None:
    """Rank 1 ends with status 0 by C code, of which Python knows nothing."""
    with World.join(place, timeout_seconds=60) as world:
        if world.rank == 1:
            ctypes.CDLL(None)._exit(0)
        with world.explained("an exchange"):
            dist.all_reduce(torch.ones(4))


def all_leave_by_c(place: LaunchEnv) -> None:
    """As above, on all ranks at once."""
    ctypes.CDLL(None)._exit(0)


def stand_still(place: LaunchEnv) -> None:
    """Rank 1 is stopped where no heartbeat runs; rank 0 has done its work."""
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def forkserver_killed(place: LaunchEnv, folder: str) -> int:
    """Rank 0 of the first attempt kills the process that it was forked from."""
    (Path(folder) / f"pid-{place.rank}-{place.attempt}").write_text(str(os.getpid()))
    if place.attempt == 0:
        while place.rank == 0 and not (Path(folder) / "pid-1-0").exists():
            time.sleep(0.01)
        if place.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return place.attempt


class ForkserverKilledOnArrival:
    """The first worker that is sent one kills its forkserver, before it runs a line of torch's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return kill_forkserver_once, (self.folder,)


def kill_forkserver_once(folder: Path) -> None:
    if not (folder / "orphan").exists():
        (folder / "orphan").write_text(str(os.getpid()))
        forkserver = os.getppid()
        os.kill(forkserver, signal.SIGKILL)
        while os.getppid() == forkserver:
            time.sleep(0.001)


def note_attempt(place: LaunchEnv, *arguments: object) -> int:
    return place.attempt


class NoNode:
    """Emulated nodes whose namespaces are gone."""

    host = "127.0.0.1"

    @property
    def cluster(self) -> object:
        raise FileNotFoundError("no such namespace")


def fail_outside(job: object) -> None:
    """In place of `run_worker`: torch knows what happens outside of it."""
    raise BrokenPipeError("nobody reads this")


def stop_first_attempt(place: LaunchEnv, folder: str) -> int:
    """Wait for a signal, and end in order."""
    with StopRequest() as stop:
        (Path(folder) / f"ready-{place.rank}").touch()
        while place.attempt == 0 and stop.requested is None:
            time.sleep(0.01)
    return place.attempt


def usage(place: LaunchEnv) -> None:
    raise UsageError("asked for something impossible", fix="Ask for less.")


def kill_once(place: LaunchEnv, folder: str, attempts: int, victim: int = 1) -> dict[str, object]:
    """Exchange all the time; `victim` is killed in the middle of the first `attempts` attempts."""
    with World.join(place, timeout_seconds=60) as world:
        value = torch.ones(1000)
        with world.explained("an exchange"):
            dist.all_reduce(value)
            first = time.time()
            for _ in range(20):
                dist.all_reduce(value)
            if world.rank == victim and world.place.attempt < attempts:
                (Path(folder) / "killed").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(20):
                dist.all_reduce(value)
        return {"attempt": world.place.attempt, "first": first}


def until_stopped(place: LaunchEnv, folder: str) -> str | None:
    """Step until a signal arrives, stop together, and write a file each."""
    with StopRequest() as stop, World.join(place, timeout_seconds=60) as world:
        (Path(folder) / f"ready-{world.rank}").write_text(str(os.getpid()))
        for _ in range(2000):
            votes = torch.tensor([float(stop.requested is not None)])
            dist.all_reduce(votes)
            if votes.item() > 0:
                break
            time.sleep(0.02)
        time.sleep(0.2)
        (Path(folder) / f"stopped-{world.rank}").write_text(str(stop.requested))
        return stop.requested


def deaf(place: LaunchEnv, folder: str) -> None:
    """Notices signals and does not care."""
    with StopRequest():
        (Path(folder) / f"ready-{place.rank}").write_text(str(os.getpid()))
        for _ in range(600):
            time.sleep(0.1)


def late(place: LaunchEnv) -> None:
    """Rank 1 never arrives."""
    if place.rank == 1:
        time.sleep(60)
    World.join(place, timeout_seconds=1)


def hang(place: LaunchEnv) -> None:
    """Rank 1 does not come to the second exchange."""
    with World.join(place, timeout_seconds=1, join_seconds=20) as world:
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            time.sleep(60)
        with world.explained("the exchange of step 2"):
            dist.all_reduce(torch.ones(1))


def twice(place: LaunchEnv) -> list[float]:
    """Two worlds, one after the other, in one process."""
    totals = []
    for _ in range(3):
        with World.join(place, timeout_seconds=20) as world:
            total = torch.tensor([float(world.rank)])
            dist.all_reduce(total)
            totals.append(total.item())
    return totals


def main() -> None:
    folder, deadly = Path(sys.argv[1]), "kill" in sys.argv[2:]
    place = LaunchEnv.here()
    restarted = bool(list(folder.glob("killed")))
    with World.join(place, timeout_seconds=30) as world:
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total)
        if deadly and not restarted:
            if world.rank == 1:
                (folder / "killed").write_text(str(world.place.attempt))
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
            dist.all_reduce(total)
        text = f"{world.ranks} {total.item()} {world.place.attempt} {place.agent_store}"
        (folder / f"done-{world.rank}").write_text(text)


if __name__ == "__main__":
    main()
