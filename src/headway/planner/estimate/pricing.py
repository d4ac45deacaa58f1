"""Seconds and bytes of a step for one combination of degrees: exchange, table, update, memory.

`Pricing` turns the costs of intervals into rows of a table, and prices a whole cut with its
schedule, gradient exchange and optimiser update. A row is never above what the cut made of it is
priced at, so bounds made of rows hold. `StrategiesByTime` finds what fits in one sweep.

`DeviceMemory` counts what a device holds beside weights, gradients, optimiser state and saved
activations: samples, messages of the pipeline, what FSDP2 gathers and sums unit by unit, the sum of
a stage's gradients. A message that arrives has memory from its POST on; one that has left keeps it
until the table proves that it has arrived (`schedule.lowering`).

Sources: Zhao et al. 2023 (FSDP); torch 2.13, `fsdp/_fully_shard/_fsdp_param_group.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np

from headway.cluster.device import HostOverhead
from headway.cost.device import Array, Number
from headway.errors import PlanError
from headway.planner.estimate.degrees import FULL, Degrees, gradients_per_byte, state_per_byte
from headway.planner.estimate.gradient_exchange import (
    BUCKETS,
    ModelParameters,
    bucket_exchange,
    most_hidden,
    sharded_exchange,
    sharded_passes,
)
from headway.planner.estimate.pipeline_time import PeriodicTable, PointStage
from headway.planner.estimate.segments import IntervalStrategies, SegmentTables
from headway.schedule.generators.registry import ScheduleOption, make_schedule
from headway.schedule.lowering import completed_sends, lower
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule
from headway.schedule.timing import StageMessages, StagePasses

# Of the longest pipeline whose table is looked at: messages are posted four computes ahead.
RANKS = 8
# Micro-batches for each of its ranks: the table's steady state.
ROUNDS = 3
# What is received is used by the next action, which counts it.
_STEP = {ActionKind.SEND: 1, ActionKind.POST: 1, ActionKind.RECV: -1}
_BACK = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRAD})
_AHEAD = frozenset({ActionKind.FORWARD, ActionKind.SEND})
_ENDS = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})


class MessageBuffers(NamedTuple):
    """Messages of a stage, the most of any stage.

    Attributes:
        entering: What has come for later forwards, or has memory to come; and the gradients of what
            entered, on their way back.
        left: What has left, on its way.
        returning: Gradients of what has left, but for the one that backward works with.
    """

    entering: int = 0
    left: int = 0
    returning: int = 0


Both = tuple[MessageBuffers, MessageBuffers]
"""While a backward runs, and when a forward has ended and its result leaves."""


def message_buffers(degrees: Degrees) -> Both:
    """Of a combination's stages, whatever their number."""
    scheme = ScheduleOption(degrees.schedule, degrees.virtual, degrees.pipes)
    p, m = degrees.pipeline, degrees.microbatches
    few = min(p, RANKS)
    # Up to as many micro-batches as ranks all are under way at once on the first one.
    return _message_buffers(scheme, few, min(m, (ROUNDS if m > p else 1) * few))


@lru_cache(maxsize=512)
def _message_buffers(scheme: ScheduleOption, ranks: int, microbatches: int) -> Both:
    if ranks == 1:
        return MessageBuffers(), MessageBuffers()
    try:
        table = make_schedule(
            scheme.name,
            stages=ranks,
            microbatches=microbatches,
            virtual=scheme.virtual,
            pipes=scheme.pipes,
        )
    except PlanError:  # fewer ranks or micro-batches than it can have
        few = MessageBuffers(entering=2, left=1, returning=2)
        return few, few
    lowered = lower(table)
    back, ahead = zip(*(_of_rank(lowered, rank) for rank in range(ranks)), strict=True)
    return _most(back), _most(ahead)


def _most(each: Iterable[MessageBuffers]) -> MessageBuffers:
    return MessageBuffers(*map(max, zip(*each, strict=True)))


