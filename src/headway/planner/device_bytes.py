"""What a device holds beside weights, gradients, optimiser and what is kept, and for how long.

Samples; messages of a pipeline; what FSDP2 gathers and sums unit by unit; the sum of a stage's
gradients behind the last backward. Invariant: each term is a tensor of the executor, at the moment
at which the executor has it. Sources: Zhao et al. 2023 (FSDP); torch 2.13,
`fsdp/_fully_shard/_fsdp_param_group.py`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headway.planner.degrees import FULL, Degrees, gradients_per_byte, state_of
from headway.planner.message_room import held
from headway.planner.operators import Floats
from headway.planner.shared import Shared
from headway.planner.stages import Cells, Tables

GROUP, OF_LARGEST = 0.01, 0.1
"""Units inside of an element of a list are gathered and summed by themselves, the others together,
if they have at least this share of the parameters, or of the largest one's: as in
`parallel.state_sharding`."""


class DeviceBytes:
    """Of one combination on its tables.

    Attributes:
        per_byte: Bytes of state per byte of parameters.
        passing: Bytes that update and sum need for a moment, per byte of state.
    """

    def __init__(self, tables: Tables, degrees: Degrees, itemsize: int, shared: Shared) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared
        self.per_byte = state_of(degrees, itemsize, tables.setting.work.optimiser.state)
        self.passing = max(self._updating, self._summing) / self.per_byte

    # -- behind the last backward ------------------------------------------------------------------

    @property
    def _updating(self) -> float:
        """Bytes above the state per byte of parameters while the update runs; with ZeRO a stage's
        whole weights are gone then, and of its gradients but this rank's part is left."""
        degrees, itemsize = self.degrees, self.itemsize
        together = self.tables.setting.work.optimiser.together
        found = together * max(FULL, itemsize) / itemsize / (degrees.data if degrees.zero else 1)
        if degrees.pipeline == 1 or not degrees.zero:
            return found
        return found - 1.0 - gradients_per_byte(itemsize) * (1.0 - 1.0 / degrees.data)

    @property
    def _summing(self) -> float:
        """The same while SYNC sums a stage's gradients over its copies: they lie one after the
        other in a message (`stage_sums`). With ZeRO they become rows, one for each rank, and go;
        all rows are put together in a second tensor, and a third takes this rank's sum
        (`shard_sums`); with ZeRO 3 weights are not gathered then."""
        degrees, message = self.degrees, gradients_per_byte(self.itemsize)
        if degrees.pipeline == 1 or degrees.data * degrees.pipes == 1:
            return 0.0
        if not degrees.zero:
            return message
        return message * (1.0 + 1.0 / degrees.data) - (degrees.zero == 3)

    @cached_property
    def waiting(self) -> Floats:
        """(classes,) bytes above these while SYNC sums a stage's gradients: all samples of a step,
        which the stages of a rank share, and the gradient of what entered it, on its way."""
        if not self._summing:
            return np.zeros(len(self.tables.classes.examples))
        entered: Floats = self.tables.transients.crossing(self.tables.setting)[0, 0]
        return entered + self.samples / (self.degrees.virtual * self.degrees.pipes)

    # -- while micro-batches pass ------------------------------------------------------------------

    def moment(self, cells: Cells) -> Floats:
        """(2, classes, K) bytes for a moment, above state and kept ones."""
        more = cells.more + self.beside[:, None, None]
        if self.degrees.pipeline == 1:
            return more
        in_backward, leaving = self.messages[:, :, : more.shape[1]]
        least = np.maximum(leaving, in_backward + self.gathering * cells.params)
        found: Floats = np.maximum(more + in_backward, least + self.samples)
        return found

    @cached_property
    def first(self) -> Floats:
        """(classes, 2) bytes above state and kept ones in the first backward of a step, where all
        gradients count as state: see `Transients.first`."""
        several, setting = self.degrees.pipeline > 1, self.tables.setting
        first, made = self.tables.transients.first(setting, several=several)
        first = first + self.beside
        if not several:
            return first
        in_backward, leaving = self.messages[..., 0].transpose(0, 2, 1)
        least = np.maximum(leaving, in_backward + self.gathering * made) + self.samples
        found: Floats = np.maximum(first + in_backward, least - made)
        return found

    @cached_property
    def samples(self) -> float:
        """Bytes of what the model is given: of a micro-batch; the ranks of a pipeline have all
        micro-batches of a step."""
        setting, degrees = self.tables.setting, self.degrees
        number = degrees.microbatches if degrees.pipeline > 1 else 1
        return number * sum(setting.bytes_of(name) for name in setting.work.graph.inputs)

    @cached_property
    def messages(self) -> Floats:
        """(2, 2, classes, 1) bytes of messages of a stage of a pipeline, in backward and in forward
        passes, without and with recomputation; see `message_room`."""
        entry, out, left = self.tables.transients.crossing(self.tables.setting)
        found = [n.entering * entry + n.left * left + n.returning * out for n in held(self.degrees)]
        return np.array(found)[..., None]

    @property
    def gathering(self) -> float:
        """Bytes of a moment per byte of parameters while an action of a stage gathers its weights
        (ZeRO 3): all ranks' rows beside the weights that are made of them, and this rank's."""
        degrees = self.degrees
        return 1.0 + 1.0 / degrees.data if degrees.zero == 3 and degrees.pipeline > 1 else 0.0

    @cached_property
    def beside(self) -> Floats:
        """(2,) bytes beside state and transients, whatever the stretch, without and with
        recomputation: samples, and without a pipeline what FSDP2 has."""
        if not self.degrees.zero or self.degrees.pipeline > 1:
            return np.full(2, self.samples)
        return self.samples + self._units

    @cached_property
    def _units(self) -> Floats:
        """(2,) bytes for FSDP2's units, above what a step needs that has no units.

        While a unit's backward runs the message with the gradients of the unit behind it is there
        (of the first unit, from one micro-batch to the next), its own gradients are whole, and with
        ZeRO 3 its weights and the message with those of the unit in front of it. The message with a
        unit's weights stays from its forward until the next unit has its own, and its weights.
        Otherwise weights come with the forwards, stay, and go with the last backwards; behind any
        other one (ZeRO 2) a unit's message is made beside its gradients and its weights.
        """
        degrees, share = self.degrees, self.degrees.gradient_share
        whole, along = float(degrees.zero == 3), self.tables.transients.along
        own = self.own(self.shared.held / degrees.tensor)
        inside = np.array([any(map(str.isdigit, u.layer.split("."))) for u in self.tables.row])
        largest = (own * inside).max(initial=0.0)
        alone = inside & (own >= min(GROUP * own.sum(), OF_LARGEST * largest)) & (own > 0)
        rest, own = own[~alone].sum(), own * alone
        behind, front = _nearest(own[::-1])[::-1], _nearest(own)
        later = (1.0 - whole) * (own.sum() - own.cumsum())
        left = (degrees.microbatches > 1) * (degrees.zero > 1) * max(own[alone][:1], default=0.0)
        sent = (share < 1.0) * np.where(behind > 0, behind, left)
        backward = sent + whole * (own + front) + rest * (whole + 1.0 - share)
        backward -= (degrees.microbatches == 1) * later
        forward = own + np.maximum(whole * own, 2.0 * behind) + whole * (rest + left) - later
        alike = along(self.tables.setting, 0.0)[0]
        (more, first, kept, ended), made = along(self.tables.setting, 1.0 - share)
        now, base = more, alike[0]
        if degrees.late_gradients:  # they are not there yet, and then in parts
            now, base = (share * f + (1.0 - share) * m for m, f in ((more, first), alike[:2]))
        kept = np.minimum.accumulate(np.where(alone[1:, None], kept[:-1], 0.0)[::-1])[::-1]
        ahead = np.concatenate([kept, np.zeros((1, 2))]) + forward[:, None]
        if not whole or degrees.late_gradients:
            ahead -= share * made
        most = np.maximum(now + backward[:, None], ahead).max(axis=0)
        if degrees.zero == 2 and degrees.microbatches > 1:
            ended = ended + (2.0 * own + rest)[:, None]
            ended -= (degrees.microbatches == 2) * share * made  # the first one's are not there yet
            most = np.maximum(most, ended[alone].max(axis=0, initial=-np.inf))
        found: Floats = np.maximum(most - base.max(axis=0), 0.0)
        return found

    def own(self, held: Floats, start: int = 0) -> Floats:
        """Bytes of parameters of each unit from `start` on; what is tied counts with its first
        use."""
        found = held.copy()
        for tie in self.shared.ties:
            inside = [unit - start for unit in tie.units if 0 <= unit - start < len(held)]
            for unit in inside[1:]:
                found[unit] -= tie.bytes / self.degrees.tensor
        return np.maximum(found, 0.0)


def _nearest(own: Floats) -> Floats:
    """Of each unit the bytes of the nearest one in front of it that has some."""
    found, last = np.zeros_like(own), 0.0
    for number, size in enumerate(own.tolist()):
        found[number] = last
        last = size or last
    return found
