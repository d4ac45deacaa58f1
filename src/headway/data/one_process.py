"""The environment of a job of one process, for the code of others that asks it for the rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, the environment is that of the only process of a job.

    Every rank reads the whole stream. Readers of shards ask the environment for the rank before
    they ask torch: WebDataset refuses to be read by several ranks, or splits its shards.

    The environment is that of the whole process: other threads, and processes started meanwhile,
    see one process, too. Nothing of headway asks for the rank then; a thread of the user's takes it
    from `Executor.world` or from torch. The rank's own process reads, because what a stream gives
    and its state must not be sent from another one.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
