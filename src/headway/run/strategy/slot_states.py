"""What a stateful source has come to, in a checkpoint: `data.SLOT.NAME`, a tensor of one slot.

Each rank holds the slots of its share of the batch. A checkpoint may be read before the source is
known (`Executor.resume`): the states then wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.checkpoint.format import Manifest
from headway.data.source import Source
from headway.data.stateful_source import StatefulSource, begin_slots, check_slots
from headway.errors import CheckpointMismatch
from headway.plans import Plan

PREFIX = "data."


class SlotStates:
    """The slots of one rank.

    Attributes:
        source: That the run reads; None: not known yet, or without a state.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._batch = plan.batch.samples
        self._own = plan.batch.share(plan.data_rank(rank), plan.data_degree)
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self.source: StatefulSource | None = None

    def attach(self, source: Source) -> None:
        """Put the slots of a source where the checkpoint says, or at their beginning.

        Again with the same source: they stay where they are.

        Raises:
            DataError: It has other slots than the batch has samples.
        """
        if not isinstance(source, StatefulSource):
            return
        check_slots(source, self._batch)
        if source is not self.source:
            begin_slots(source, self._own)
        self.source = source
        for slot, state in self._waiting.items():
            source.restore(slot, state)
        self._waiting = {}

    def tensors(self) -> dict[str, Tensor]:
        """The states of this rank's slots by their names in a checkpoint."""
        if self.source is None:
            return {}
        return {
            f"{PREFIX}{slot}.{name}": tensor
            for slot in self._own
            for name, tensor in self.source.state(slot).items()
        }

    def destinations(self, manifest: Manifest) -> dict[str, Tensor]:
        """Memory to read this rank's slots of a checkpoint into; nothing where it has none.

        Raises:
            CheckpointMismatch: It has other slots than the batch of this run has samples.
        """
        saved = {name: _slot(name) for name in manifest.tensors if name.startswith(PREFIX)}
        if saved and set(saved.values()) != set(range(self._batch)):
            raise CheckpointMismatch(
                f"the checkpoint holds examples under way in {max(saved.values()) + 1} slots, and "
                f"the batch has {self._batch} samples",
                why="Each sample of a batch is the example of one slot.",
                fix=f"Resume with a batch of {max(saved.values()) + 1} samples, on any number of "
                "ranks.",
            )
        entries = {
            name: manifest.tensors[name] for name, slot in saved.items() if slot in self._own
        }
        return {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the states that have been read: for the source, or until there is one."""
        self._waiting = {}
        for name, tensor in tensors.items():
            if name.startswith(PREFIX):
                key = name.removeprefix(f"{PREFIX}{_slot(name)}.")
                self._waiting.setdefault(_slot(name), {})[key] = tensor
        if self.source is not None:
            self.attach(self.source)


def _slot(name: str) -> int:
    return int(name.removeprefix(PREFIX).partition(".")[0])
