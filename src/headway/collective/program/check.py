"""Verify a collective program: correct on every transport, free of deadlocks and races.

The messages are followed symbolically: every run of elements in a buffer is known as the sum of
which ranks' contributions it is. A program without problems ends on every rank with the right
sum of each element whatever the timing, never waits forever and never reads what is still
changing.

Receives must be posted before sends: on Gloo a pair of ranks has one connection, and the
notification of a receive queues behind the payload of a send that was posted before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.collective.program.program import (
    IN_PLACE,
    Buffer,
    BufferSpan,
    CollectiveProgram,
    Combine,
    Copy,
    Place,
    Recv,
    Send,
    Step,
    Terms,
    Wait,
    in_order,
)
from headway.errors import PlanError

Run = tuple[int, Terms | None]
"""Length, and what each element is the sum of; None: nothing was ever written there."""


class BufferContents:
    """A buffer of some size; at the start all of it is one run."""

    def __init__(self, size: int, terms: Terms | None) -> None:
        self._starts = [0]
        self._terms = [terms]
        self._size = size

    def read(self, start: int, stop: int) -> list[Run]:
        """The runs of a span, offsets relative to its start."""
        first = bisect_right(self._starts, start) - 1
        found: list[Run] = []
        at = start
        while at < stop:
            last = first + 1 == len(self._starts)
            end = min(stop, self._size if last else self._starts[first + 1])
            found.append((end - at, shift_terms(self._terms[first], start)))
            at, first = end, first + 1
        return found

    def write(self, start: int, runs: Iterable[Run]) -> None:
        """Put runs, as `read` gives them, to another place."""
        fresh: list[tuple[int, Terms | None]] = []
        at = start
        for length, terms in runs:
            fresh.append((at, shift_terms(terms, -start)))
            at += length
        self._replace(start, at, fresh)

    def _replace(self, start: int, stop: int, fresh: list[tuple[int, Terms | None]]) -> None:
        low = bisect_right(self._starts, start) - 1
        high = bisect_right(self._starts, stop - 1) - 1
        # The neighbouring runs are written again, too, so that equal ones merge.
        if self._starts[low] < start:
            fresh.insert(0, (self._starts[low], self._terms[low]))
        elif low:
            low -= 1
            fresh.insert(0, (self._starts[low], self._terms[low]))
        end = self._starts[high + 1] if high + 1 < len(self._starts) else self._size
        if stop < end:
            fresh.append((stop, self._terms[high]))
        elif high + 1 < len(self._starts):
            high += 1
            fresh.append((self._starts[high], self._terms[high]))
        merged = [fresh[0]]
        for one in fresh[1:]:
            if one[1] != merged[-1][1]:
                merged.append(one)
        self._starts[low : high + 1] = [at for at, _ in merged]
        self._terms[low : high + 1] = [terms for _, terms in merged]


def shift_terms(terms: Terms | None, by: int) -> Terms | None:
    """The same elements seen from a place `by` further on."""
    if terms is None or not by:
        return terms
    return tuple((rank, offset + by) for rank, offset in terms)


def add_terms(first: list[Run], second: list[Run]) -> list[Run]:
    """Element by element the sum of two spans of one length; None where either is None."""
    found: list[Run] = []
    left, right = list(reversed(first)), list(reversed(second))
    while left and right:
        (size, terms), (other, more) = left.pop(), right.pop()
        length = min(size, other)
        # Sorted, so that equal sums are equal tuples; a contribution that counts twice stays twice.
        both = None if terms is None or more is None else tuple(sorted(terms + more))
        found.append((length, both))
        if size > length:
            left.append((size - length, terms))
        if other > length:
            right.append((other - length, more))
    return found


PROGRAM_RULES: Mapping[str, str] = MappingProxyType(
    {
        "malformed": "peers, buffers and spans exist; no span is empty; sizes agree",
        "read-only": 'nothing is written to "in"',
        "unmatched": "each Send has a Recv of its tag and length on its peer, and the other way",
        "wait": "a Wait names messages of its own rank that began before it, each once",
        "unwaited": "every message is waited for",
        "receive-first": "between two waits receives begin before sends",
        "race": "what arrives is not touched before its Wait, what leaves not written",
        "deadlock": "ranks do not wait for each other in a circle",
        "undefined": "nothing is read that was never written",
        "result": "at the end each element is the sum of the right contributions, each once",
    }
)
"""Name of each rule, and what it demands."""
_LISTED_PROBLEMS = 12


@dataclass(frozen=True, slots=True)
class ProgramProblem:
    """A rule that is broken.

    Attributes:
        rule: Of `PROGRAM_RULES`.
        place: Of the step; -1: the rank as a whole.
    """

    rule: str
    rank: int
    place: int
    text: str

    def __str__(self) -> str:
        at = f"rank {self.rank}" + (f", step {self.place}" if self.place >= 0 else "")
        return f"{self.rule}: {at}: {self.text}"


def check_program(program: CollectiveProgram) -> None:
    """Raise unless a program is correct.

    Raises:
        PlanError: With one line per problem, the first dozen of them.
    """
    found = program_problems(program)
    if not found:
        return
    lines = [str(problem) for problem in found[:_LISTED_PROBLEMS]]
    if len(found) > _LISTED_PROBLEMS:
        lines.append(f"and {len(found) - _LISTED_PROBLEMS} more")
    raise PlanError(
        f"the program {program.name} does not carry out {program.op} of {program.elements} "
        f"elements on {program.ranks} ranks",
        problems=lines,
        fix="Correct the generator that made it; headway.collective.program.check has the rules.",
    )


def program_problems(program: CollectiveProgram) -> tuple[ProgramProblem, ...]:
    """Everything that is wrong, by rank and step; empty for a correct program."""
    if len(program.steps) != program.ranks or len(program.scratch) != program.ranks:
        text = f"steps of {len(program.steps)} and scratch of {len(program.scratch)} ranks"
        return (ProgramProblem("malformed", 0, -1, f"{text}, not of {program.ranks}"),)
    found = [*_malformed(program)]
    if not found:
        for rank, steps in enumerate(program.steps):
            found += _waits(rank, steps)
            found += _sends_first(rank, steps)
        # `_races` trusts the waits to name messages.
        if not any(problem.rule == "wait" for problem in found):
            found += [p for rank, steps in enumerate(program.steps) for p in _races(rank, steps)]
        found += _followed(program, sound=not found)
    return tuple(sorted(found, key=lambda problem: (problem.rank, problem.place)))


# -- a step alone ------------------------------------------------------------------------------


def _malformed(program: CollectiveProgram) -> Iterator[ProgramProblem]:
    for rank, steps in enumerate(program.steps):
        sizes: dict[Buffer, int] = {
            "in": program.size(rank, "in"),
            "out": program.size(rank, "out"),
            "tmp": program.size(rank, "tmp"),
        }
        for place, step in enumerate(steps):
            for text in _faults(step, rank, program.ranks, sizes):
                yield ProgramProblem("malformed", rank, place, f"{step}: {text}")
            written = _written(step)
            if written is not None and written.buffer == "in":
                yield ProgramProblem("read-only", rank, place, f'{step}: "in" is only read')


def _faults(step: Step, rank: int, ranks: int, sizes: Mapping[Buffer, int]) -> Iterator[str]:
    spans = _spans(step)
    for span in spans:
        if not 0 <= span.start < span.stop <= sizes.get(span.buffer, -1):
            yield f"{span} is no span of {sizes.get(span.buffer, 'no such buffer')} elements"
    if isinstance(step, Recv | Send) and (step.peer == rank or not 0 <= step.peer < ranks):
        yield f"rank {step.peer} is no peer"
    if len(spans) == 2:
        if spans[0].size != spans[1].size:
            yield f"{spans[0].size} and {spans[1].size} elements"
        if spans[0].overlaps(spans[1]):
            yield "the spans overlap"


def _spans(step: Step) -> tuple[BufferSpan, ...]:
    if isinstance(step, Recv):
        return (step.into,)
    if isinstance(step, Send):
        return (step.of,)
    return () if isinstance(step, Wait) else (step.dst, step.src)


def _written(step: Step) -> BufferSpan | None:
    if isinstance(step, Recv):
        return step.into
    return step.dst if isinstance(step, Combine | Copy) else None


# -- a rank alone ------------------------------------------------------------------------------


def _waits(rank: int, steps: tuple[Step, ...]) -> Iterator[ProgramProblem]:
    open_ones: set[int] = set()
    for place, step in enumerate(steps):
        if isinstance(step, Recv | Send):
            open_ones.add(place)
        elif isinstance(step, Wait):
            for one in step.steps:
                if one not in open_ones:
                    text = f"{step}: {one} is no message that has begun and was not waited for"
                    yield ProgramProblem("wait", rank, place, text)
                open_ones.discard(one)
    for place in sorted(open_ones):
        yield ProgramProblem("unwaited", rank, place, f"{steps[place]}: nobody waits for it")


def _sends_first(rank: int, steps: tuple[Step, ...]) -> Iterator[ProgramProblem]:
    sent: Step | None = None
    for place, step in enumerate(steps):
        if isinstance(step, Wait):
            sent = None
        elif isinstance(step, Send):
            sent = step
        elif isinstance(step, Recv) and sent is not None:
            yield ProgramProblem("receive-first", rank, place, f"{step}: begins behind {sent}")


class _Open:
    """Spans that messages use, to be found by what overlaps them."""

    def __init__(self) -> None:
        self._by_start: dict[Buffer, list[tuple[int, int, int]]] = {}
        self._longest = 0

    def add(self, place: int, span: BufferSpan) -> None:
        insort(self._by_start.setdefault(span.buffer, []), (span.start, span.stop, place))
        self._longest = max(self._longest, span.size)

    def remove(self, place: int, span: BufferSpan) -> None:
        """Forget one, if it is there."""
        rows = self._by_start.get(span.buffer, [])
        row = (span.start, span.stop, place)
        at = bisect_left(rows, row)
        if rows[at : at + 1] == [row]:
            del rows[at]

    def touching(self, span: BufferSpan) -> Iterator[tuple[int, BufferSpan]]:
        """Those with an element in common, by their place."""
        rows = self._by_start.get(span.buffer, [])
        # No span is longer than `_longest`: those that start earlier cannot overlap.
        first = bisect_left(rows, (span.start - self._longest, 0, 0))
        for start, stop, place in rows[first : bisect_left(rows, (span.stop, 0, 0))]:
            if stop > span.start:
                yield place, BufferSpan(span.buffer, start, stop)


def _races(rank: int, steps: tuple[Step, ...]) -> Iterator[ProgramProblem]:
    arriving, leaving = _Open(), _Open()
    for place, step in enumerate(steps):
        if isinstance(step, Wait):
            for one in step.steps:
                for span in _spans(steps[one]):
                    arriving.remove(one, span)
                    leaving.remove(one, span)
            continue
        for own in _spans(step):
            for one, span in arriving.touching(own):
                yield ProgramProblem(
                    "race", rank, place, f"{step}: step {one} still receives {span}"
                )
        written = _written(step)
        for one, span in leaving.touching(written) if written else ():
            yield ProgramProblem("race", rank, place, f"{step}: step {one} still sends {span}")
        if isinstance(step, Recv):
            arriving.add(place, step.into)
        elif isinstance(step, Send):
            leaving.add(place, step.of)


# -- all ranks together ------------------------------------------------------------------------


def _followed(program: CollectiveProgram, *, sound: bool) -> Iterator[ProgramProblem]:
    """Problems of messages and waiting, and, where there are no others, of the results."""
    partners = program.partners()
    unmatched = list(_unmatched(program, partners))
    yield from unmatched
    order, stuck = in_order(program, partners)
    for rank, (_, place) in stuck.items():
        if (rank, place) in partners:
            other, there = partners[rank, place]
            text = f"{program.steps[rank][place]}: rank {other} never comes to its step {there}"
            yield ProgramProblem("deadlock", rank, place, text)
    if sound and not unmatched and not stuck:
        yield from _Symbolic(program, partners).follow(order)


def _unmatched(
    program: CollectiveProgram, partners: Mapping[Place, Place]
) -> Iterator[ProgramProblem]:
    for rank, steps in enumerate(program.steps):
        for place, step in enumerate(steps):
            if not isinstance(step, Recv | Send):
                continue
            if (rank, place) not in partners:
                yield ProgramProblem("unmatched", rank, place, f"{step}: the peer has no other end")
            elif isinstance(step, Send):
                other, there = partners[rank, place]
                into = program.steps[other][there]
                if isinstance(into, Recv) and into.into.size != step.of.size:
                    text = f"{step}: {step.of.size} elements into {into.into.size} of rank {other}"
                    yield ProgramProblem("unmatched", rank, place, text)


class _Symbolic:
    """Executes a program on sums of contributions instead of numbers."""

    def __init__(self, program: CollectiveProgram, partners: Mapping[Place, Place]) -> None:
        self.program = program
        self.partners = partners
        self.held: dict[tuple[int, Buffer], BufferContents] = {}
        self.sent: dict[Place, list[Run]] = {}
        in_place = program.op in IN_PLACE
        for rank in range(program.ranks):
            own: Terms = ((rank, 0),)
            self.held[rank, "in"] = BufferContents(program.size(rank, "in"), own)
            self.held[rank, "out"] = BufferContents(
                program.size(rank, "out"), own if in_place else None
            )
            self.held[rank, "tmp"] = BufferContents(program.scratch[rank], None)

    def follow(self, order: list[Place]) -> Iterator[ProgramProblem]:
        for rank, place in order:
            step = self.program.steps[rank][place]
            if isinstance(step, Send):
                # Already here: without races the span cannot change before the message has left.
                runs = self._read(rank, step.of)
                self.sent[rank, place] = runs
                yield from self._defined(rank, place, step, runs)
            elif isinstance(step, Wait):
                self._arrive(rank, step)
            elif isinstance(step, Combine | Copy):
                runs = self._read(rank, step.src)
                if isinstance(step, Combine):
                    runs = add_terms(self._read(rank, step.dst), runs)
                yield from self._defined(rank, place, step, runs)
                self.held[rank, step.dst.buffer].write(step.dst.start, runs)
        for rank in range(self.program.ranks):
            yield from self._result(rank)

    def _read(self, rank: int, span: BufferSpan) -> list[Run]:
        return self.held[rank, span.buffer].read(span.start, span.stop)

    def _arrive(self, rank: int, wait: Wait) -> None:
        for place in wait.steps:
            step = self.program.steps[rank][place]
            if isinstance(step, Recv):
                # It counts from the Wait on: nothing may read the span earlier (rule "race").
                runs = self.sent[self.partners[rank, place]]
                self.held[rank, step.into.buffer].write(step.into.start, runs)

    def _defined(
        self, rank: int, place: int, step: Step, runs: list[Run]
    ) -> Iterator[ProgramProblem]:
        if any(terms is None for _, terms in runs):
            yield ProgramProblem("undefined", rank, place, f"{step}: reads what was never written")

    def _result(self, rank: int) -> Iterator[ProgramProblem]:
        for start, stop, terms in self.program.collective.goal(rank):
            at = start
            for length, held in self.held[rank, "out"].read(start, stop):
                # `read` gives offsets as seen from its start, `goal` as seen from the buffer's
                wanted = tuple((source, offset + start) for source, offset in terms)
                if held != wanted:
                    text = (
                        f"out[{at}:{at + length}] holds {_contribution_text(held)}, "
                        f"not {_contribution_text(wanted)}"
                    )
                    yield ProgramProblem("result", rank, -1, text)
                at += length


def _contribution_text(terms: Terms | None) -> str:
    """ "1@0 + 2@0": contributions by rank and the element that the run begins with."""
    if terms is None:
        return "nothing"
    return " + ".join(f"{rank}@{offset}" for rank, offset in terms) or "nothing"
