"""State that survives a failed operation: it is committed, and restored from the last commit.

`run` restores the state after a `HorovodInternalError`, meets the other ranks again, sends rank 0's
state to all, and calls the function again. A commit is a copy in the memory of each process. Where
the launcher restarts the processes (torchrun and `headway launch` restart all of them when one
dies), memory is gone: `TorchState(commit_file=...)` keeps the last commit in a file as well, from
which the restarted processes begin.
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.horovod import basics
from headway.horovod.elastic.sampler import ElasticSampler
from headway.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, InvalidArgument
from headway.horovod.functions import allgather_object, broadcast_object
from headway.run.distributed.elastic_world import HostChange


class State(ABC):
    """What training needs to go on: derive from it, or use `ObjectState` and `TorchState`.

    Args:
        bcast_object: As `hvd.broadcast_object`; None: that.
        get_rank: As `hvd.rank`; None: that.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._rank = get_rank or basics.rank
        self._host_messages: queue.Queue[Any] = queue.Queue()
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions without arguments that are called after the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have met again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """The set of ranks is about to change; the next check raises, on all ranks.

        Args:
            timestamp: Of no meaning here.
            update_res: 1: hosts have gone, 2: hosts have come, 3: both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the state, and see whether the ranks are to change.

        Raises:
            HostsUpdatedInterrupt: They are.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether the ranks are to change: whether any rank has been told so.

        Raises:
            HostsUpdatedInterrupt: They are; on all ranks.
        """
        told: list[int] = []
        while not self._host_messages.empty():
            told.append(int(self._host_messages.get()[1]))
        every = [change for each in allgather_object(told, "elastic.hosts") for change in each]
        if every:
            # Where hosts have only gone, all who stay have the same state.
            raise HostsUpdatedInterrupt(all(change == HostChange.REMOVED for change in every))

    @abstractmethod
    def save(self) -> None:
        """Keep the state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was kept."""

    @abstractmethod
    def sync(self) -> None:
        """Take rank 0's state; collective."""

    def reset(self) -> None:  # noqa: B027 - may be left as it is
        """Called after the ranks have changed, before the callbacks."""


class ObjectState(State):
    """Objects as attributes: `ObjectState(batch=0).batch`.

    Args:
        bcast_object: As `hvd.broadcast_object`; None: that.
        get_rank: As `hvd.rank`; None: that.
        kwargs: The attributes with their first values.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            own = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(own, root_rank=0, name="elastic.objects")
            self._set_attrs()
            self.save()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class _Kept:
    """Something with `state_dict` and `load_state_dict`, and its last commit."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved: Any = None
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Take that of rank 0."""
        state = broadcast_object(self.value.state_dict(), name="elastic.state")
        self.value.load_state_dict(state)
        self.save()


class TorchState(ObjectState):
    """A model, an optimizer, samplers and objects as attributes.

    Args:
        model: Or None.
        optimizer: Or None.
        commit_file: Rank 0 keeps each commit in this file as well, and `sync` begins with it where
            it is newer than the state in memory; Horovod has no such thing. Only tensors and plain
            values (numbers, texts, lists, dictionaries) of the state can be kept there.
        kwargs: Further models, optimizers and `ElasticSampler`s, and objects with their first
            values.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        commit_file: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer} | kwargs
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._kept = {
            name: _Kept(value) for name, value in given.items() if isinstance(value, kinds)
        }
        for name, kept in self._kept.items():
            setattr(self, name, kept.value)
        self._file = None if commit_file is None else Path(commit_file)
        self._commits = 0
        self.model, self.optimizer = model, optimizer
        super().__init__(**{n: value for n, value in kwargs.items() if n not in self._kept})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        kept = self.__dict__.get("_kept", {})
        if name in kept and value is not kept[name].value:
            kept[name] = _Kept(value)

    def save(self) -> None:
        for kept in self._kept.values():
            kept.save()
        super().save()

    def restore(self) -> None:
        for kept in self._kept.values():
            kept.restore()
        super().restore()

    def commit(self) -> None:
        self.save()
        self._commits += 1
        if self._file is not None and basics.rank() == 0:
            self._write(self._file)
        self.check_host_updates()

    def sync(self) -> None:
        if self._file is not None and basics.rank() == 0 and self._file.exists():
            self._read(self._file)
        for kept in self._kept.values():
            kept.sync()
        super().sync()

    def reset(self) -> None:
        for kept in self._kept.values():
            if isinstance(kept.value, ElasticSampler):
                kept.value.reset()

    def _write(self, path: Path) -> None:
        """Written aside and renamed: the file is whole or absent."""
        aside = path.with_name(f"{path.name}.partial")
        states = {name: kept.saved for name, kept in self._kept.items()}
        torch.save(
            {"commits": self._commits, "states": states, "objects": self._saved_state}, aside
        )
        aside.replace(path)

    def _read(self, path: Path) -> None:
        found: Mapping[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        if found["commits"] <= self._commits:
            return
        self._commits = found["commits"]
        for name, state in found["states"].items():
            self._kept[name].saved = state
        self._saved_state = dict(found["objects"])
        self.restore()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function of a state that trains: it is called again after a failure.

    After a `HorovodInternalError` with the last commit, after a `HostsUpdatedInterrupt` with the
    state as it is; in both cases the ranks meet again, and rank 0's state goes to all. A wrong
    argument is no failure: it is raised.
    """
    return run_fn(func, _meet_again)


def _meet_again() -> None:
    basics.shutdown()
    basics.init()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`run` with a function of one's own by which the ranks meet again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not basics.is_initialized():
            basics.init()
        skip_sync = False
        with _told_of_hosts(state):
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except InvalidArgument:
                    raise
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                # Of the old ranks; what is told while they meet again is of the new ones.
                state._host_messages = queue.Queue()
                reset()
                # What was to come when the ranks left need not be what has come.
                skip_sync = skip_sync and not basics.SESSION.newcomers
                state.on_reset()

    return wrapper


@contextmanager
def _told_of_hosts(state: State) -> Iterator[None]:
    """Inside, the state of a worker of an elastic job is told when hosts come and go."""
    member = basics.SESSION.member
    if member is None:
        yield
        return

    def hear(change: HostChange) -> None:
        state.on_hosts_updated(time.time(), int(change))

    member.listeners.append(hear)
    try:
        yield
    finally:
        member.listeners.remove(hear)