def _of_rank(table: PipelineSchedule, rank: int) -> Both:
    row = table.order[rank]
    # A message that has left is freed when the table proves that it has arrived.
    retired = completed_sends(table, rank)
    now: Counter[str] = Counter()
    under_way = 0
    found = {key: (0, MessageBuffers()) for key in (_BACK, _AHEAD)}
    for position, action in enumerate(row):
        now[_name(action)] += _STEP.get(action.kind, 0)
        for sent in retired.get(position, ()):
            now[_name(row[sent])] -= 1
        under_way += action.kind == ActionKind.FORWARD
        here = MessageBuffers(now["comes"] + now["goes back"], now["leaves"], now["returns"])
        for kinds, (most, fullest) in found.items():
            # Messages count at the moment with the most micro-batches under way, when a stage keeps
            # most.
            if action.kind in kinds and (under_way, sum(here)) > (most, sum(fullest)):
                found[kinds] = under_way, here
        # After the comparison: the pass still holds its own micro-batch while it runs.
        under_way -= action.kind in _ENDS
    return found[_BACK][1], found[_AHEAD][1]


def _name(action: Action) -> str:
    """What a SEND or POST gives memory to."""
    if action.kind == ActionKind.SEND:
        return "goes back" if action.carries_gradient else "leaves"
    return "returns" if action.carries_gradient else "comes"


GROUP, OF_LARGEST = 0.01, 0.1
"""Units inside of an element of a list are gathered and summed by themselves, the others together,
if they have at least this share of the parameters, or of the largest one's: as in
`parallel.state_sharding`."""


