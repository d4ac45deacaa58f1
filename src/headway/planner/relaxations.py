"""What to change where no plan fits: single changes of a question, each proven by the search.

A relaxation is the smallest change of its kind with which a plan exists: memory to the byte, the
least number of devices, the least degree, and so on. Invariant: the search of `Relaxation.question`
finds `Relaxation.point`, and that of `Relaxation.shorter`, the next smaller change, finds nothing.
Source: none; the changes are those that people try by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.cluster.device import Device
from headway.cluster.sheets import SHEETS
from headway.cost.network import Network
from headway.cost.presets import device_of
from headway.errors import PlanError
from headway.planner.candidate import Point
from headway.planner.degrees import divisors, state_per_byte
from headway.planner.least import Need, fitting, least_memory, sibling
from headway.planner.question import Question
from headway.planner.search import Search
from headway.units import format_bytes

NUMBERS = 32
"""Nodes, from the least number that can hold the parameters on, that are tried one by one."""
DOUBLED = 9
"""The least number is doubled less often than this."""
LARGER = (2, 4, 8)
"""How many times larger batches are tried."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A change with which a plan exists.

    Attributes:
        kind: "memory", "devices", "device", "tensor", "zero", "recompute", "schedule", "batch"
            or "force".
        change: In words.
        question: As it is with the change.
        point: The fastest plan of that.
        shorter: The next smaller change of this kind; None: there is none.
        slower: By which share its time of a sample is above that of the fastest plan without a
            limit of memory, on the devices as they are; None: the links of such a cluster are not
            known.
        hardware: Whether it takes other machines.
    """

    kind: str
    change: str
    question: Question
    point: Point
    shorter: Question | None
    slower: float | None
    hardware: bool = False

    @property
    def cost(self) -> float:
        """Of a sample, in money or seconds of devices."""
        return self.question.cost(self.point.devices, self.point.seconds) / self.question.batch


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why nothing fits, and what would do.

    Attributes:
        question: To which nothing fits.
        need: The least memory that would do; None: the model cannot be split so at all.
        changes: The cheapest first.
    """

    question: Question
    need: Need | None
    changes: tuple[Relaxation, ...]


def look(engine: Search, wider: Network | None = None) -> Verdict:
    """What is missing, and the smallest change of each kind with which there is a plan: those that
    take no other machines first, the cheapest of them first.

    Args:
        engine: Of a question to which nothing fits.
        wider: The links of as many such nodes as are wanted, of a preset.
    """
    question = engine.question
    need = least_memory(engine)
    if need is None:
        return Verdict(question=question, need=None, changes=())
    free = sibling(engine, replace(question, memory=np.inf, objective="fastest"))
    base = free.run().best.seconds / question.batch
    found = [*_memory(engine, base, need), *_devices(engine, base, wider)]
    found += [relaxed for kind in _KINDS for relaxed in kind(engine, base)]
    found.sort(key=lambda one: (one.hardware, one.cost))
    return Verdict(question=question, need=need, changes=tuple(found))


def _memory(engine: Search, base: float, need: Need) -> Iterator[Relaxation]:
    question = engine.question
    more = need.bytes - question.cap
    own = need.bytes <= question.machine.device.memory
    how = f', --memory "{need.bytes} B"' if own else ""
    words = f"{format_bytes(more)} more per device ({format_bytes(need.bytes)}{how})"
    yield from _relaxed(
        engine,
        base,
        kind="memory",
        change=words if need.proven else f"{words} or less",
        question=replace(question, memory=float(need.bytes)),
        shorter=replace(question, memory=float(need.bytes - 1)) if need.proven else None,
        hardware=not own,
    )


