"""Sources whose next example depends on what the network made of the last one.

A game, a simulation, a mask that is filled move by move: such data have no samples to be read at
random. A `StatefulSource` has *slots*, numbered over all ranks, each with one example at a time: a
step takes the example of every slot, and the network's outputs, which the loss returns beside sum
and count, change what the slot gives next. The global batch is one example of every slot, and a
rank has the slots of its share. An example depends on the seed, its slot and the outputs for that
slot alone, never on the rank: k ranks with s slots train as one rank with k * s slots.

What a slot has come to is its state, tensors by name. A checkpoint holds the states of all slots
(`data.SLOT.NAME`), so that a run resumes in the middle of a game, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from headway.data.source import Source
from headway.errors import DataError


@runtime_checkable
class StatefulSource(Source, Protocol):
    """Examples that outputs of the network change; as a `Source` it has the length of an epoch.

    Attributes:
        slots: Examples that are under way at a time, of all ranks together: the global batch.
    """

    slots: int

    def read(self, indices: Sequence[int]) -> Any:
        """The examples of some slots as one batch; index i is slot i modulo `slots`.

        Changes nothing: the same call again gives the same examples.
        """
        ...

    def absorb(self, slots: Sequence[int], outputs: Any) -> None:
        """What the network has made of the examples of some slots, which then go on.

        Args:
            outputs: As the loss returned them, on the CPU and without gradients; dimension 0 has
                one entry for each slot.
        """
        ...

    def state(self, slot: int) -> Mapping[str, Tensor]:
        """What `restore` needs to go on here; a later `absorb` may change these tensors."""
        ...

    def restore(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put a slot where `state` was asked for; without tensors at its beginning."""
        ...


@runtime_checkable
class ResizableSource(StatefulSource, Protocol):
    """A stateful source that can be had with another number of slots, so that it follows the batch.

    The first slots give the same as before.
    """

    def with_slots(self, slots: int) -> StatefulSource:
        """The same source with as many slots, each at no place yet."""
        ...


def fit_slots(source: Source, batch: int) -> Source:
    """The source with a slot for each sample of the batch, where it can be resized."""
    if isinstance(source, ResizableSource) and source.slots != batch:
        return source.with_slots(batch)
    return source


def slots_of(source: StatefulSource, positions: Iterable[int]) -> list[int]:
    """The slots whose examples stand at places of an epoch."""
    return [position % source.slots for position in positions]


def absorber(source: Source, positions: Sequence[int]) -> Callable[[Any], None] | None:
    """What takes the outputs for the examples at these places; None: the source has no state."""
    if not isinstance(source, StatefulSource):
        return None
    return partial(source.absorb, slots_of(source, positions))


def begin_slots(source: Source, slots: Iterable[int] | None = None) -> None:
    """Put slots of a source at their beginning; None: all. Other sources have none."""
    if isinstance(source, StatefulSource):
        for slot in range(source.slots) if slots is None else slots:
            source.restore(slot, {})


def check_slots(source: Source, batch: int, samples: int | None = None, where: str = "") -> None:
    """Compare the slots of a stateful source with the batch of the run; of others nothing.

    Args:
        samples: Of an epoch, where fewer are read than the source has.

    Raises:
        DataError: A batch is not one example of every slot.
    """
    if not isinstance(source, StatefulSource):
        return
    kind, length = type(source).__name__, len(source) if samples is None else samples
    if source.slots != batch:
        raise DataError(
            f"the {kind} has {source.slots} slots, and the batch {batch} samples",
            where=where,
            why="A step takes one example of every slot.",
            fix=f"Set the batch to {source.slots}, or give the source {batch} slots.",
        )
    if length % batch:
        raise DataError(
            f"an epoch of the {kind} has {length} examples, not as many for each of {batch} slots",
            where=where,
            fix=f"Read {length - length % batch or batch} of them.",
        )
