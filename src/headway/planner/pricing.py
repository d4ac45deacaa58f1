"""What a combination of degrees makes of the costs of stretches: exchange, table, update.

Invariant: `rows` of a stretch are never above what `alone` and `pipeline` price of its units, so
that bounds made of rows hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from headway.cluster.device import Host
from headway.cost.device import Number
from headway.planner.degrees import Degrees
from headway.planner.device_bytes import DeviceBytes
from headway.planner.operators import Floats
from headway.planner.overlap import BUCKETS, bucketed, hidden_at_most, passes, played
from headway.planner.schemes import Book
from headway.planner.shared import Shared
from headway.planner.stages import Cells, Tables
from headway.planner.timetable import Wire, Work


class Rows:
    """Columns: seconds of a micro-batch; of a step's end, with what of the exchange nothing hides;
    bytes of state; kept by one micro-batch; seconds of its forward pass; the same without gathers;
    bytes of parameters; of the step's end, what follows when the gradients have been summed; bytes
    for a moment, above state and kept ones."""

    SECONDS: Final = 0
    TAIL: Final = 1
    STATE: Final = 2
    KEPT: Final = 3
    FORWARD: Final = 4
    COMPUTE: Final = 5
    PARAMS: Final = 6
    AFTER: Final = 7
    MORE: Final = 8


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of a step, as the attributes of `candidate.Point` say."""

    seconds: float
    messages: float = 0.0
    exposed: float
    hidden: float
    update: float
    busy: float
    bucket: float = 0.0
    reading: float = 0.0


def host_seconds(host: Host, degrees: Degrees, tensors: int) -> float:
    """What a step takes beside kernels, update and exchange.

    Args:
        host: Of the device.
        degrees: Of the plan; what a pipeline's passes take is part of them.
        tensors: That are trained; the stages of a pipeline have as many each.
    """
    if degrees.pipeline > 1:
        return host.piped_step + tensors / degrees.pipeline * host.tensor
    return host.step + degrees.microbatches * host.microbatch + tensors * host.tensor