class DeviceMemory:
    """What a device holds for a moment: of one combination on its tables.

    Attributes:
        per_byte: Bytes of state per byte of parameters.
        passing: Bytes that update and sum need for a moment, per byte of state.
    """

    def __init__(
        self, tables: SegmentTables, degrees: Degrees, itemsize: int, shared: ModelParameters
    ) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared
        self.per_byte = state_per_byte(itemsize, degrees, tables.setting.work.optimiser.state)
        self.passing = max(self._updating, self._summing) / self.per_byte

    @property
    def _updating(self) -> float:
        """Bytes above the state per byte of parameters while the update runs."""
        degrees, itemsize = self.degrees, self.itemsize
        together = self.tables.setting.work.optimiser.together
        # The update's temporaries are in 32 bits; with ZeRO they cover this rank's part only.
        found = together * max(FULL, itemsize) / itemsize / (degrees.data if degrees.zero else 1)
        if degrees.pipeline == 1 or not degrees.zero:
            return found
        # With ZeRO a stage's whole weights are freed by then, and of its gradients only this rank's
        # part is left.
        return found - 1.0 - gradients_per_byte(itemsize) * (1.0 - 1.0 / degrees.data)

    @property
    def _summing(self) -> float:
        """The same while SYNC sums a stage's gradients over its copies."""
        degrees, message = self.degrees, gradients_per_byte(self.itemsize)
        if degrees.pipeline == 1 or degrees.data * degrees.pipes == 1:
            return 0.0
        # The gradients lie one after the other in a message (`pipeline/data_parallel.py`).
        if not degrees.zero:
            return message
        # With ZeRO they become rows, one for each rank, and go; all rows are put together in a
        # second tensor, and a third takes this rank's sum; with ZeRO 3 weights are not gathered
        # then.
        return message * (1.0 + 1.0 / degrees.data) - (degrees.zero == 3)

    @cached_property
    def waiting(self) -> Array:
        """(classes,) bytes above these while SYNC sums a stage's gradients."""
        if not self._summing:
            return np.zeros(len(self.tables.classes.examples))
        # All samples of a step, which the stages of a rank share, and the gradient of what entered
        # it, on its way.
        entered: Array = self.tables.transients.crossing(self.tables.setting)[0, 0]
        return entered + self.samples / (self.degrees.virtual * self.degrees.pipes)

    def moment(self, cells: IntervalStrategies) -> Array:
        """(2, classes, K) transient bytes, above state and kept ones."""
        more = cells.more + self.beside[:, None, None]
        if self.degrees.pipeline == 1:
            return more
        in_backward, leaving = self.messages[:, :, : more.shape[1]]
        least = np.maximum(leaving, in_backward + self.gathering * cells.params)
        return np.asarray(np.maximum(more + in_backward, least + self.samples))

    @cached_property
    def first(self) -> Array:
        """(classes, 2) bytes above state and kept ones in the first backward of a step, where all
        gradients count as state: see `TransientMemory.first`."""
        several, setting = self.degrees.pipeline > 1, self.tables.setting
        first, made = self.tables.transients.first(setting, several=several)
        first = first + self.beside
        if not several:
            return first
        in_backward, leaving = self.messages[..., 0].transpose(0, 2, 1)
        least = np.maximum(leaving, in_backward + self.gathering * made) + self.samples
        return np.asarray(np.maximum(first + in_backward, least - made))

    @cached_property
    def samples(self) -> float:
        """Bytes of what the model is given."""
        setting, degrees = self.tables.setting, self.degrees
        # Of a micro-batch; the ranks of a pipeline have all micro-batches of a step.
        number = degrees.microbatches if degrees.pipeline > 1 else 1
        return number * sum(setting.bytes_of(name) for name in setting.work.graph.inputs)

    @cached_property
    def messages(self) -> Array:
        """(2, 2, classes, 1) bytes of messages of a stage of a pipeline, in backward and in forward
        passes, without and with recomputation."""
        entry, out, left = self.tables.transients.crossing(self.tables.setting)
        found = [
            n.entering * entry + n.left * left + n.returning * out
            for n in message_buffers(self.degrees)
        ]
        return np.array(found)[..., None]

    @property
    def gathering(self) -> float:
        """Transient bytes per byte of parameters while a stage gathers its weights (ZeRO 3)."""
        degrees = self.degrees
        # All ranks' rows beside the weights that are made of them, and this rank's.
        return 1.0 + 1.0 / degrees.data if degrees.zero == 3 and degrees.pipeline > 1 else 0.0

    @cached_property
    def beside(self) -> Array:
        """(2,) bytes beside state and transients, whatever the interval, without and with
        recomputation."""
        if not self.degrees.zero or self.degrees.pipeline > 1:
            return np.full(2, self.samples)
        return self.samples + self._units

    @cached_property
    def _units(self) -> Array:
        """(2,) bytes for FSDP2's units, above what a step needs that has no units."""
        degrees, share = self.degrees, self.degrees.gradient_share
        whole, along = float(degrees.zero == 3), self.tables.transients.along
        own = self.own(self.shared.held / degrees.tensor)
        # Units inside of an element of a list are gathered by themselves, the others together.
        inside = np.array([any(map(str.isdigit, u.layer.split("."))) for u in self.tables.row])
        largest = (own * inside).max(initial=0.0)
        alone = inside & (own >= min(GROUP * own.sum(), OF_LARGEST * largest)) & (own > 0)
        rest, own = own[~alone].sum(), own * alone
        behind, front = _nearest(own[::-1])[::-1], _nearest(own)
        later = (1.0 - whole) * (own.sum() - own.cumsum())
        left = (degrees.microbatches > 1) * (degrees.zero > 1) * max(own[alone][:1], default=0.0)
        # While a unit's backward runs the message with the gradients of the unit behind it is there
        # (of the first unit, from one micro-batch to the next), its own gradients are whole, and
        # with ZeRO 3 its weights and the message with those of the unit in front of it.
        sent = (share < 1.0) * np.where(behind > 0, behind, left)
        backward = sent + whole * (own + front) + rest * (whole + 1.0 - share)
        backward -= (degrees.microbatches == 1) * later
        # The message with a unit's weights stays from its forward until the next unit has its own,
        # and its weights. Without ZeRO 3 weights come with the forwards, stay, and go with the last
        # backwards.
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
        # Behind any other backward of ZeRO 2 a unit's message is made beside its gradients and its
        # weights.
        if degrees.zero == 2 and degrees.microbatches > 1:
            ended = ended + (2.0 * own + rest)[:, None]
            ended -= (degrees.microbatches == 2) * share * made  # the first one's are not there yet
            most = np.maximum(most, ended[alone].max(axis=0, initial=-np.inf))
        return np.asarray(np.maximum(most - base.max(axis=0), 0.0))

    def own(self, held: Array, start: int = 0) -> Array:
        """Bytes of parameters of each unit from `start` on; what is tied counts with its first
        use."""
        found = held.copy()
        for tie in self.shared.ties:
            inside = [unit - start for unit in tie.units if 0 <= unit - start < len(held)]
            for unit in inside[1:]:
                found[unit] -= tie.bytes / self.degrees.tensor
        return np.maximum(found, 0.0)


