"""The canvas on which one object after the other is filled.

The algorithm of the reference implementation (google/ffn, `Canvas.segment_at`, `update_at`), with
two things taken out: which seeds are tried (`seed_ledger.py`), and the network (`Predict`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.errors import UsageError
from headway.floodfill.movement import MoveQueue
from headway.floodfill.network import Triple

Mask = NDArray[np.float32]
Predict = Callable[[Mask, Mask], Mask]
"""The image in a field of view, and the mask in it: logits, without NaN; returns new logits."""


@dataclass(frozen=True, kw_only=True)
class FillingOptions:
    """How objects are filled. The defaults are those of the published segmentation of FIB-25.

    Attributes:
        initial: Probability of the seed voxel.
        pad: Probability of voxels that have not been seen.
        move: Least probability of a voxel that the field of view moves to.
        segment: Least probability of a voxel of the object.
        min_boundary_distance: No seed is tried this close to an object.
        min_size: Objects of fewer voxels are dropped.
        disconnected_bias: If more than this share of a field of view belongs to the object, voxels
            that were unlikely before may not become likelier; below 0: they may.
    """

    initial: float = 0.95
    pad: float = 0.05
    move: float = 0.9
    segment: float = 0.6
    min_boundary_distance: Triple = (1, 1, 1)
    min_size: int = 1000
    disconnected_bias: float = 0.0

    def check(self) -> None:
        """Raise UsageError for what is no probability, or a seed that could not move."""
        for name in ("initial", "pad", "move", "segment"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise UsageError(
                    f"the probability {name} is {value:g}", fix="Give one between 0 and 1."
                )
        if self.initial < self.move:
            raise UsageError(
                "no object could begin",
                why=f"Its seed has probability {self.initial:g}, and the field of view moves from "
                f"{self.move:g} on.",
            )


def logit(probability: float) -> np.float32:
    """log(p / (1 - p))."""
    return np.float32(np.log(probability / (1 - probability)))


@dataclass(frozen=True)
class FilledObject:
    """What came of a seed.

    Attributes:
        moves: [moves, 3] where the field of view was, in order.
        start: The lowest corner of the box that it has seen.
        shape: Of that box.
        mask: [z, y, x] of that box: which voxels belong to the object; None: the seed became
            weaker than the threshold of moves.
    """

    moves: NDArray[np.int32]
    start: Triple
    shape: Triple
    mask: NDArray[np.bool_] | None


class Canvas:
    """A volume and the mask of the object that is being filled.

    Args:
        image: [z, y, x], scaled as the network takes it.
        predict: The network.
    """

    def __init__(
        self, image: Mask, predict: Predict, options: FillingOptions, *, fov: Triple, deltas: Triple
    ) -> None:
        self.image, self.fov, self.deltas = image, fov, deltas
        self.mask = np.full(image.shape, np.nan, dtype=np.float32)
        self._predict = predict
        self._move, self._segment = logit(options.move), logit(options.segment)
        self._initial, self._pad = logit(options.initial), logit(options.pad)
        self._bias = options.disconnected_bias

    def is_inside(self, position: Triple) -> bool:
        """Whether the field of view at a position lies in the volume."""
        return all(
            size // 2 <= here < whole - size // 2
            for here, size, whole in zip(position, self.fov, self.image.shape, strict=True)
        )

    def object_in(self, box: tuple[slice, ...]) -> NDArray[np.bool_]:
        """Which voxels of a box belong to the object that is being filled."""
        # NaN is not larger than anything.
        return np.asarray(self.mask[box] >= self._segment)

    def fill(
        self,
        seed: Triple,
        is_taken: Callable[[Triple], bool],
        go_on: Callable[[tuple[slice, ...], Triple], bool] = lambda box, position: True,
    ) -> FilledObject | None:
        """Fill the object of a seed.

        Args:
            is_taken: Whether a voxel belongs to another object; nothing moves there.
            go_on: Called after each move, with the field of view and its centre; False gives up.

        Returns:
            None: given up.
        """
        self.mask[seed] = self._initial
        queue = MoveQueue(seed, self.deltas, float(self._move))
        moves: list[Triple] = []
        try:
            for position in queue:
                if self.mask[seed] < self._move:
                    break
                if (
                    self.mask[position] < self._move
                    or not self.is_inside(position)
                    or is_taken(position)
                ):
                    continue
                box = self._box(position)
                self._update(box)
                moves.append(position)
                queue.update(position, self.mask[box])
                if not go_on(box, position):
                    return None
            return self._result(seed, moves)
        finally:
            self.mask[seed] = np.nan
            if moves:
                self.mask[self._seen(moves)] = np.nan

    def _box(self, position: Triple) -> tuple[slice, ...]:
        return tuple(
            slice(here - size // 2, here - size // 2 + size)
            for here, size in zip(position, self.fov, strict=True)
        )

    def _seen(self, moves: list[Triple]) -> tuple[slice, ...]:
        low, high = np.min(moves, axis=0), np.max(moves, axis=0)
        boxes = zip(self._box(tuple(low)), self._box(tuple(high)), strict=True)
        return tuple(slice(int(first.start), int(last.stop)) for first, last in boxes)

    def _update(self, box: tuple[slice, ...]) -> None:
        old = self.mask[box]
        known = np.where(np.isnan(old), self._pad, old)
        new = self._predict(self.image[box], known)
        if self._bias >= 0 and np.mean(new >= self._move) > self._bias:
            # Voxels that were taken for another object must not come back: that is how two
            # objects merge. What has not been seen is NaN, of which nothing is less.
            frozen = (old < 0) & (new > old)
            new = np.where(frozen, old, new)
        self.mask[box] = new

    def _result(self, seed: Triple, moves: list[Triple]) -> FilledObject:
        box = self._seen(moves) if moves else self._box(seed)
        start = tuple(part.start for part in box)
        shape = tuple(part.stop - part.start for part in box)
        weak = not moves or self.mask[seed] < self._move
        return FilledObject(
            moves=np.array(moves, dtype=np.int32).reshape(-1, 3),
            start=(start[0], start[1], start[2]),
            shape=(shape[0], shape[1], shape[2]),
            mask=None if weak else self.object_in(box),
        )
