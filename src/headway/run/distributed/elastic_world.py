"""The worlds of an elastic job, one after the other, as its launcher and its workers agree on them.

The launcher keeps a store (`job_store`). A worker that wants to belong to a world says so
(`arrived`, with the number of the world that it comes from, until it goes into the next one); when
all workers of the last world have arrived or ended, the launcher tells of the next one (`world`),
in which each worker finds its place. It also gives notice (`notice`) that a world is over, because
one of its workers is, and that hosts have come or gone, which changes nothing until the workers
leave their world by themselves. A worker's thread looks for notices; the workers meet in the same
store, under the world's number.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntFlag
from typing import Any, Self

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    DistNetworkError,
    PrefixStore,
    Store,
)

from headway.documents import parse_json
from headway.errors import RunError
from headway.run.distributed.job_store import JobStore, Request, call_job_store
from headway.run.distributed.launch_env import ElasticWorkerEnv, LaunchEnv

_WORLD, _NOTICE = "elastic/world", "elastic/notice"
_LOOK_SECONDS = 0.25
_STORE_SECONDS = 5.0


class HostChange(IntFlag):
    """What has become of the hosts; the numbers are Horovod's."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


@dataclass(frozen=True, kw_only=True)
class ElasticPlace:
    """The place of one worker in a world; fields as of `LaunchEnv`."""

    rank: int
    local_rank: int
    local_ranks: int
    node_rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class ElasticWorld:
    """One world.

    Attributes:
        number: From 1.
        master_address: Of rank 0's host, as the others reach it.
        places: By worker.
    """

    number: int
    master_address: str
    places: Mapping[str, ElasticPlace]

    @classmethod
    def of(cls, text: str | bytes) -> Self:
        """The inverse of `json.dumps(asdict(self))`."""
        told: dict[str, Any] = parse_json(text if isinstance(text, str) else text.decode())
        places = {worker: ElasticPlace(**place) for worker, place in told.pop("places").items()}
        return cls(places=places, **told)


@dataclass(frozen=True, kw_only=True)
class ElasticNotice:
    """What the launcher says of a world while it goes on.

    Attributes:
        over: The number of the last world that is over.
        world: The number of the world of which the rest is said.
        changes: How often hosts have changed so far.
        change: What the last change was.
    """

    over: int = 0
    world: int = 0
    changes: int = 0
    change: HostChange = HostChange.NONE


# -- the launcher ------------------------------------------------------------------------------


def announce(store: Store, what: ElasticWorld | ElasticNotice) -> None:
    """Tell the workers of a world, or give them notice."""
    key = _WORLD if isinstance(what, ElasticWorld) else _NOTICE
    store.set(key, json.dumps(asdict(what)))


def arrival(store: Store, worker: str) -> int | None:
    """The number of the world from which a worker wants to go on; 0: it is new. None: it does not.

    It does not before it has come, nor while it is in a world. One that waits while the present
    world ends does not go into it any more, or leaves it at once.

    Args:
        store: Of the launcher itself.
    """
    key = f"elastic/arrived/{worker}"
    return int(found) if store.check([key]) and (found := store.get(key)) else None


# -- a worker ----------------------------------------------------------------------------------


@dataclass(eq=False)
class ElasticMember:
    """This worker, as one of an elastic job.

    Args:
        env: Where the launcher's store is, and what it calls this worker.

    Attributes:
        over: Set when the world of this worker is over.
        listeners: Called with what has become of the hosts, by a thread of this object.
    """

    env: ElasticWorkerEnv
    over: threading.Event = field(default_factory=threading.Event)
    listeners: list[Callable[[HostChange], None]] = field(default_factory=list)
    _number: int = 0
    _changes: int = 0
    _waits: bool = False
    _store: JobStore | None = None
    # A `PrefixStore` does not keep what it stands before.
    _ranks_store: JobStore | None = None

    def next_world(self) -> tuple[ElasticWorld, Store]:
        """Leave the world of this worker, and wait for the next one.

        It waits as long as the launcher lives, which ends all workers if there is none in time.

        Returns:
            The world, in which this worker need not have a place, and the store of its ranks, whose
            calls raise `DistNetworkError` once the world is over.

        Raises:
            RunError: The launcher cannot be reached.
        """
        store = self._reached()
        self._waits = True
        arrived = f"elastic/arrived/{self.env.worker}"
        store.set(arrived, str(self._number))
        pause = threading.Event()
        while True:
            notice = _notice(store)
            if store.check([_WORLD]):
                world = ElasticWorld.of(store.get(_WORLD))
                if world.number > max(self._number, notice.over):
                    break
            pause.wait(_LOOK_SECONDS)
        # From here on this worker is in that world until it says that it has left.
        store.set(arrived, "")
        self._number = world.number
        self.over.clear()
        self._waits = False
        if self._ranks_store is None:
            self._ranks_store = JobStore(self._ask, _STORE_SECONDS)
        return world, PrefixStore(f"elastic/{world.number}", self._ranks_store)

    def _ask(self, request: Request) -> Mapping[str, str]:
        """Of the ranks of a world: who waits for one that is lost hears of that."""
        if self.over.is_set():
            raise DistNetworkError("this world of the elastic job is over")
        return self._reached().ask(request)

    def _reached(self) -> JobStore:
        if self._store is None:
            env = self.env
            self._store = call_job_store(env.address, env.port, _STORE_SECONDS)
            if self._store is None:
                raise RunError(
                    f"the launcher of this job does not answer at {env.address}:{env.port}",
                    where=f"worker {env.worker}",
                    fix="Look for its errors; give --network-interfaces the one that this host "
                    "reaches.",
                )
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._store),
                name="headway-elastic",
                daemon=True,
            ).start()
        return self._store

    def place(self, world: ElasticWorld) -> LaunchEnv | None:
        """This worker's place; None: the world is without it."""
        own = world.places.get(self.env.worker)
        if own is None:
            return None
        return LaunchEnv(
            rank=own.rank,
            ranks=len(world.places),
            local_rank=own.local_rank,
            local_ranks=own.local_ranks,
            node_rank=own.node_rank,
            node_name=own.host,
            attempt=world.number - 1,
            launcher="elastic",
            master_address=world.master_address,
            interface=self.env.interface,
        )

    def hear(self, notice: ElasticNotice) -> None:
        """Take a notice; one of a change is kept until this worker is in its world and listens."""
        if notice.over >= self._number and not self._waits:
            self.over.set()
        new = notice.changes > self._changes and notice.world == self._number
        if new and self.listeners and not self._waits:
            self._changes = notice.changes
            for listener in list(self.listeners):
                listener(notice.change)


def _notice(store: Store) -> ElasticNotice:
    if not store.check([_NOTICE]):
        return ElasticNotice()
    told = parse_json(store.get(_NOTICE).decode())
    return ElasticNotice(**{**told, "change": HostChange(told["change"])})


def _watch(found: weakref.ref[ElasticMember], store: Store) -> None:
    """Look for notices as long as the member is used and the launcher lives."""
    pause = threading.Event()
    with suppress(DistNetworkError):
        while True:
            pause.wait(_LOOK_SECONDS)
            notice = _notice(store)
            member = found()
            if member is None:
                return
            member.hear(notice)
            del member
