"""The half-public names of torch that a process group backend in Python needs.

No other file uses them. torch documents `Backend.register_backend` as experimental, and the methods
that a group must have only by their C++ headers. What a name is called is found by looking for it,
never by torch's version; `tests/single/test_backend_torch.py` reports what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from headway.channel.gloo_listeners import drop_later_connections, named_interfaces
from headway.comm.backend.connection import (
    ConnectionMessages,
    connect_peers,
    interface_candidates,
)
from headway.comm.backend.interpreter import Reduction
from headway.errors import UsageError

NAME = "headway"

ALIASES: tuple[tuple[str, str], ...] = (
    ("all_gather_single", "_allgather_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_to_all_single", "alltoall_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of a group: their name from torch 2.13 on, and before."""

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What torch says when a group is made.

    Attributes:
        store: For the rendezvous of this group alone.
        rank: The place of this process in the group.
        ranks: The global ranks of the group.
    """

    store: Any
    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout: timedelta


def register(make: Callable[[GroupInfo], dist.ProcessGroup], name: str = NAME) -> None:
    """Make torch call `make` for groups of the backend `name`; the last registration counts.

    Raises:
        UsageError: This torch has no Gloo.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UsageError(
            "the backend headway needs Gloo",
            why=f"torch {torch.__version__} was built without it.",
            fix="Install a torch with Gloo, as from PyPI or download.pytorch.org.",
        )

    def create(options: Any, _: object = None) -> dist.ProcessGroup:
        # torch gives no ranks for the default group.
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return make(
            GroupInfo(options.store, options.group_rank, options.group_size, ranks, options.timeout)
        )

    # Only with extended_api does torch say which global ranks the group has.
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def make_gloo(info: GroupInfo, interfaces: Sequence[str]) -> Any:
    """The Gloo group inside of one of ours; without interfaces on those that Gloo finds itself."""
    with drop_later_connections():
        gloo = _gloo(info, interfaces)
    # torch 2.14 counts from zero on all ranks by itself.
    if torch.__version__ < "2.14":
        gloo._set_sequence_number_for_group()
    return gloo


def _gloo(info: GroupInfo, interfaces: Sequence[str]) -> Any:
    store = PrefixStore("gloo/", info.store)
    kind: Any = dist.ProcessGroupGloo
    if interfaces:
        chosen = kind._Options()
        chosen._devices = [kind.create_device(interface=name) for name in interfaces]
        # Gloo's default is two threads for its one device.
        chosen._threads = 2 * len(interfaces)
        chosen._timeout = info.timeout
        return kind(store, info.rank, info.size, chosen)
    return kind(store, info.rank, info.size, timeout=info.timeout)


def connect(info: GroupInfo, interfaces: Sequence[str], *, own: bool) -> ConnectionMessages | None:
    """The connections of one of our groups; None where Gloo's are used."""
    if info.size == 1:
        return None
    links = connect_peers(
        PrefixStore("links/", info.store),
        info.rank,
        info.ranks,
        interface_candidates(interfaces or named_interfaces()) if own else [],
        info.timeout.total_seconds(),
    )
    return None if links is None else ConnectionMessages(links)


def num_interfaces(gloo: Any) -> int:
    """How many interfaces a Gloo group spreads its operations over."""
    return len(gloo.options._devices)


def timeout_of(gloo: Any, opts: Any) -> float:
    """Seconds that an operation may take: its own time-out if it has one, else the group's."""
    own = getattr(opts, "timeout", None)
    chosen = own if own is not None and own > timedelta(0) else gloo.options._timeout
    return float(chosen.total_seconds())


def adopt(group: dist.ProcessGroup, gloo: Any) -> None:
    """Let torch's C++ code use Gloo for whatever our class does not override."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)


def first_of(owner: Any, *names: str) -> Any:
    """The first of these attributes that there is."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def both_names(group: type[dist.ProcessGroup]) -> type[dist.ProcessGroup]:
    """Decorator: give the methods of `ALIASES` their old names, too; torch looks for either."""
    for new, old in ALIASES:
        setattr(group, old, group.__dict__[new])
    return group


def reduction_of(opts: Any) -> Reduction | None:
    """What an operation's options ask for; None: what only torch knows (PREMUL_SUM)."""
    return next((name for op, name in _REDUCTIONS if opts.reduceOp == op), None)


def options(kind: str, given: Any) -> Any:
    """An operation's options; torch's own code always gives them, others may not.

    Raises:
        UsageError: They are not of this kind (the short forms of torch, such as a ReduceOp alone).
    """
    if given is None:
        return getattr(distributed_c10d, kind)()
    if not isinstance(given, getattr(distributed_c10d, kind)):
        raise UsageError(
            f"the backend headway takes {kind}, not {given!r}",
            why="A method of the process group itself was called.",
            fix="Call the function of torch.distributed, or give the method its options.",
        )
    return given


def is_async(opts: Any) -> bool:
    """Whether somebody will wait for the operation later (where torch does not say: yes)."""
    return bool(getattr(opts, "asyncOp", True))