def _nearest(own: Array) -> Array:
    """Of each unit the bytes of the nearest one in front of it that has some."""
    found, last = np.zeros_like(own), 0.0
    for number, size in enumerate(own.tolist()):
        found[number] = last
        last = size or last
    return found


class IntervalRows:
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


# Up to so many numbers of micro-batches in flight each is looked up of its own.
FEW = 8


class StrategiesByTime(NamedTuple):
    """(classes, n) strategies, the fastest first, and (classes, n + 1): behind them one of infinite
    time.

    Attributes:
        seconds: Of a micro-batch, with the share in a step's end.
        state: Bytes.
        kept: Bytes of one micro-batch.
        more: Transient bytes.
        updated: Bytes while the update runs.
        all: How many are all micro-batches of a step.
        first: As `more`, with all of them in flight; None: the same.
    """

    place: np.ndarray
    seconds: Array
    state: Array
    kept: Array
    more: Array
    updated: Array
    all: int
    first: Array | None = None

    def fitting(self, cap: float, most: int) -> np.ndarray:
        """(classes, n): how many micro-batches in flight fit into so many bytes, at most `most`."""

        def fits(number: np.ndarray | int) -> np.ndarray:
            return self.state + number * self.kept + self.more <= cap

        room = cap - self.more - self.state
        # kept is 0 where nothing is saved; np.where evaluates both branches.
        with np.errstate(divide="ignore", invalid="ignore"):
            number = np.where(self.kept > 0, room / self.kept, most * fits(0))
        found = np.clip(number, 0, most).astype(np.int64)
        found += (found < most) & fits(found + 1)  # the division may be off by one either way
        found -= (found > 0) & ~fits(found)
        # The update needs its memory whatever the number of micro-batches.
        found[self.updated > cap] = 0
        return found

    def picked(self, cap: float, flights: np.ndarray) -> tuple[Array, np.ndarray]:
        """(numbers, classes): the least seconds with so many micro-batches under way, infinite
        where nothing fits, and the strategy.

        Args:
            flights: Numbers of micro-batches, ascending.
        """
        # Strategies are sorted by time: one that fits no more than a faster one is never picked.
        upto = np.maximum.accumulate(self.fitting(cap, int(flights[-1])), axis=1)
        ways = _first_above(upto, flights)
        if self.first is not None and flights[-1] == self.all:
            held = self.state + self.all * self.kept + self.first
            fits = (held <= cap) & (self.updated <= cap)
            # With all micro-batches under way the first backward finds no gradients yet: another
            # bound.
            ways[:, -1] = np.where(fits.any(axis=1), fits.argmax(axis=1), fits.shape[1])
        lines = np.arange(len(ways))[:, None]
        return self.seconds[lines, ways].T, self.place[lines, ways].T


def sort_strategies(
    rows: Array,
    microbatches: int,
    passing: float,
    first: Array | None = None,
    waiting: Array | float = 0.0,
) -> StrategiesByTime:
    """From rows (classes, ways, K, columns) as `IntervalRows` says.

    Args:
        rows: Without recomputation, and with it where that may be.
        passing: Bytes that the update needs for a moment, per byte of state.
        first: (classes, ways, K) bytes for a moment with all micro-batches under way.
        waiting: (classes, 1) bytes above what the update needs, as `DeviceMemory.waiting`.
    """
    flat = (len(rows), -1)
    value = (rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL] / microbatches).reshape(
        flat
    )
    order = value.argsort(axis=1, kind="stable")
    state, kept, more = (
        np.take_along_axis(rows[..., column].reshape(flat), order, 1)
        for column in (IntervalRows.STATE, IntervalRows.KEPT, IntervalRows.MORE)
    )
    # One place more, of infinite time, is what is picked where nothing fits.
    none = ((0, 0), (0, 1))
    seconds = np.take_along_axis(value, order, 1)
    return StrategiesByTime(
        np.pad(order, none),
        np.pad(seconds, none, constant_values=np.inf),
        state,
        kept,
        more,
        state * (1.0 + passing) + waiting,
        microbatches,
        None if first is None else np.take_along_axis(first.reshape(flat), order, 1),
    )


