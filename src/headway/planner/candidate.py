"""One combination of degrees on its tables: the frontier of its stages, cuts and placements.

Invariant: what a point says is what its stages' strategies cost, priced by `cost` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headway.cost.transformer import pipeline_seconds
from headway.planner.degrees import Degrees, state_per_byte
from headway.planner.operators import Floats
from headway.planner.pipeline_cuts import cut
from headway.planner.stages import Tables


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a point.

    Attributes:
        start: Its first unit.
        stop: The unit behind its last.
        price: The number of its strategy among those of the stretch.
        recompute: Whether its units keep only what enters them.
        seconds: Of one micro-batch, both passes.
        tail: Seconds of a step for gradients and update.
        state: Bytes of weights, gradients and optimiser.
        kept: Bytes kept for backward, of all micro-batches under way.
        transient: Bytes of the unit that is being computed again.
        params: Bytes of parameters that it holds.
    """

    start: int
    stop: int
    price: int
    recompute: bool
    seconds: float
    tail: float
    state: float
    kept: float
    transient: float
    params: float

    @property
    def bytes(self) -> float:
        return self.state + self.kept + self.transient


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan of the frontier.

    Attributes:
        degrees: Its degrees.
        border: Placement of what crosses from stage to stage.
        stages: From the first.
        seconds: Of a step.
        messages: Of those, between stages.
    """

    degrees: Degrees
    border: str
    stages: tuple[Stage, ...]
    seconds: float
    messages: float

    @property
    def bytes(self) -> float:
        """On the fullest device."""
        return max(stage.bytes for stage in self.stages)

    @property
    def devices(self) -> int:
        return self.degrees.devices


class Candidate:
    """A combination of degrees, ready to be asked for the fastest plan within a memory."""

    def __init__(self, tables: Tables, degrees: Degrees, itemsize: int) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.per_byte = state_per_byte(itemsize, degrees.zero, degrees.data)
        self._known: dict[str, tuple[Floats, np.ndarray]] = {}
        whole = int(tables.classes.of[0, -1])
        self.least_rows = self._rows(tables.stretch(whole)[:, :, 0, 0])

    def _rows(self, rows: Floats) -> Floats:
        """(..., 4): seconds of a micro-batch, of a step's end, bytes of state, of one micro-batch.

        `rows` begins with the axis of recomputation.
        """
        again = np.arange(2.0).reshape(2, *([1] * (rows.ndim - 2)))
        seconds = rows[..., 0] * (1.0 + again) + rows[..., 1]
        tail = rows[..., 2] + self._exchange(rows[..., 3])
        return np.stack([seconds, tail, rows[..., 3] * self.per_byte, rows[..., 4]], axis=-1)

    def _exchange(self, held: Floats) -> Floats:
        """Seconds of gradients over the data axis and of the update, by bytes of parameters."""
        t, d, zero = self.degrees.tensor, self.degrees.data, self.degrees.zero
        m = self.degrees.microbatches
        network, device = self.tables.setting.machine.network, self.tables.setting.machine.device
        update = device.update * held / self.itemsize / (d if zero else 1)
        if d == 1:
            return update
        if zero == 0:
            return update + network.all_reduce(held, d, t)
        gathered = network.all_gather(held, d, t)
        scattered = network.reduce_scatter(held, d, t)
        if zero == 3:
            return update + m * (scattered + 2.0 * gathered)
        return update + (m if zero == 2 else 1) * scattered + gathered

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `cap` is below.

        The stages' bytes add up to at most p caps, so that their seconds are at least those of the
        lower hull of the whole model's strategies.
        """
        p, m = self.degrees.pipeline, self.degrees.microbatches
        rows = self.least_rows
        seconds = (rows[..., 0] * (m + p - 1) / p + rows[..., 1] / p).ravel()
        held = ((rows[..., 2] + rows[..., 3]) / p).ravel()
        return hull_bound(seconds, held, cap)

    def fastest(self, cap: float) -> Point | None:
        """The fastest plan of which no device needs more than `cap` bytes."""
        borders = self.tables.borders if self.degrees.pipeline > 1 else ("R",)
        best: Point | None = None
        for border in borders:
            point = self._within(border, cap, np.inf if best is None else best.seconds)
            if point is not None and (best is None or point.seconds < best.seconds):
                best = point
        return best

    def _prepared(self, border: str) -> tuple[Floats, np.ndarray]:
        """(classes, 2, K, 4) as `_rows` says, and the prices."""
        if border not in self._known:
            cells, prices = self.tables.cells(border, self.degrees.pipeline > 1)
            rows = self._rows(np.moveaxis(cells, 0, 1))
            self._known[border] = np.moveaxis(rows, 0, 1), prices
        return self._known[border]

    def _within(self, border: str, cap: float, known: float) -> Point | None:
        degrees, of = self.degrees, self.tables.classes.of
        p, m = degrees.pipeline, degrees.microbatches
        rows, _ = self._prepared(border)
        times, picks = self._picked(rows, cap)
        floor = float((self.least_rows[..., 0] + self.least_rows[..., 1] / m).min())
        numbers = of if p > 1 else np.where(of == of[0, -1], 0, -1)
        cuts = cut(numbers, times, m, floor, known)
        if cuts is None:
            return None
        chosen = []
        for place, (start, stop) in enumerate(zip(cuts.borders, cuts.borders[1:], strict=False)):
            behind = p - 1 - place
            number = int(numbers[start, stop])
            again, price = divmod(int(picks[behind, number]), rows.shape[2])
            chosen.append((start, stop, number, again, price))
        return self._point(border, self._stages(border, chosen))

    def _picked(self, rows: Floats, cap: float) -> tuple[Floats, np.ndarray]:
        """(p, classes): the least time of a stage that has so many behind it, and its strategy.

        What is best both with few and with many micro-batches under way is best between them.
        """
        p, m = self.degrees.pipeline, self.degrees.microbatches
        flat = (len(rows), -1)
        extra = np.array([0.0, self.tables.transient])[:, None]
        value = (rows[..., 0] + rows[..., 1] / m).reshape(flat)
        state, kept = rows[..., 2].reshape(flat), rows[..., 3].reshape(flat)
        extra = np.broadcast_to(extra, rows.shape[1:-1]).ravel()
        times = np.full((p, len(rows)), np.inf)
        picks = np.zeros((p, len(rows)), dtype=np.int64)

        def pick(behind: int, some: np.ndarray) -> None:
            held = state[some] + self.degrees.in_flight(behind) * kept[some] + extra
            allowed = np.where(held <= cap, value[some], np.inf)
            best = allowed.argmin(axis=1)
            picks[behind, some] = best
            times[behind, some] = allowed[np.arange(len(some)), best]

        every = np.arange(len(rows))
        for behind in {0, p - 1}:
            pick(behind, every)
        waiting = [(0, p - 1, every)]
        while waiting:
            low, high, some = waiting.pop()
            same = (picks[low, some] == picks[high, some]) & (times[low, some] == times[high, some])
            picks[low:high, some[same]] = picks[low, some[same]]
            times[low:high, some[same]] = times[low, some[same]]
            some, middle = some[~same], (low + high) // 2
            if len(some) and middle > low:
                pick(middle, some)
                waiting += [(low, middle, some), (middle, high, some)]
        return times, picks

    def planned(self, borders: Sequence[int], recompute: Collection[int] = ()) -> Point:
        """The plan that is cut there, whether it fits or not; whole tensors cross its borders.

        Args:
            borders: The first unit of each stage, and the number of units.
            recompute: Numbers of the stages whose units keep only what enters them.
        """
        of = self.tables.classes.of
        rows, _ = self._prepared("R")
        value = rows[..., 0] + rows[..., 1] / self.degrees.microbatches
        chosen = []
        for place, (start, stop) in enumerate(pairwise(borders)):
            number = int(of[start, stop]) if self.degrees.pipeline > 1 else 0
            again = int(place in recompute)
            chosen.append((start, stop, number, again, int(value[number, again].argmin())))
        return self._point("R", self._stages("R", chosen))

    def _stages(
        self, border: str, chosen: Sequence[tuple[int, int, int, int, int]]
    ) -> tuple[Stage, ...]:
        """From (start, stop, class, recomputation, place among the prices) of each."""
        rows, prices = self._prepared(border)
        stages = []
        for place, (start, stop, number, again, price) in enumerate(chosen):
            one = rows[number, again, price]
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    price=int(prices[price]),
                    recompute=bool(again),
                    seconds=float(one[0]),
                    tail=float(one[1]),
                    state=float(one[2]),
                    kept=float(one[3]) * self.degrees.in_flight(len(chosen) - 1 - place),
                    transient=self.tables.transient if again else 0.0,
                    params=float(one[2]) / self.per_byte,
                )
            )
        return tuple(stages)

    def _point(self, border: str, stages: tuple[Stage, ...]) -> Point:
        degrees, setting = self.degrees, self.tables.setting
        message = 0.0
        for stage in stages[1:]:
            tensor = self.tables.row[stage.start].entry
            split = border.startswith("S") and border in self.tables.states(tensor)
            size = setting.bytes_of(tensor) / (degrees.tensor if split else 1)
            far = degrees.tensor * degrees.data
            message = max(message, float(setting.machine.network.send(size, far)))
        compute, messages = pipeline_seconds(
            max(stage.seconds for stage in stages),
            sum(stage.seconds for stage in stages),
            degrees.microbatches,
            stages=degrees.pipeline,
            message=message,
        )
        tail = max(stage.tail for stage in stages)
        return Point(
            degrees=degrees,
            border=border,
            stages=stages,
            seconds=float(compute) + float(messages) + tail,
            messages=float(messages),
        )


def hull_bound(seconds: Floats, held: Floats, cap: float) -> tuple[float, float]:
    """(least seconds within the cap, least bytes) of all mixtures of some strategies."""
    fits = held <= cap
    if not fits.any():
        return np.inf, float(held.min())
    least = float(seconds[fits].min())
    for one in np.flatnonzero(~fits):
        share = (cap - held[fits]) / (held[one] - held[fits])
        mixed = seconds[fits] + share * (seconds[one] - seconds[fits])
        least = min(least, float(mixed.min()))
    return least, float(held.min())
