"""Carries a collective program out on numbers, as badly as a transport may.

A message moves at any moment between the beginning of its later end and the Wait of the first end
that waits; only then its data are read from the sender's buffer. What nobody wrote is rubbish.
Independent of headway's own check: no symbols, no spans, one dictionary of elements.
"""

from __future__ import annotations

import random

from headway.collective.program.program import CollectiveProgram, Combine, Copy, Recv, Send, Wait


class Stuck(Exception):
    """No rank can go on."""


def carry_out(program: CollectiveProgram, seed: int = 0) -> list[list[int]]:
    """ "out" of every rank; own contributions are `contribution(rank, element)`."""
    return _Run(program, seed).go()


def contribution(rank: int, element: int) -> int:
    """So that no two sets of contributions have the same sum by chance."""
    return random.Random(rank * 1_000_003 + element).getrandbits(60)


def expected(program: CollectiveProgram, rank: int) -> list[int]:
    """What "out" of a rank must hold, from the definition of the operation alone."""
    c, n = program.collective, program.ranks

    def total(element):
        return sum(contribution(source, element) for source in range(n))

    if c.op in ("all_reduce", "broadcast", "reduce"):
        every = range(c.elements)
        if c.op == "all_reduce" or (c.op == "reduce" and rank == c.root):
            return [total(element) for element in every]
        source = c.root if c.op == "broadcast" else rank
        return [contribution(source, element) for element in every]
    if c.op == "reduce_scatter":
        first = sum(c.shares[:rank])
        return [total(first + element) for element in range(c.shares[rank])]
    if c.op == "all_gather":
        return [contribution(s, element) for s in range(n) for element in range(c.shares[s])]
    found = []
    for source in range(n):
        first = sum(c.table[source][:rank])
        found += [contribution(source, first + k) for k in range(c.table[source][rank])]
    return found


class _Run:
    def __init__(self, program, seed):
        self.program, self.draw = program, random.Random(seed)
        self.at = [0] * program.ranks
        self.cells = []
        in_place = program.op in ("all_reduce", "broadcast", "reduce")
        for rank in range(program.ranks):
            own = {
                ("in", e): contribution(rank, e) for e in range(program.collective.size_in(rank))
            }
            for e in range(program.collective.size_out(rank)):
                own["out", e] = contribution(rank, e) if in_place else self.draw.getrandbits(62)
            for e in range(program.scratch[rank]):
                own["tmp", e] = self.draw.getrandbits(62)
            self.cells.append(own)
        self.posted = {}  # (sender, receiver, tag) -> (sends, receives), by place
        self.open = []  # matched and not yet moved
        self.moved = set()

    def go(self):
        ranks = list(range(self.program.ranks))
        while any(self.at[r] < len(self.program.steps[r]) for r in ranks):
            for _ in range(self.draw.randrange(3)):
                if self.open:
                    self.move(self.draw.choice(self.open))
            able = [r for r in ranks if self.can(r)]
            if not able:
                raise Stuck
            self.step(self.draw.choice(able))
        return [
            [self.cells[r]["out", e] for e in range(self.program.collective.size_out(r))]
            for r in ranks
        ]

    def can(self, rank):
        steps = self.program.steps[rank]
        if self.at[rank] == len(steps):
            return False
        step = steps[self.at[rank]]
        if not isinstance(step, Wait):
            return True
        matched = {place for message in self.open for place in message}
        return all((rank, p) in self.moved or (rank, p) in matched for p in step.steps)

    def step(self, rank):
        place = self.at[rank]
        step = self.program.steps[rank][place]
        self.at[rank] += 1
        if isinstance(step, Send | Recv):
            mine = isinstance(step, Send)
            key = (rank, step.peer, step.tag) if mine else (step.peer, rank, step.tag)
            sends, receives = self.posted.setdefault(key, ([], []))
            (sends if mine else receives).append((rank, place))
            if sends and receives:
                self.open.append((sends.pop(0), receives.pop(0)))
        elif isinstance(step, Wait):
            for one in step.steps:
                for message in [m for m in self.open if (rank, one) in m]:
                    self.move(message)
        else:
            cells = self.cells[rank]
            for k in range(step.dst.stop - step.dst.start):
                value = cells[step.src.buffer, step.src.start + k]
                target = (step.dst.buffer, step.dst.start + k)
                assert isinstance(step, Combine | Copy)
                cells[target] = value + (cells[target] if isinstance(step, Combine) else 0)

    def move(self, message):
        (sender, there), (receiver, here) = message
        of = self.program.steps[sender][there].of
        into = self.program.steps[receiver][here].into
        for k in range(min(of.stop - of.start, into.stop - into.start)):
            value = self.cells[sender][of.buffer, of.start + k]
            self.cells[receiver][into.buffer, into.start + k] = value
        self.open.remove(message)
        self.moved.update(message)