def _devices(engine: Search, base: float, wider: Network | None) -> Iterator[Relaxation]:
    """The least number: up to a node one by one, then node by node; where the file does not say
    how large a node is, doubled."""
    if wider is not None:
        machine = replace(engine.question.machine, network=wider)
        engine = Search(replace(engine.question, machine=machine))
    question = engine.question
    most = question.devices[-1]
    whole = engine.held * state_per_byte(question.itemsize, 0, 1, question.work.optimiser.state)
    least = max(most + 1, int(np.ceil(whole / question.cap)))
    width, node = question.machine.network.levels[0].width, 1
    if np.isfinite(width):
        node = int(width)
        start = -(-max(least, node + 1) // node) * node
        numbers = [*range(least, node + 1), *range(start, start + NUMBERS * node, node)]
    else:
        start = most * 2 ** int(np.ceil(np.log2(least / most)))
        numbers = [start]
    numbers += [start * 2**n for n in range(1, DOUBLED) if start * 2**n > numbers[-1]]
    before = most
    for number in numbers:
        asked = replace(question, devices=(number,))
        if fitting(sibling(engine, asked)) is not None:
            yield from _relaxed(
                engine,
                base,
                kind="devices",
                change=f"{number} devices" + (f" (--nodes {-(-number // node)})" if wider else ""),
                question=asked,
                shorter=replace(question, devices=(before,)),
                hardware=True,
            )
            return
        before = number


def _tensor(engine: Search, base: float) -> Iterator[Relaxation]:
    question = engine.question
    if question.tensor is None:
        return
    inner = min(question.machine.network.levels[0].width, question.devices[-1])
    others = {t for n in question.devices for t in divisors(n) if t <= inner}
    yield from _first_that_fits(
        engine,
        base,
        kind="tensor",
        tried=[
            (f"tensor {t}", replace(question, tensor=(*question.tensor, t)))
            for t in sorted(others - set(question.tensor))
        ],
    )


def _zero(engine: Search, base: float) -> Iterator[Relaxation]:
    question = engine.question
    others = sorted({1, 2, 3} - set(question.zero))
    tried = [(f"ZeRO {z}", replace(question, zero=(*question.zero, z))) for z in others]
    yield from _first_that_fits(engine, base, kind="zero", tried=tried)


def _schedule(engine: Search, base: float) -> Iterator[Relaxation]:
    question = engine.question
    if "1f1b" in question.schedules or "all" in question.schedules:
        return
    more = replace(question, schedules=(*question.schedules, "1f1b"))
    yield from _first_that_fits(engine, base, kind="schedule", tried=[("schedule 1f1b", more)])


def _recompute(engine: Search, base: float) -> Iterator[Relaxation]:
    question = engine.question
    if question.recompute == "any":
        return
    more = replace(question, recompute="any")
    tried = [("recompute blocks without a pipeline", more)]
    yield from _first_that_fits(engine, base, kind="recompute", tried=tried)


def _batch(engine: Search, base: float) -> Iterator[Relaxation]:
    """The largest smaller batch, of those that divide it; else a larger one, for more shares."""
    question = engine.question
    smaller = list(divisors(question.batch)[-2::-1])
    larger = [question.batch * factor for factor in LARGER]
    for sizes in (smaller, larger):
        tried = [(f"a batch of {size}", replace(question, batch=size)) for size in sizes]
        yield from _first_that_fits(engine, base, kind="batch", tried=tried)


def _force(engine: Search, base: float) -> Iterator[Relaxation]:
    question = engine.question
    for pattern, how in question.force:
        left = tuple(pair for pair in question.force if pair != (pattern, how))
        asked = replace(question, force=left)
        yield from _first_that_fits(
            Search(asked), base, kind="force", tried=[(f"without --force {pattern}={how}", asked)]
        )


def _device(engine: Search, base: float) -> Iterator[Relaxation]:
    """The device with the least memory that does, of those with a datasheet."""
    question = engine.question
    if question.memory is not None:
        return
    machine = question.machine
    larger = sorted(
        (sheet.memory, name)
        for name, sheet in SHEETS.items()
        if sheet.memory > machine.device.memory and machine.dtype in sheet.peak
    )
    tried = []
    for memory, name in larger:
        device = device_of(Device(preset=name), name)
        words = f"devices of {format_bytes(memory)}, such as {name}"
        tried.append((words, replace(question, machine=replace(machine, device=device))))
    yield from _first_that_fits(engine, base, kind="device", tried=tried, hardware=True)


_KINDS = (_tensor, _zero, _recompute, _schedule, _batch, _force, _device)


def _first_that_fits(
    engine: Search,
    base: float,
    *,
    kind: str,
    tried: Sequence[tuple[str, Question]],
    hardware: bool = False,
) -> Iterator[Relaxation]:
    """The first question with a plan; the one before it is the `shorter` one."""
    shorter = None
    for change, question in tried:
        same = question.machine is engine.question.machine
        own = sibling(engine, question) if same else Search(question)
        if _fits(own):
            yield from _relaxed(
                own,
                base,
                kind=kind,
                change=change,
                question=question,
                shorter=shorter,
                hardware=hardware,
            )
            return
        shorter = question


def _fits(engine: Search) -> bool:
    try:
        return fitting(engine) is not None
    except PlanError:
        return False  # what is forced cannot be with these degrees


def _relaxed(
    engine: Search,
    base: float,
    *,
    kind: str,
    change: str,
    question: Question,
    shorter: Question | None,
    hardware: bool,
) -> Iterator[Relaxation]:
    """With its fastest plan."""
    point = sibling(engine, replace(question, objective="fastest")).run().best
    known = question.machine.network.levels[-1].width >= point.devices
    yield Relaxation(
        kind=kind,
        change=change,
        question=question,
        point=point,
        shorter=shorter,
        slower=point.seconds / question.batch / base - 1 if known else None,
        hardware=hardware,
    )
