"""Bodies of ranks for the tests of heartbeats: they exchange until something happens to one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from headway.errors import HeadwayError
from headway.launch.emulation import EmulatedCluster
from headway.launch.worker import run_rank_here
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World

WHEN = 8


def exchange(
    place: LaunchEnv, folder: str, how: str, victim: int, patience: float
) -> dict[str, float]:
    """Exchange 40 times; in the eighth step something happens to the victim."""
    (Path(folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
    with World.join(place, timeout_seconds=60, join_seconds=30, patience_seconds=patience) as world:
        for step in range(1, 41):
            world.doing("data of step %d", step)
            time.sleep(0.02)
            if step == WHEN:
                (Path(folder) / f"came-{world.rank}").touch()
                if world.rank == victim:
                    happen(how, Path(folder))
                elif how == "slow":
                    time.sleep(60)
            world.doing("waits for bucket %d of step %d", 3, step)
            with world.explained(f"the exchange of step {step}"):
                dist.all_reduce(torch.ones(1000))
        return {"steps": step}


def happen(how: str, folder: Path) -> None:
    """What befalls the victim; the moment is noted."""
    while len(list(folder.glob("came-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    time.sleep(0.3)  # the others are in the exchange, or far away in slow code
    (folder / "when").write_text(repr(time.time()))
    match how:
        case "kill" | "slow":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "busy":
            sum(range(150_000_000))  # C code that computes and never lets go of Python's lock
        case "late":
            time.sleep(4)
        case "fork":
            # A data-loading child has copies of all connections, and outlives its parent a while.
            multiprocessing.get_context("fork").Process(target=outlive, args=(5.0,)).start()
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("the sky is falling")


def outlive(seconds: float) -> None:
    """Stay for some seconds after the parent's death."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.02)
    time.sleep(seconds)


def stalled(place: LaunchEnv) -> None:
    """Rank 1 reads data for ever, the others wait for it."""
    with World.join(place, timeout_seconds=3, join_seconds=30) as world:
        world.doing("data of step %d", 12)
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            time.sleep(60)
        world.doing("waits for bucket %d (%s) of step %d", 2, "head.weight", 12)
        with world.explained("the exchange of step 12"):
            dist.all_reduce(torch.ones(1))


def own_loop(folder: Path, how: str, victim: int, patience: float) -> None:
    """A program of the user's own: it catches the error and goes on to its end."""
    try:
        exchange(LaunchEnv.here(), str(folder), how, victim, patience)
    except HeadwayError as error:
        (folder / f"caught-{LaunchEnv.here().rank}").write_text(
            json.dumps({"kind": type(error).__name__, "text": str(error), "time": time.time()})
        )


def cut_in_the_middle(
    place: LaunchEnv, folder: str, emulated: EmulatedCluster, names: list[str]
) -> None:
    """The link is cut while all ranks are inside of a collective that takes long."""
    (Path(folder) / f"pid-{place.rank}").write_text(str(os.getpid()))

    def cut() -> None:
        (Path(folder) / "when").write_text(repr(time.time()))
        emulated.cut(*names)

    with World.join(place, timeout_seconds=60, join_seconds=30) as world:
        world.doing("the exchange of step %d", 3)
        dist.all_reduce(torch.ones(1))
        if world.rank == 0:
            timer = threading.Timer(1.0, cut)
            timer.daemon = True
            timer.start()
        dist.all_reduce(torch.ones(2**23))  # 32 MiB: seconds at 50 Mbit/s


def live(folder: str, how: str, victim: int, patience: float, own: bool, rank: int, ranks: int,
         port: int) -> None:  # fmt: skip
    """The life of a process that is one rank on a machine of its own, and that nobody watches."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    with open(f"{folder}/terminal-{rank}", "wb", buffering=0) as terminal:
        os.dup2(terminal.fileno(), 2)
    if own:
        own_loop(Path(folder), how, victim, patience)
        return

    def tell(error: HeadwayError) -> None:
        sys.stderr.write(f"{error.code} {error}\n")

    arguments = (folder, how, victim, patience)
    run_rank_here(exchange, arguments, place=LaunchEnv.here(), directory=Path(folder), tell=tell)
