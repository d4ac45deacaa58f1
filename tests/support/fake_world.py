"""A world of any size in one process: process groups whose operations do nothing.

The one file that touches torch's fake process group (`torch.testing._internal`), and the way from a
group's name to the group. What a rank computes from the data of others is wrong then; which
operations it starts, on which groups, with how many bytes, is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import RunError, UsageError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World

_HAVE = "torch 2.11 to 2.14 have it"


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[World]:
    """This process as one rank of many.

    Raises:
        RunError: This torch has no fake process group.
        UsageError: This process belongs to a group already.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process already belongs to a process group",
            fix="Call dist.destroy_process_group() before.",
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RunError(
            f"torch {torch.__version__} has no fake process group",
            why=f"It is private, and {_HAVE}.",
            fix="Record a run on real processes instead.",
        ) from error
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        place = replace(LaunchEnv(), rank=rank, ranks=ranks, launcher="program")
        yield World(place=place, device=torch.device("cpu"), backend="fake")
    finally:
        dist.destroy_process_group()


def group_named(name: str) -> dist.ProcessGroup:
    """The group that functional collectives name."""
    private: Any = dist.distributed_c10d
    found = private._resolve_process_group(name)
    assert isinstance(found, dist.ProcessGroup)
    return found
