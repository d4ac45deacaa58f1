"""ranks: workers of free runs that die or stand still; the others go on, and the history is true."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.run.distributed.world import World
from headway.run.synchrony.free_run import FreeRun
from headway.synchrony.history import Died, History, merged
from test_free_workers import WAYS, executor, trained
from support.ranks import run_ranks
from support.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

SURVIVING = {
    name: {"topology": "single", **words}
    if words.get("merge") is None and name != "servers"
    else words
    for name, words in WAYS.items()
    if name != "servers"
}
"""Rank 0 has what all need; the others can die."""


def dying(world: Any, words: dict[str, Any], folder: Path, seconds: float) -> list[Any]:
    run = executor(World.adopt(), **words)
    free = run.strategy.rounds
    assert isinstance(free, FreeRun)
    free.history.append_to(folder / f"{world.rank}")
    begin = free.begin

    def mortally(steps_done: int) -> None:
        begin(steps_done)
        if world.rank != 2 or steps_done:
            return
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()

    free.begin = mortally  # type: ignore[method-assign]
    return trained(run, seed=1)[0]


def again(world: Any, words: dict[str, Any], folder: Path) -> list[Any]:
    found = {rank: History.load(folder / f"{rank}", killed=True) for rank in range(world.size)}
    return trained(executor(World.adopt(), **words), merged(found), seed=2)[0]


@pytest.mark.parametrize("name", sampled(list(SURVIVING), 5))
def test_the_others_go_on_and_are_repeated_bit_by_bit(name: str, tmp_path: Path) -> None:
    words, seconds = SURVIVING[name], 0.15 * random.Random(name).random()
    first = run_ranks(3, dying, words, tmp_path, seconds, mortal=[2])
    assert first[2] is None
    history = merged({rank: History.load(tmp_path / f"{rank}", killed=True) for rank in range(3)})
    assert history.dead() == {2}
    assert any(entry == Died(2) for holder in history.logs for entry in history.entries(holder))
    repeated = run_ranks(3, again, words, tmp_path)
    assert repeated[:2] == first[:2]
    assert first[0][-1] == first[1][-1]
