"""The cells of a table, cut where gradients leave or parameters arrive while they run.

Invariant: the shares of a cell's chunks add up to one, the bytes that leave in a stage's last
backward to its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.wiring import Wiring, wire
from headway.simulator.work import Piece, StageWork, StepWork

BACKWARD = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
WHOLE = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})
"""Cells that end with gradients of weights."""


class Chunk(NamedTuple):
    """A part of a cell.

    Attributes:
        share: Of the cell's seconds.
        leaves: Bytes of gradients that can be summed when it is done.
        enters: Bytes of parameters that must have been gathered before it.
    """

    share: float = 1.0
    leaves: float = 0.0
    enters: float = 0.0


UNCUT = (Chunk(),)
ROUNDING = 1e-12


class Cells:
    """What the cells of a lowered table are, by their numbers in its wiring."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.table: PipelineSchedule = work.lowered()
        self.wiring: Wiring = wire(self.table, work.costs, shared_links=True)
        self.last: dict[tuple[int, int], int] = {}
        self.all: dict[tuple[int, int], list[int]] = {}
        for place, row in enumerate(self.wiring.order):
            for cell in row:
                action = self.wiring.actions[cell]
                if action.kind in WHOLE:
                    self.last[place, action.stage] = cell
                    self.all.setdefault((place, action.stage), []).append(cell)
        self._leaving = {cell for key in self.all for cell in self.rounds(*key)}
        self._cuts: dict[tuple[int, Kind, bool], tuple[Chunk, ...]] = {}

    def stage(self, cell: int) -> StageWork:
        return self.work.stages[self.wiring.actions[cell].stage]

    def seconds(self, cell: int) -> tuple[float, float]:
        """Of a cell on sound devices; and of those, what are collectives of the tensor axis."""
        action = self.wiring.actions[cell]
        whole = self.stage(cell).update if action.kind == Kind.STEP else self.wiring.seconds[cell]
        return whole, self._collectives(action)

    def _collectives(self, action: Action) -> float:
        """Seconds of the tensor axis within an action."""
        forward, backward = self.work.stages[action.stage].collectives
        again = forward if action.stage in self.table.recompute else 0.0
        found = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: again + backward,
            Kind.INPUT_GRAD: again + backward / 2,
            Kind.WEIGHT_GRAD: backward / 2,
        }.get(action.kind, 0.0)
        return found / 2 if self.table.halves else found

    def memory(self, place: int, action: Action) -> tuple[float, float]:
        """What a cell takes at its start, and frees at its end; one update is of all stages."""
        part = 0.5 if self.table.halves else 1.0
        stage, kind = self.work.stages[action.stage], action.kind
        again = stage.again if action.stage in self.table.recompute else 0.0
        took = freed = 0.0
        if kind == Kind.FORWARD:
            took = stage.kept
        elif kind in BACKWARD:
            took = stage.transient + (again if kind != Kind.WEIGHT_GRAD else 0.0)
            freed = stage.transient + (stage.kept + again if kind in WHOLE else 0.0)
        elif kind == Kind.STEP:
            hosted = {stage for _, stage in self.table.hosted(place)}
            both = sum(self.work.stages[stage].passing for stage in hosted)
            return both, both
        return took * part, freed * part

    def summed(self, stage: int) -> bool:
        """Whether several ranks hold a stage's gradients."""
        return self.work.grid.data * len(self.table.holders(stage)) > 1

    def rounds(self, place: int, stage: int) -> list[int]:
        """The cells behind which gradients of a stage are summed: the last one, or each."""
        if self.work.zero >= 2:
            return self.all.get((place, stage), [])
        return [self.last[place, stage]] if (place, stage) in self.last else []

    def chunks(self, cell: int) -> tuple[Chunk, ...]:
        """Of a cell."""
        action = self.wiring.actions[cell]
        if (
            action.kind not in BACKWARD | {Kind.FORWARD}
            or not self.work.stages[action.stage].pieces
        ):
            return UNCUT
        leaving = cell in self._leaving
        key = (action.stage, action.kind, leaving)
        if key not in self._cuts:
            self._cuts[key] = tuple(self._cut(cell, leaving)) or UNCUT
        return self._cuts[key]

    def _cut(self, cell: int, leaving: bool) -> Iterator[Chunk]:
        work, action = self.work, self.wiring.actions[cell]
        stage, whole = work.stages[action.stage], self.wiring.seconds[cell]
        sharded = work.zero == 3 and work.grid.data > 1
        early = leaving and work.bucket is not None and work.sync != "post"
        if not whole or not (sharded or (early and self.summed(action.stage))):
            return
        if action.kind == Kind.FORWARD:
            own = sum(piece.forward for piece in stage.pieces)
            for seconds, params in _stretches(stage.pieces):
                yield Chunk(seconds / own, 0.0, params)
            return
        # a whole stage that is computed again is, before its first gradient
        again = action.kind != Kind.WEIGHT_GRAD and action.stage in self.table.recompute
        ahead = stage.forward * (0.5 if self.table.halves else 1.0) / whole
        ahead *= again and not self.table.blockwise
        blocks = again and self.table.blockwise
        times = [piece.backward + blocks * piece.forward for piece in stage.pieces]
        own = sum(times)
        found = list(buckets(stage, times, work.bucket or 0.0))
        if not own or not found:
            return
        if found[-1][0] < own * (1.0 - ROUNDING):
            found.append((own, 0.0))  # what comes first in the model may have no parameters
        passed = 0.0
        for number, (until, size) in enumerate(found):
            share = (until - passed) / own * (1.0 - ahead) + (0.0 if number else ahead)
            yield Chunk(share, size if leaving else 0.0, size if sharded else 0.0)
            passed = until


def _stretches(pieces: tuple[Piece, ...]) -> Iterator[tuple[float, float]]:
    """(seconds, bytes of parameters) of a forward pass: what has no parameters goes with those
    before it."""
    seconds = params = 0.0
    for piece in pieces:
        if piece.params and params:
            yield seconds, params
            seconds = params = 0.0
        seconds += piece.forward
        params += piece.params
    yield seconds, params


def buckets(stage: StageWork, times: Sequence[float], size: float) -> Iterator[tuple[float, float]]:
    """(seconds of backward until the gradients of a bucket are there, their bytes), in order.

    Gradients come evenly while a piece's backward runs; a bucket leaves when it is full, or, with
    size 0, with the end of its piece.

    Args:
        stage: Whose gradients; where it says itself what leaves, that counts.
        times: Seconds of backward of each piece.
        size: Bytes of a bucket.
    """
    if stage.leaving:
        for number, filled in stage.leaving:
            yield math.fsum(times[number:]), filled
        return
    done = filled = 0.0
    for piece, seconds in zip(reversed(stage.pieces), reversed(times), strict=True):
        rest = piece.params
        while size and filled + rest >= size:
            rest -= size - filled
            yield done + seconds * (1.0 - rest / piece.params), size
            filled = 0.0
        filled += rest
        done += seconds
        if not size and filled:
            yield done, filled
            filled = 0.0
    if filled:
        yield done, filled
