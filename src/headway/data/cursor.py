"""Where a run stands in its data: independent of ranks, workers and micro-batches.

A batch is a range of places of one epoch. No batch crosses the end of an epoch: the last one is
ragged, or left out with `drop_last`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.errors import DataError


@dataclass(frozen=True)
class Cursor:
    """The place of the next sample that no optimiser step has used.

    Attributes:
        seed: Decides the order of every epoch.
        epoch: Counted from 0.
        position: Samples of the epoch already used.
    """

    seed: int
    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(facts: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_dict` described.

        Raises:
            DataError: A key is missing or unknown, or a value is not a count.
        """
        names = ("seed", "epoch", "position")
        if (
            set(facts) != set(names)
            or not all(type(facts[name]) is int for name in names)
            or min(facts["epoch"], facts["position"]) < 0
        ):
            raise DataError(
                "not a cursor",
                why=f"It needs the whole numbers {', '.join(names)} and is {dict(facts)}.",
            )
        return Cursor(**{name: facts[name] for name in names})


def take(cursor: Cursor, length: int, batch: int, drop_last: bool = False) -> tuple[int, Cursor]:
    """The batch that begins at a cursor.

    Args:
        cursor: Where it begins.
        length: Samples of an epoch.
        batch: Samples of a full global batch.
        drop_last: Whether the ragged last batch of an epoch is left out.

    Returns:
        How many samples it has, so that it is places [position, position + count) of the epoch, and
        the cursor after it. The count is 0 only for a rest that is left out (when a run resumes
        with a larger batch than before); the cursor after it begins the next epoch.

    Raises:
        DataError: The cursor lies outside an epoch, so it belongs to other data.
    """
    rest = length - cursor.position
    if rest <= 0:
        raise DataError(
            "the run stands outside its data",
            where=f"epoch {cursor.epoch}, position {cursor.position}",
            why=f"An epoch of this data has {length} samples.",
            fix="Give the data that the run was started with, or start a new run.",
        )
    count = batch if rest >= batch else 0 if drop_last else rest
    left = rest - count
    if count == 0 or left == 0 or (drop_last and left < batch):
        return count, Cursor(cursor.seed, cursor.epoch + 1, 0)
    return count, Cursor(cursor.seed, cursor.epoch, cursor.position + count)