def _first_above(upto: np.ndarray, flights: np.ndarray) -> np.ndarray:
    """(classes, flights): the first place at which a rising row (classes, n) is as high."""
    most = int(flights[-1])
    if len(flights) <= FEW:
        return np.stack([(upto < flight).sum(axis=1) for flight in flights], axis=1)
    steps = np.diff(upto, axis=1, prepend=0, append=most)
    # Each place stands as often as it raises the row: column f - 1 is the first that reaches f.
    places = np.tile(np.arange(steps.shape[1]), len(steps))
    whole = np.repeat(places, steps.ravel()).reshape(len(upto), most)
    return whole[:, flights - 1]


@dataclass(frozen=True, kw_only=True)
class CandidatePrice:
    """Seconds of a step, as the attributes of `plan_point.Point` say."""

    seconds: float
    messages: float = 0.0
    exchange: float
    hidden: float
    update: float
    busy: float
    bucket: float = 0.0
    reading: float = 0.0


def host_seconds(host: HostOverhead, degrees: Degrees, tensors: int) -> float:
    """What a step takes beside kernels, update and exchange.

    Args:
        tensors: That are trained; the stages of a pipeline have as many each.
    """
    if degrees.pipeline > 1:
        # What the passes of a pipeline take on the host is part of them.
        return host.piped_step + tensors / degrees.pipeline * host.tensor
    return host.step + degrees.microbatches * host.microbatch + tensors * host.tensor


