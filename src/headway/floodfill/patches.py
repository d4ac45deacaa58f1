"""Training examples: fields of view that move inside a patch, by the network's own masks.

A patch is so large that the field of view can move by the deltas in each direction. Its mask begins
with one voxel, the middle. The field of view visits the middle, then the 26 places at a distance of
the deltas in random order, each only if the mask at its centre has come to `MOVE` by then (policy
"fixed" of the reference implementation). Each visit is one example of SGD, and the mask that the
network returns is what later visits see. When no visit is left, the slot goes on to its next patch.

Which patch is a slot's n-th, its reflections and the order of its visits follow from (seed, slot,
n) alone, so that the state of a slot is n, the visit, and the mask.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import DataError
from headway.floodfill.network import Triple, scale_image
from headway.floodfill.partitions import BalancedPlaces, partition_map

PAD, SEED, MOVE = 0.05, 0.95, 0.9
"""Probabilities of the mask: where nothing is known yet, at the first voxel, to move there."""
OUTSIDE, INSIDE = 0.05, 0.95
"""Soft labels: of voxels of other bodies, and of the patch's own."""
TRACKED = ("correct", "missed", "spurious", "tp", "fp", "fn", "tn")
"""What is counted of a patch: moves, and voxels of its mask at `MOVE`, when it is left."""


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@dataclass(frozen=True)
class PatchGeometry:
    """Sizes of a training patch.

    Attributes:
        fov: Of the field of view, odd.
        deltas: How far it moves.
    """

    fov: Triple
    deltas: Triple

    @property
    def patch(self) -> Triple:
        """fov + 2 deltas."""
        z, y, x = (f + 2 * d for f, d in zip(self.fov, self.deltas, strict=True))
        return z, y, x

    @property
    def half(self) -> Triple:
        """From the middle of the patch to its face."""
        z, y, x = (size // 2 for size in self.patch)
        return z, y, x

    @property
    def offsets(self) -> tuple[Triple, ...]:
        """The 26 places around the middle, in a fixed order."""
        steps = itertools.product(*((-d, 0, d) for d in self.deltas))
        return tuple((z, y, x) for z, y, x in steps if (z, y, x) != (0, 0, 0))

    def view(self, offset: Triple) -> tuple[slice, slice, slice]:
        """The field of view at an offset, inside the patch."""
        rows = zip(self.deltas, offset, self.fov, strict=True)
        z, y, x = (slice(d + o, d + o + f) for d, o, f in rows)
        return z, y, x


@dataclass
class _Patch:
    """What follows from the number of a patch.

    Attributes:
        visits: Offsets of the field of view, the middle first.
    """

    image: NDArray[np.float32]
    inside: NDArray[np.bool_]
    visits: tuple[Triple, ...]


@dataclass
class _Slot:
    number: int
    visit: int
    mask: Tensor
    counts: Tensor
    finished: Tensor
    patch: _Patch


class PatchSource:
    """Fields of view of a labelled volume, a `headway.data.StatefulSource`.

    `read` gives {"image", "mask", "labels": [N, 1, Z, Y, X], "tracked": [N, 7] of `TRACKED`}; the
    last is of the patch that the slot has just left, else zeros. Outputs are the new masks.

    Args:
        image: [z, y, x] grey values, 0 to 255.
        bodies: [z, y, x] ids; 0 is no body.
        slots: Patches that are under way at a time.
        visits: Examples that each slot gives in an epoch.
        axes: Dimensions that are permuted at random; those of unequal resolution must not be.
        min_size: Bodies of fewer voxels begin no patch.

    Raises:
        DataError: Image and bodies have other shapes, no body is large enough, the volume is too
            small, or the permuted axes have other sizes of the field of view.
    """

    def __init__(
        self,
        image: NDArray[Any],
        bodies: NDArray[Any],
        geometry: PatchGeometry,
        *,
        slots: int,
        visits: int,
        axes: Sequence[int] = (1, 2),
        min_size: int = 10_000,
        seed: int = 0,
    ) -> None:
        if image.shape != bodies.shape or image.ndim != 3:
            raise DataError(
                f"the image has shape {list(image.shape)}, and its labels {list(bodies.shape)}",
                fix="Give two volumes [z, y, x] of the same part of the tissue.",
            )
        if any(size % 2 == 0 for size in geometry.fov):
            raise DataError(f"a field of view of {list(geometry.fov)} voxels has no middle",
                            fix="Give odd sizes.")  # fmt: skip
        if len({(geometry.fov[a], geometry.deltas[a]) for a in axes}) > 1:
            raise DataError(
                f"axes {list(axes)} cannot be permuted",
                why=f"The field of view is {list(geometry.fov)}, and moves by "
                f"{list(geometry.deltas)}.",
                fix="Permute axes along which both are the same, for example axes=[1, 2].",
            )
        self.image, self.bodies, self.geometry = image, bodies, geometry
        self.slots, self.visits, self.axes, self.seed = slots, visits, tuple(axes), seed
        # The patch is also the box by which its place is chosen ("lom radius" of the reference).
        self.places = BalancedPlaces.of(partition_map(bodies, geometry.half, min_size=min_size))
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        return self.slots * self.visits

    def with_slots(self, slots: int) -> PatchSource:
        """The same volume with as many patches under way."""
        other = copy.copy(self)
        other.slots, other._slots = slots, {}
        return other

    def read(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """See the class."""
        slots = [self._slots[index % self.slots] for index in indices]
        views = [self.geometry.view(slot.patch.visits[slot.visit]) for slot in slots]
        pairs = list(zip(slots, views, strict=True))
        inside = torch.from_numpy(np.stack([slot.patch.inside[view] for slot, view in pairs]))
        images = torch.from_numpy(np.stack([slot.patch.image[view] for slot, view in pairs]))
        labels = torch.where(inside, INSIDE, OUTSIDE)
        return {
            "image": images[:, None],
            "mask": torch.stack([slot.mask[view] for slot, view in pairs])[:, None],
            "labels": labels[:, None],
            "tracked": torch.stack([slot.finished for slot in slots]).float(),
        }

    def absorb(self, slots: Sequence[int], outputs: Tensor) -> None:
        """Write the new masks, and move on.

        Args:
            outputs: [N, 1, Z, Y, X], logits.
        """
        for number, output in zip(slots, outputs, strict=True):
            slot = self._slots[number]
            # In the network's own type: rounding it would make a difference between ranks visible.
            mask = slot.mask.to(output.dtype, copy=True)
            mask[self.geometry.view(slot.patch.visits[slot.visit])] = output[0]
            slot.mask = mask
            self._move(number, slot)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Patch, visit, mask and counts."""
        held = self._slots[slot]
        return {
            "patch": torch.tensor(held.number),
            "visit": torch.tensor(held.visit),
            "mask": held.mask,
            "counts": held.counts,
            "finished": held.finished,
        }

    def restore(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Go on in a patch; without a state in the first one of the slot."""
        if not state:
            self._slots[slot] = self._begun(slot, 0)
            return
        number = int(state["patch"])
        self._slots[slot] = _Slot(
            number,
            int(state["visit"]),
            state["mask"].clone(),
            state["counts"].clone(),
            state["finished"].clone(),
            self._patch(slot, number),
        )

    # -- moves -------------------------------------------------------------------------------

    def _move(self, number: int, slot: _Slot) -> None:
        """To the next visit that the mask allows, else to the next patch."""
        nothing = torch.zeros(len(TRACKED), dtype=torch.int64)
        slot.counts, slot.finished = slot.counts.clone(), nothing
        for visit in range(slot.visit + 1, len(slot.patch.visits)):
            z, y, x = (
                half + step
                for half, step in zip(self.geometry.half, slot.patch.visits[visit], strict=True)
            )
            right = bool(slot.patch.inside[z, y, x])
            moves = float(slot.mask[z, y, x]) >= logit(MOVE)
            if moves or right:
                slot.counts[0 if moves and right else 1 if right else 2] += 1
            if moves:
                slot.visit = visit
                return
        counts = slot.counts
        counts[3:] = _voxels(slot.mask >= logit(MOVE), torch.from_numpy(slot.patch.inside))
        self._slots[number] = self._begun(number, slot.number + 1)
        self._slots[number].finished = counts

    def _begun(self, slot: int, number: int) -> _Slot:
        mask = torch.full(self.geometry.patch, logit(PAD))
        mask[self.geometry.half] = logit(SEED)
        nothing = torch.zeros(len(TRACKED), dtype=torch.int64)
        return _Slot(number, 0, mask, nothing, nothing, self._patch(slot, number))

    def _patch(self, slot: int, number: int) -> _Patch:
        middle = self.places.draw(self.seed, slot, number)
        box = tuple(
            slice(m - half, m - half + size)
            for m, half, size in zip(middle, self.geometry.half, self.geometry.patch, strict=True)
        )
        draw = np.random.default_rng([self.seed, slot, number, 2])
        order = list(range(3))
        for axis, other in zip(self.axes, draw.permutation(self.axes).tolist(), strict=True):
            order[axis] = other
        flips = tuple(slice(None, None, -1 if flip else 1) for flip in draw.integers(2, size=3))
        offsets = self.geometry.offsets
        visits = [offsets[index] for index in draw.permutation(len(offsets))]
        return _Patch(
            scale_image(np.ascontiguousarray(self.image[box].transpose(order)[flips])),
            np.ascontiguousarray((self.bodies[box] == self.bodies[middle]).transpose(order)[flips]),
            ((0, 0, 0), *visits),
        )


def _voxels(found: Tensor, wanted: Tensor) -> Tensor:
    """True and false positives, false and true negatives."""
    pairs = ((found, wanted), (found, ~wanted), (~found, wanted), (~found, ~wanted))
    return torch.stack([(a & b).sum() for a, b in pairs])
