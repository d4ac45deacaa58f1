"""Recursive halving and doubling: the fewest rounds that still send each byte only twice.

log2(n) rounds halve what a rank is responsible for, log2(n) more double what it knows (Thakur,
Rabenseifner and Gropp 2005, section 4.4). Where the number of ranks is not a power of two, rank
p + i hands everything to rank i before and gets its result after, with p the largest power of
two below.
"""

from __future__ import annotations

from headway.collective.generators.program_builder import (
    OUT,
    BufferArea,
    Part,
    ProgramBuilder,
    check_operation,
    parts_of,
)
from headway.collective.program.program import (
    BufferSpan,
    CollectiveProgram,
    CollectiveTask,
    even_sizes,
)

OPS = ("all_reduce", "reduce_scatter", "all_gather")


def halving_doubling(collective: CollectiveTask) -> CollectiveProgram:
    """A program in 2 log2(p) rounds for all_reduce, log2(p) for the others, two more where n > p.

    Raises:
        PlanError: The operation is not all_reduce, reduce_scatter or all_gather.
    """
    check_operation(collective, "halving-doubling", OPS)
    writing = _Halving(collective)
    if collective.op != "all_gather":
        writing.take_in()
        writing.halve()
    if collective.op != "reduce_scatter":
        if collective.op == "all_gather":
            writing.take_in()
        writing.double()
    writing.give_back()
    return writing.writer.program("halving-doubling")


class _Halving:
    """Blocks 0 to p - 1, each the elements that one of the first p ranks ends with.

    Attributes:
        area: Where the whole is built: "out", or of a reduce_scatter scratch.
    """

    def __init__(self, collective: CollectiveTask) -> None:
        self.collective = collective
        self.writer = ProgramBuilder(collective)
        # The largest power of two that is not above the number of ranks.
        self.power = 1 << (collective.ranks.bit_length() - 1)
        self.extra = collective.ranks - self.power
        self.areas = [OUT] * collective.ranks
        self.shares: list[Part] = []
        if collective.op == "all_reduce":
            self.shares = parts_of(even_sizes(collective.elements, self.power))
        else:
            self.shares = parts_of(collective.shares)
        if collective.op == "reduce_scatter":
            # "in" is only read, and "out" has room for no more than the rank's own share.
            rooms = [self.writer.ranks[r].room(collective.elements) for r in range(self.power)]
            self.areas = [BufferArea("tmp", -room.start) for room in rooms]

    def parts(self, first: int, last: int) -> list[Part]:
        """Elements of blocks: one run, and another where ranks beyond p have own shares."""
        found = [(self.shares[first][0], self.shares[last - 1][1])]
        beyond = self.shares[self.power :][first:last]
        if beyond:
            found.append((beyond[0][0], beyond[-1][1]))
        return found

    def spans(self, rank: int, first: int, last: int) -> list[BufferSpan]:
        return [self.areas[rank].span(part) for part in self.parts(first, last)]

    def take_in(self) -> None:
        """What the ranks beyond p have goes to their partners; the others lay theirs out."""
        tag, op = self.writer.tag(), self.collective.op
        whole = (0, self.collective.elements)
        for rank, script in enumerate(self.writer.ranks):
            part = self.shares[rank] if op == "all_gather" else whole
            own = {"all_reduce": OUT, "all_gather": BufferArea("in", part[0])}.get(
                op, BufferArea("in")
            )
            if rank >= self.power:
                script.wait(script.send(rank - self.power, tag, own.span(part)))
                continue
            handle: list[int] = []
            slot = BufferSpan("tmp", 0, 0)
            if rank < self.extra:
                theirs = self.shares[rank + self.power] if op == "all_gather" else whole
                gathered = op == "all_gather"
                size = theirs[1] - theirs[0]
                slot = OUT.span(theirs) if gathered else script.room(size)
                handle = script.recv(rank + self.power, tag, slot)
            # The copy runs while the partner's numbers arrive.
            if op != "all_reduce":
                script.copy(self.areas[rank].span(part), own.span(part))
            script.wait(handle)
            if handle and op != "all_gather":
                script.combine(self.areas[rank].span(whole), slot)

    def halve(self) -> None:
        """Sums: each rank ends with those of its own block."""
        distance = self.power // 2
        while distance:
            tag = self.writer.tag()
            for rank in range(self.power):
                first = rank - rank % (2 * distance)
                middle, last = first + distance, first + 2 * distance
                keep, give = (first, middle), (middle, last)
                if rank & distance:
                    keep, give = give, keep
                self._swap_sums(rank, rank ^ distance, keep, give, tag)
            distance //= 2

    def _swap_sums(self, rank: int, peer: int, keep: Part, give: Part, tag: int) -> None:
        script = self.writer.ranks[rank]
        mine = self.spans(rank, *keep)
        slots = [script.room(span.size) for span in mine]
        handles = [h for slot in slots for h in script.recv(peer, tag, slot)]
        handles += [h for span in self.spans(rank, *give) for h in script.send(peer, tag, span)]
        script.wait(handles)
        for span, slot in zip(mine, slots, strict=True):
            script.combine(span, slot)

    def double(self) -> None:
        """Results: each rank ends with all blocks."""
        distance = 1
        while distance < self.power:
            tag = self.writer.tag()
            for rank in range(self.power):
                script, peer = self.writer.ranks[rank], rank ^ distance
                own, theirs = (one - one % distance for one in (rank, peer))
                handles = [
                    handle
                    for span in self.spans(rank, theirs, theirs + distance)
                    for handle in script.recv(peer, tag, span)
                ]
                for span in self.spans(rank, own, own + distance):
                    handles += script.send(peer, tag, span)
                script.wait(handles)
            distance *= 2

    def give_back(self) -> None:
        """The ranks beyond p get their results; of a reduce_scatter each takes its share."""
        tag, whole = self.writer.tag(), (0, self.collective.elements)
        scattered = self.collective.op == "reduce_scatter"
        for rank in range(self.collective.ranks):
            script = self.writer.ranks[rank]
            part = self.shares[rank] if scattered else whole
            result = BufferArea("out", part[0]) if scattered else OUT
            if rank >= self.power:
                script.wait(script.recv(rank - self.power, tag, result.span(part)))
                continue
            handle: list[int] = []
            if rank < self.extra:
                theirs = self.shares[rank + self.power] if scattered else whole
                handle = script.send(rank + self.power, tag, self.areas[rank].span(theirs))
            if scattered:
                script.copy(result.span(part), self.areas[rank].span(part))
            script.wait(handle)
