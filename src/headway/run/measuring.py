"""One rank of `headway cluster measure`: meet the others, measure device and links, part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from headway.capture.kernels import cores_in_use, measure_kernels
from headway.capture.links import measure_exchanges, measure_overlap, measure_skew, slowest_of
from headway.capture.rounds import SECONDS, Slowest, alone
from headway.cluster.readings import Exchanges, Readings
from headway.run.idle_steps import idle_steps
from headway.run.memory import keep_freed_memory
from headway.run.place import Place
from headway.run.world import World

T = TypeVar("T")


def measure(
    place: Place, device: str, timeout_seconds: float, seconds: float = SECONDS
) -> list[Readings]:
    """Measure as one rank of the world found at `place`; collective.

    Args:
        place: From `Place.here()`.
        device: "cpu", "cuda" or "auto".
        timeout_seconds: Longest wait for another rank.
        seconds: For what devices do; see `rounds.in_rounds`.

    Returns:
        The readings of all ranks, in order of rank, on every rank.
    """
    joined = World.join(place, device=device, timeout_seconds=timeout_seconds)
    with joined as world, world.explained("measuring"):
        return measure_in(world, seconds)


def measure_in(world: World, seconds: float = SECONDS) -> list[Readings]:
    """The same in a world that has been joined already; collective."""
    busy = cores_in_use()
    names = _gathered(world, world.place.node)
    mine = [rank for rank, name in enumerate(names) if name == world.place.node]
    world.barrier("measuring")
    by_node = [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
    slowest = _slowest(world, by_node)
    keep_freed_memory()  # as training does
    with idle_steps(world) as idle:
        kernels = measure_kernels(world.device, len(mine), slowest, seconds, idle)
    inside = between = None
    if world.ranks > 1:
        kernels = replace(
            kernels,
            skew=measure_skew(_world_group(), world.device),
            overlap=measure_overlap(_world_group(), world.device),
        )
        inside = _among(world, by_node)
        between = _among(world, [[ranks[0] for ranks in by_node]])
    own = Readings(
        node=world.place.node,
        kernels=kernels,
        inside=inside,
        between=between,
        busy=busy,
        threads=torch.get_num_threads(),
    )
    return _gathered(world, own)


def _slowest(world: World, by_node: list[list[int]]) -> Slowest:
    """Of the ranks of this one's node; collective."""
    found = alone
    for ranks in by_node:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if isinstance(group, dist.ProcessGroup) and world.rank in ranks:
            found = partial(slowest_of, group=group, device=world.device)
    return found


def _among(world: World, groups: list[list[int]]) -> Exchanges | None:
    """Of the group with this rank in it; None: there is none of at least two ranks."""
    found = None
    for ranks in groups:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if isinstance(group, dist.ProcessGroup) and world.rank in ranks:
            found = measure_exchanges(group, world.device)
    world.barrier("measuring")
    return found


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gathered(world: World, value: T) -> list[T]:
    if world.ranks == 1:
        return [value]
    found: list[T | None] = [None] * world.ranks
    dist.all_gather_object(found, value, group=world.side_group)
    return [item for item in found if item is not None]