class Pricing:
    """Of one combination on its tables."""

    def __init__(
        self, tables: SegmentTables, degrees: Degrees, itemsize: int, shared: ModelParameters
    ) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared
        self.memory = DeviceMemory(tables, degrees, itemsize, shared)
        self.machine = tables.setting.machine
        self.overlap = self.machine.device.overlap
        self._messages: dict[tuple[int, int], tuple[float, float]] = {}
        self._links: tuple[PeriodicTable, list[float], Array] | None = None
        self._passes: dict[tuple[int, int, int, int, str], tuple[float, float]] = {}

    def rows(self, cells: IntervalStrategies) -> Array:
        """(classes, 2, K, 9) as `IntervalRows` says, column by column in memory."""
        forward, backward, params = cells.forward, cells.backward, cells.params
        ahead, back = forward, backward
        if self.degrees.zero >= 2:
            # Every micro-batch: an all-gather in each pass, a reduce-scatter behind backward.
            gather = self._gathered(params) if self.degrees.zero == 3 else np.zeros_like(params)
            scatter = self._scattered(params)
            ahead = forward + gather - most_hidden(gather, forward, self.overlap)
            # Backward gathers the weights again and scatters the gradients behind each unit.
            sent = gather + scatter
            back = backward + sent - most_hidden(sent, backward, self.overlap)
        after = cells.step + self.after(params)
        tail = self._behind(params, backward) + after
        state = params * self.memory.per_byte
        more = self.memory.moment(cells)
        own = (ahead + back, tail, state, cells.kept, ahead, forward, params, after, more)
        # Contiguous by column: bounds and sorts read one column of all strategies at a time.
        return np.moveaxis(np.stack(own), (0, 1), (3, 1))

    @staticmethod
    def backward(rows: Array) -> Array:
        """Seconds of the backward pass of a micro-batch."""
        return np.asarray(rows[..., IntervalRows.SECONDS] - rows[..., IntervalRows.FORWARD])

    def updated(self, rows: Array) -> Array:
        """Bytes while the update runs, when nothing is kept."""
        return np.asarray(rows[..., IntervalRows.STATE] * (1.0 + self.memory.passing))

    def _behind(self, params: Array, backward: Array) -> Array:
        """The sum of a step's gradients, without what the last backward can hide at most."""
        if self.degrees.zero >= 2:
            return np.zeros_like(params)
        sent = self.summed(params)
        if self.degrees.pipeline > 1:
            return sent
        return sent - most_hidden(sent, backward, self.overlap)

    def after(self, params: Array) -> Number:
        """What follows when all gradients are made: the update, and ZeRO 1 and 2's new weights."""
        gathered = self._gathered(params) if self.degrees.zero in (1, 2) else 0.0
        return self._update(params) + gathered

    def _update(self, params: Number) -> Number:
        shared = self.degrees.data if self.degrees.zero else 1
        # All but the first micro-batch add up gradients, which moves three bytes per byte of them.
        device, moved = self.machine.device, 3.0 * (self.degrees.microbatches - 1)
        if device.kinds and self.degrees.data > 1:
            # On devices that were measured kind by kind, gradients that are summed are copied into
            # buckets.
            moved += 2.0
        step = device.update * params / self.itemsize / shared
        return step + device.seconds_of_elementwise(moved * params)

    @cached_property
    def reading(self) -> float:
        """Seconds in which each rank collates a step's samples for its copy before the step
        begins."""
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

    def _gathered(self, size: Array) -> Array:
        network = self.machine.network
        return np.asarray(network.all_gather(size, self.degrees.data, self._stride))

    def _scattered(self, size: Array) -> Array:
        network = self.machine.network
        return np.asarray(network.reduce_scatter(size, self.degrees.data, self._stride))

    def summed(self, size: Array) -> Array:
        """Gradients over all that hold them: the data axis, and the copies of a stage."""
        degrees, network, group = self.degrees, self.machine.network, self.degrees.data
        stride = self._stride
        if degrees.pipes > 1:
            group *= degrees.pipes
            apart = degrees.stride("pipe") * max(1, degrees.pipeline // degrees.pipes)
            stride = apart if degrees.data == 1 else min(stride, apart)
        price = network.reduce_scatter if degrees.zero else network.all_reduce
        return np.asarray(price(size, group, stride))

    def alone(
        self, stage: PointStage, *, buckets: Sequence[float] = BUCKETS, overlap: bool = True
    ) -> CandidatePrice:
        """Of a step without a pipeline.

        Args:
            buckets: Sizes of a bucket to choose from.
            overlap: Whether gradients leave before backward has ended.
        """
        again = int(stage.recompute)
        units = self.units(stage.start, stage.stop, again, stage.price, "R")
        forward, backward = units[:, 0], units[:, 1] + again * units[:, 0]
        m, zero = self.degrees.microbatches, self.degrees.zero
        share = self.overlap if overlap else 0.0
        compute = m * float(forward.sum() + backward.sum())
        own, bucket = self.memory.own(units[:, 3]), 0.0
        if self.degrees.data == 1:
            sent = exposed = 0.0
        elif zero >= 2:
            gathers = self._gathered(own) if zero == 3 else None
            scatters = self._scattered(own)
            _, found = sharded_exchange(forward, backward, scatters, gathers, m, overlap=share)
            sent, exposed = found.seconds, found.exposed
        else:
            held = self.shared.held
            part = np.where(held > 0, units[:, 3] / np.maximum(held, 1.0), 0.0)
            sent, exposed, bucket = bucket_exchange(
                self.shared.gradients,
                backward,
                part,
                self.summed,
                limits=buckets,
                overlap=share,
            )
        update = float(self._update(stage.params))
        late = exposed + stage.after - update
        return CandidatePrice(
            seconds=compute + late + update + self.reading + self.host,
            exchange=late,
            hidden=sent - exposed,
            update=update,
            busy=compute,
            bucket=bucket,
            reading=self.reading,
        )

    def units(self, start: int, stop: int, again: int, price: int, border: str) -> Array:
        """(units, 5): `operators.PARTS` of every unit of an interval with this strategy."""
        row, tables = self.tables.row[start:stop], self.tables
        if self.degrees.tensor == 1:
            kinds = {unit.kind: tables.solved(unit.kind).rows[again, price, 0, 0] for unit in row}
            return np.stack([kinds[unit.kind] for unit in row])
        way = tables.path(start, stop, again, price, border)
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
        # What is tied counts with its first use, so that equal intervals differ in their messages.
        number = -1 - start if tied else int(self.tables.classes.of[start, stop])
        key = (number, stop - start, again, price, border)
        if key not in self._passes:
            units = self.units(start, stop, again, price, border)
            own = self.memory.own(units[:, 3], start)
            ahead, back, late = sharded_passes(
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
        book: PeriodicTable,
        border: str,
        stages: Sequence[PointStage],
        *,
        parts: bool = True,
    ) -> CandidatePrice:
        """Of a step of a pipeline: the table, simulated with its stages, messages and sums.

        Args:
            border: Placement of what crosses from stage to stage.
            parts: False: all but the seconds is left open, which takes a third of the time.
        """
        beside = self.host_microbatch(len(stages))
        work = StagePasses(
            [stage.forward + beside / 2 for stage in stages],
            [stage.seconds - stage.forward + beside / 2 for stage in stages],
            [stage.weight for stage in stages],
        )
        wire, sums = self.wire(book, border, stages), self.sums(stages)
        hosted = [[stages[number] for number in own] for own in book.table.hosted]
        last = max(sum(stage.after for stage in own) for own in hosted)
        update = float(self._update(max(sum(stage.params for stage in own) for own in hosted)))
        if not parts:
            # One simulation; telling messages and sums from compute takes three.
            whole = book.play(work, wire, sums) + last + self.reading + self.host
            return CandidatePrice(seconds=whole, exchange=0.0, hidden=0.0, update=update, busy=0.0)
        bare = book.play(work)
        sent = book.play(work, wire) if any(map(any, wire)) else bare
        summed = book.play(work, wire, sums) if any(sums) else sent
        busy = max(
            sum(n * (stage.seconds + beside) for n, stage in zip(numbers, own, strict=True))
            for numbers, own in zip(book.computed, hosted, strict=True)
        )
        exposed = summed - sent
        return CandidatePrice(
            seconds=summed + last + self.reading + self.host,
            messages=sent - bare,
            exchange=exposed + last - update,
            hidden=max(0.0, max(sums) - exposed),
            update=update,
            busy=busy,
            reading=self.reading,
        )

    def wire(self, book: PeriodicTable, border: str, stages: Sequence[PointStage]) -> StageMessages:
        """Latency and seconds of the bytes of one micro-batch's tensor at each border."""
        if self._links is None or self._links[0] is not book:
            found = [[self._message(pair) for pair in pairs] for pairs in book.table.joins]
            latencies = [max((one for one, _ in each), default=0.0) for each in found]
            per_byte = [max((one for _, one in each), default=0.0) for each in found]
            self._links = book, latencies, np.array(per_byte)
        size = self.tables.crossing(border)[[stage.start for stage in stages[1:]]]
        return StageMessages(self._links[1], (size * self._links[2]).tolist())

    def _message(self, pair: tuple[int, int]) -> tuple[float, float]:
        """(latency, seconds per byte) of a message between two ranks of a pipeline."""
        if pair not in self._messages:
            degrees = self.degrees
            # In the copy that has the slowest link between them; neighbours send at the same time.
            copies = np.arange(degrees.data) * degrees.stride("data")
            one, two = (copies + place * degrees.stride("pipe") for place in pair)
            inner, levels = 1.0, self.machine.network.levels
            for level in levels:
                if level is levels[-1] or (one // level.width == two // level.width).all():
                    break
                inner = level.width
            latency, per_byte = level.message_costs(degrees.stride("pipe"), inner)
            self._messages[pair] = latency, float(per_byte)
        return self._messages[pair]

    def sums(self, stages: Sequence[PointStage]) -> list[float]:
        """Seconds of the sum of each stage's gradients."""
        summed = self.degrees.zero < 2 and self.degrees.data * self.degrees.pipes > 1
        params = np.array([stage.params for stage in stages])
        found = self.summed(params).tolist() if summed else [0.0] * len(stages)
        network, stride = self.machine.network, self.degrees.stride("pipe")
        borders = (*(stage.start for stage in stages), len(self.tables.row))
        # What several stages use is summed between them, too, with the first of them, whose
        # gradients come last.
        for size, first, last, number in self.shared.between(borders):
            apart = stride * max(1, (last - first) // max(1, number - 1))
            size_ = size / self.degrees.tensor
            found[first] += float(network.all_reduce(size_, number, apart))
        return found
