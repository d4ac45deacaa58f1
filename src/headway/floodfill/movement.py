"""Where the field of view moves next: to the best voxel of each face of a box around its centre.

The reference implementation's policy (google/ffn, `FaceMaxMovementPolicy`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.floodfill.network import Triple


def face_moves(
    mask: NDArray[np.float32], deltas: Triple, threshold: float
) -> list[tuple[float, Triple]]:
    """The moves that a mask suggests, best score first; of equal scores the larger offset first.

    Args:
        mask: The field of view, logits.
        deltas: Distance of the faces from the centre; along a dimension of 0 nothing moves.
        threshold: Least logit of the voxel that is moved to.

    Returns:
        Pairs of score and offset from the centre.
    """
    centre = [size // 2 for size in mask.shape]
    # A voxel on an edge of the box may be the best of two faces, and is one move.
    found: set[tuple[float, Triple]] = set()
    for dim, delta in enumerate(deltas):
        for side in (-delta, delta) if delta else ():
            box: list[slice | int] = [
                slice(c - d, c + d + 1) for c, d in zip(centre, deltas, strict=True)
            ]
            box[dim] = centre[dim] + side
            face = mask[tuple(box)]
            # The first of equal ones, in the order of z, y, x.
            row, column = np.unravel_index(int(face.argmax()), face.shape)
            if not face[row, column] >= threshold:
                continue
            offset = [int(row) - face.shape[0] // 2, int(column) - face.shape[1] // 2]
            offset.insert(dim, side)
            found.add((float(face[row, column]), (offset[0], offset[1], offset[2])))
    return sorted(found, reverse=True)


class MoveQueue:
    """Positions to visit for one object, first in, first out.

    A position is visited once for each cell of a lattice of `deltas` whose middle cell has the seed
    in its middle.
    """

    def __init__(self, seed: Triple, deltas: Triple, threshold: float) -> None:
        self._seed, self._deltas, self._threshold = seed, deltas, threshold
        self._positions = deque([seed])
        self._visited: set[tuple[int, ...]] = set()

    def __iter__(self) -> Iterator[Triple]:
        """Positions whose cell has not been visited when they come up."""
        while self._positions:
            position = self._positions.popleft()
            if self._cell(position) not in self._visited:
                yield position

    def update(self, position: Triple, mask: NDArray[np.float32]) -> None:
        """Note a visit, and queue the moves that the new mask suggests."""
        self._visited.add(self._cell(position))
        z, y, x = position
        for _, (dz, dy, dx) in face_moves(mask, self._deltas, self._threshold):
            self._positions.append((z + dz, y + dy, x + dx))

    def _cell(self, position: Triple) -> tuple[int, ...]:
        return tuple(
            (here - start + delta // 2) // max(delta, 1)
            for here, start, delta in zip(position, self._seed, self._deltas, strict=True)
        )