class Pricing(DeviceBytes):
    """Of one combination on its tables."""

    def __init__(self, tables: Tables, degrees: Degrees, itemsize: int, shared: Shared) -> None:
        super().__init__(tables, degrees, itemsize, shared)
        self.machine = tables.setting.machine
        self.overlap = self.machine.device.overlap
        self._messages: dict[tuple[int, int], tuple[float, float]] = {}
        self._links: tuple[Book, list[float], Floats] | None = None
        self._passes: dict[tuple[int, int, int, int, str], tuple[float, float]] = {}

    # -- stretches -------------------------------------------------------------------------------

    def rows(self, cells: Cells) -> Floats:
        """(classes, 2, K, 9) as `Rows` says, column by column in memory."""
        forward, backward, params = cells.forward, cells.backward, cells.params
        ahead, back = forward, backward
        if self.degrees.zero >= 2:
            gather, scatter = self._in_passes(params)
            ahead = forward + gather - hidden_at_most(gather, forward, self.overlap)
            sent = gather + scatter
            back = backward + sent - hidden_at_most(sent, backward, self.overlap)
        after = cells.step + self.after(params)
        tail = self._behind(params, backward) + after
        state = params * self.per_byte
        more = self.moment(cells)
        own = (ahead + back, tail, state, cells.kept, ahead, forward, params, after, more)
        return np.moveaxis(np.stack(own), (0, 1), (3, 1))

    @staticmethod
    def backward(rows: Floats) -> Floats:
        """Seconds of the backward pass of a micro-batch."""
        found: Floats = rows[..., Rows.SECONDS] - rows[..., Rows.FORWARD]
        return found

    def updated(self, rows: Floats) -> Floats:
        """Bytes while the update runs, when nothing is kept."""
        found: Floats = rows[..., Rows.STATE] * (1.0 + self.passing)
        return found

    def _in_passes(self, params: Floats) -> tuple[Floats, Floats]:
        """(all-gather in each pass, reduce-scatter behind backward) of every micro-batch."""
        zero, nothing = self.degrees.zero, np.zeros_like(params)
        scatter = self._scattered(params) if zero >= 2 else nothing
        return (self._gathered(params) if zero == 3 else nothing), scatter

    def _behind(self, params: Floats, backward: Floats) -> Floats:
        """The sum of a step's gradients, without what the last backward can hide at most."""
        if self.degrees.zero >= 2:
            return np.zeros_like(params)
        sent = self.summed(params)
        if self.degrees.pipeline > 1:
            return sent
        return sent - hidden_at_most(sent, backward, self.overlap)

    def after(self, params: Floats) -> Number:
        """What follows when all gradients are there: the update, and ZeRO 1 and 2's new weights."""
        gathered = self._gathered(params) if self.degrees.zero in (1, 2) else 0.0
        return self._update(params) + gathered

    def _update(self, params: Number) -> Number:
        """The optimiser's step, and all but the first micro-batch's adding up of gradients, which
        moves three bytes per byte of them. On devices that were measured kind by kind, gradients
        that are summed are copied into buckets: two."""
        shared = self.degrees.data if self.degrees.zero else 1
        device, moved = self.machine.device, 3.0 * (self.degrees.microbatches - 1)
        if device.kinds and self.degrees.data > 1:
            moved += 2.0
        step = device.update * params / self.itemsize / shared
        return step + device.seconds_of_elementwise(moved * params)

    @cached_property
    def reading(self) -> float:
        """Putting a step's samples together, which each rank does for its copy before it begins:
        one by one, and what they move."""
        setting, degrees = self.tables.setting, self.degrees
        tensors = [t for t in setting.work.graph.inputs if t in setting.work.batch_dims]
        samples = degrees.microbatch * degrees.microbatches
        if not self.machine.device.gather or not setting.work.reads:
            return 0.0
        moved = 2.0 * degrees.microbatches * sum(setting.bytes_of(t) for t in tensors)
        one_by_one = self.machine.device.gather * samples * len(tensors)
        return one_by_one + float(self.machine.device.seconds_of_elementwise(moved))

    @cached_property
    def host(self) -> float:
        """What a step takes beside all that is priced one by one."""
        tensors = len(self.shared.gradients.sizes)
        return host_seconds(self.machine.device.host, self.degrees, tensors)

    def host_microbatch(self, stages: int) -> float:
        """What the host adds to both passes of a micro-batch through one of so many stages."""
        if self.degrees.pipeline == 1:
            return 0.0
        return self.machine.device.host.piped_microbatch / stages * self.degrees.pipeline

    @cached_property
    def _stride(self) -> int:
        return self.degrees.stride("data")

    def _gathered(self, size: Floats) -> Floats:
        found: Floats = np.asarray(
            self.machine.network.all_gather(size, self.degrees.data, self._stride)
        )
        return found

    def _scattered(self, size: Floats) -> Floats:
        found: Floats = np.asarray(
            self.machine.network.reduce_scatter(size, self.degrees.data, self._stride)
        )
        return found

    def summed(self, size: Floats) -> Floats:
        """Gradients over all that hold them: the data axis, and the copies of a stage."""
        degrees, network, group = self.degrees, self.machine.network, self.degrees.data
        stride = self._stride
        if degrees.pipes > 1:
            group *= degrees.pipes
            apart = degrees.stride("pipe") * max(1, degrees.pipeline // degrees.pipes)
            stride = apart if degrees.data == 1 else min(stride, apart)
        price = network.reduce_scatter if degrees.zero else network.all_reduce
        found: Floats = np.asarray(price(size, group, stride))
        return found

    # -- a whole step ----------------------------------------------------------------------------

    def alone(
        self,
        again: int,
        price: int,
        params: float,
        *,
        after: float,
        buckets: Sequence[float] = BUCKETS,
        overlap: bool = True,
    ) -> Price:
        """Of a step without a pipeline.

        Args:
            again: 1: units keep only what enters them.
            price: The strategy, as in `Stage.price`.
            params: Bytes of parameters of a device.
            after: Seconds of what follows when the gradients have been summed.
            buckets: Sizes of a bucket to choose from.
            overlap: Whether gradients leave before backward has ended.
        """
        units = self.units(0, len(self.tables.row), again, price, "R")
        forward, backward = units[:, 0], units[:, 1] + again * units[:, 0]
        m, zero = self.degrees.microbatches, self.degrees.zero
        share = self.overlap if overlap else 0.0
        compute = m * float(forward.sum() + backward.sum())
        own, bucket = self.own(units[:, 3]), 0.0
        if self.degrees.data == 1:
            sent = exposed = 0.0
        elif zero >= 2:
            gathers = self._gathered(own) if zero == 3 else None
            scatters = self._scattered(own)
            _, found = played(forward, backward, scatters, gathers, m, overlap=share)
            sent, exposed = found.seconds, found.exposed
        else:
            held = self.shared.held
            part = np.where(held > 0, units[:, 3] / np.maximum(held, 1.0), 0.0)
            sent, exposed, bucket = bucketed(
                self.shared.gradients,
                backward,
                part,
                self.summed,
                limits=buckets,
                overlap=share,
            )
        update = float(self._update(params))
        late = exposed + after - update
        return Price(
            seconds=compute + late + update + self.reading + self.host,
            exposed=late,
            hidden=sent - exposed,
            update=update,
            busy=compute,
            bucket=bucket,
            reading=self.reading,
        )

    def units(self, start: int, stop: int, again: int, price: int, border: str) -> Floats:
        """(units, 5): `operators.PARTS` of every unit of a stretch with this strategy."""
        row, tables = self.tables.row[start:stop], self.tables
        if self.degrees.tensor == 1:
            kinds = {unit.kind: tables.solved(unit.kind).rows[again, price, 0, 0] for unit in row}
            return np.stack([kinds[unit.kind] for unit in row])
        ends = tables.place(row[0].entry, border), tables.place(row[-1].exit, border)
        way = tables.path(start, stop, again, price, ends)
        return np.stack(
            [
                tables.solved(unit.kind).rows[(again, price, *pair)]
                for unit, pair in zip(row, way, strict=True)
            ]
        )

    def split_passes(
        self, start: int, stop: int, again: int, price: int, border: str
    ) -> tuple[float, float] | None:
        """(forward, backward) seconds of a stage of a pipeline whose units are gathered or
        scattered in every micro-batch (ZeRO 2 and 3); None: nothing is."""
        zero = self.degrees.zero
        if zero < 2 or self.degrees.pipeline == 1:
            return None
        tied = any(start <= unit < stop for tie in self.shared.ties for unit in tie.units)
        number = -1 - start if tied else int(self.tables.classes.of[start, stop])
        key = (number, stop - start, again, price, border)
        if key not in self._passes:
            units = self.units(start, stop, again, price, border)
            own = self.own(units[:, 3], start)
            ahead, back, late = passes(
                units[:, 0],
                units[:, 1] + again * units[:, 0],
                self._scattered(own),
                self._gathered(own) if zero == 3 else None,
                overlap=self.overlap,
            )
            self._passes[key] = ahead, back + late
        return self._passes[key]

    def pipeline(
        self,
        book: Book,
        border: str,
        *,
        starts: Sequence[int],
        forward: Sequence[float],
        seconds: Sequence[float],
        weight: Sequence[float],
        params: Sequence[float],
        after: Sequence[float],
        parts: bool = True,
    ) -> Price:
        """Of a step of a pipeline: the table, played with its stages, messages and sums.

        Args:
            book: Of the schedule.
            border: Placement of what crosses from stage to stage.
            starts: The first unit of each stage.
            forward: Seconds of each stage's forward pass, of one micro-batch.
            seconds: Of both passes.
            weight: Of those, of the gradients of weights.
            params: Bytes of each stage's parameters.
            after: Seconds of each stage of what follows when the gradients have been summed.
            parts: False: all but the seconds is left open, which takes a third of the time.
        """
        beside = self.host_microbatch(len(starts))
        backward = [s - f + beside / 2 for s, f in zip(seconds, forward, strict=True)]
        forward, seconds = [f + beside / 2 for f in forward], [s + beside for s in seconds]
        work = Work(forward, backward, weight)
        wire = self.wire(book, border, starts)
        sums = self.sums(starts, np.array(params))
        hosted = book.table.hosted
        last = max(sum(after[stage] for stage in stages) for stages in hosted)
        held = max(sum(params[stage] for stage in stages) for stages in hosted)
        update = float(self._update(held))
        if not parts:
            whole = book.play(work, wire, sums).finish + last + self.reading + self.host
            return Price(seconds=whole, exposed=0.0, hidden=0.0, update=update, busy=0.0)
        bare = book.play(work).finish
        sent = book.play(work, wire).finish if any(map(any, wire)) else bare
        summed = book.play(work, wire, sums).finish if any(sums) else sent
        busy = max(
            sum(n * seconds[stage] for n, stage in zip(numbers, stages, strict=True))
            for numbers, stages in zip(book.computed, hosted, strict=True)
        )
        exposed = summed - sent
        return Price(
            seconds=summed + last + self.reading + self.host,
            messages=sent - bare,
            exposed=exposed + last - update,
            hidden=max(0.0, max(sums) - exposed),
            update=update,
            busy=busy,
            reading=self.reading,
        )

    def wire(self, book: Book, border: str, starts: Sequence[int]) -> Wire:
        """Latency and seconds of the bytes of one micro-batch's tensor at each border."""
        if self._links is None or self._links[0] is not book:
            found = [[self._message(pair) for pair in pairs] for pairs in book.table.joins]
            latencies = [max((one for one, _ in each), default=0.0) for each in found]
            per_byte = [max((one for _, one in each), default=0.0) for each in found]
            self._links = book, latencies, np.array(per_byte)
        size = self.tables.crossing(border)[list(starts[1:])]
        return Wire(self._links[1], (size * self._links[2]).tolist())

    def _message(self, pair: tuple[int, int]) -> tuple[float, float]:
        """(latency, seconds per byte) of a message between two ranks of a pipeline, in the copy
        that has the slowest link between them; neighbours send at the same time."""
        if pair not in self._messages:
            degrees = self.degrees
            copies = np.arange(degrees.data) * degrees.stride("data")
            one, two = (copies + place * degrees.stride("pipe") for place in pair)
            inner, levels = 1.0, self.machine.network.levels
            for level in levels:
                if level is levels[-1] or (one // level.width == two // level.width).all():
                    break
                inner = level.width
            link = level.message or level.link
            shared = min(degrees.stride("pipe"), inner) / level.link.rate
            self._messages[pair] = link.latency, max(1.0 / link.rate, shared)
        return self._messages[pair]

    def sums(self, starts: Sequence[int], params: Floats) -> list[float]:
        """Seconds of the sum of each stage's gradients; what several stages use is summed between
        them, too, with the first of them, whose gradients come last."""
        if self.degrees.zero >= 2:
            found = [0.0] * len(params)
        elif self.degrees.data * self.degrees.pipes > 1:
            found = self.summed(params).tolist()
        else:
            found = [0.0] * len(params)
        network, stride = self.machine.network, self.degrees.stride("pipe")
        borders = (*starts, len(self.tables.row))
        for size, first, last, stages in self.shared.between(borders):
            apart = stride * max(1, (last - first) // max(1, stages - 1))
            size_ = size / self.degrees.tensor
            found[first] += float(network.all_reduce(size_, stages, apart))
        return found
