"""A second opinion about schedules: carry a table out with sets of names in place of numbers.

Shares nothing with `headway.schedule.check`. Every rank follows its row; what it computes are
names of results; at the end every gradient must have been made, summed and applied exactly once,
and nothing may be left over.
"""

from __future__ import annotations

from collections import Counter, defaultdict

ACTIVATION, GRADIENT = "activation", "gradient"


class Wrong(Exception):
    """The table hangs, uses what is not there, or gives other gradients than it should."""


class _Rank:
    """What one rank has."""

    def __init__(self):
        self.position = 0
        self.has = set()  # (what, pipe, stage, micro-batch)
        self.saved = {}  # (pipe, stage, micro-batch) -> [version, "F" or "I"]
        self.posted = set()
        self.grads = defaultdict(Counter)  # stage -> micro-batches whose gradients are in it
        self.summed = {}  # stage -> what WAIT brought
        self.syncs = Counter()
        self.steps = Counter()
        self.applied = defaultdict(Counter)


class Execution:
    """Of a table, until its end or until something is wrong."""

    def __init__(self, schedule, *, tags=True):
        self.schedule = schedule
        self.tags = tags
        self.ranks = [_Rank() for _ in schedule.order]
        self.placement = {pipe.name: pipe.placement for pipe in schedule.pipes}
        kinds = {str(action.kind) for row in schedule.order for action in row}
        self.by_message = bool(kinds & {"SEND", "POST", "RECV"})
        self.with_sync = "SYNC" in kinds
        self.with_step = "STEP" in kinds
        self.mail = set()
        self.sent, self.posted = defaultdict(list), defaultdict(list)
        self.reduced = defaultdict(dict)  # (stage, k) -> rank -> its gradients
        self.holders = {
            stage: {placement[stage] for placement in self.placement.values()}
            for stage in range(schedule.stages)
        }
        self.earlier, self.later = defaultdict(set), defaultdict(set)
        chain = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
        for a, b in [*chain, *schedule.skips]:
            self.earlier[b].add(a)
            self.later[a].add(b)

    def run(self):
        moved = True
        while moved:
            moved = False
            for number, row in enumerate(self.schedule.order):
                rank = self.ranks[number]
                while rank.position < len(row) and self.obey(number, rank, row[rank.position]):
                    rank.position += 1
                    moved = True
        for number, row in enumerate(self.schedule.order):
            if self.ranks[number].position < len(row):
                raise Wrong(f"rank {number} hangs")
        self.judge()

    def obey(self, number, rank, action):
        """Do an action; False: it has to wait."""
        placement = self.placement.get(action.pipe)
        if (action.other != -1) != (action.kind in ("SEND", "POST", "RECV")):
            raise Wrong(f"{action}: only messages have another end")
        if (action.microbatch == -1) != (action.kind in ("SYNC", "WAIT", "STEP")):
            raise Wrong(f"{action}: only SYNC, WAIT and STEP have no micro-batch")
        if placement is None or not 0 <= action.stage < len(placement):
            raise Wrong(f"{action}: nothing has this name")
        if placement[action.stage] != number:
            raise Wrong(f"{action}: rank {number} has no such stage")
        return getattr(self, f"do_{action.kind}")(number, rank, action)

    # -- compute ------------------------------------------------------------------------------

    def inputs(self, number, what, action, stages):
        """Whether results of other stages are there."""
        for stage in stages:
            result = (what, action.pipe, stage, action.microbatch)
            source = self.placement[action.pipe][stage]
            keeper = number if self.by_message else source
            if result not in self.ranks[keeper].has:
                if keeper == number:
                    raise Wrong(f"{action}: {result} is not there")
                return False
        return True

    def do_F(self, number, rank, a):
        key = (a.pipe, a.stage, a.microbatch)
        if not self.inputs(number, ACTIVATION, a, self.earlier[a.stage]):
            return False
        if (ACTIVATION, *key) in rank.has:
            raise Wrong(f"{a}: twice")
        self.no_step_yet(rank, a)
        if not self.schedule.flush and not 0 <= a.version <= rank.steps[a.stage]:
            raise Wrong(f"{a}: no such version")
        rank.has.add((ACTIVATION, *key))
        rank.saved[key] = [a.version, "F"]
        return True

    def do_B(self, number, rank, a):
        return self.do_I(number, rank, a) and self.do_W(number, rank, a)

    def do_I(self, number, rank, a):
        key = (a.pipe, a.stage, a.microbatch)
        if key not in rank.saved or rank.saved[key] != [a.version, "F"]:
            raise Wrong(f"{a}: no such activation")
        if not self.inputs(number, GRADIENT, a, self.later[a.stage]):
            return False
        self.no_step_yet(rank, a)
        rank.saved[key][1] = "I"
        rank.has.add((GRADIENT, *key))
        return True

    def do_W(self, number, rank, a):
        key = (a.pipe, a.stage, a.microbatch)
        if rank.saved.get(key) != [a.version, "I"]:
            raise Wrong(f"{a}: no such input gradient")
        self.no_step_yet(rank, a)
        del rank.saved[key]
        rank.grads[a.stage][a.microbatch] += 1
        return True

    def no_step_yet(self, rank, a):
        if self.schedule.flush and rank.steps[a.stage]:
            raise Wrong(f"{a}: the weights have changed")

    # -- messages -----------------------------------------------------------------------------

    def do_SEND(self, number, rank, a):
        what = ACTIVATION if a.other > a.stage else GRADIENT
        edge = (a.pipe, a.stage, a.other, a.microbatch)
        if (what, a.pipe, a.stage, a.microbatch) not in rank.has or not self.is_edge(a):
            raise Wrong(f"{a}: there is nothing to send")
        if edge in self.sent[self.lane(a.pipe, a.stage, a.other)]:
            raise Wrong(f"{a}: twice")
        self.mail.add(edge)
        self.sent[self.lane(a.pipe, a.stage, a.other)].append(edge)
        return True

    def do_POST(self, number, rank, a):
        edge = (a.pipe, a.other, a.stage, a.microbatch)
        if edge in rank.posted or not self.is_edge(a):
            raise Wrong(f"{a}: twice, or not a message")
        rank.posted.add(edge)
        self.posted[self.lane(a.pipe, a.other, a.stage)].append(edge)
        return True

    def do_RECV(self, number, rank, a):
        edge = (a.pipe, a.other, a.stage, a.microbatch)
        if edge not in rank.posted:
            raise Wrong(f"{a}: not posted")
        lane = self.lane(a.pipe, a.other, a.stage)
        sent = self.sent[lane]
        if not self.tags and edge in sent and sent.index(edge) != self.posted[lane].index(edge):
            raise Wrong(f"{a}: another message comes")
        if edge not in self.mail:
            if edge in sent:
                raise Wrong(f"{a}: twice")
            return False
        self.mail.remove(edge)
        what = ACTIVATION if a.other < a.stage else GRADIENT
        rank.has.add((what, a.pipe, a.other, a.microbatch))
        return True

    def lane(self, pipe, source, target):
        placement = self.placement[pipe]
        return (placement[source], placement[target], pipe, source < target)

    def is_edge(self, a):
        there = a.other in self.earlier[a.stage] or a.other in self.later[a.stage]
        return there and self.placement[a.pipe][a.other] != self.placement[a.pipe][a.stage]

    # -- updates ------------------------------------------------------------------------------

    def do_SYNC(self, number, rank, a):
        rank.syncs[a.stage] += 1
        self.reduced[a.stage, rank.syncs[a.stage]][number] = rank.grads.pop(a.stage, Counter())
        return True

    def do_WAIT(self, number, rank, a):
        parts = self.reduced[a.stage, rank.syncs[a.stage]]
        if not rank.syncs[a.stage] or a.stage in rank.summed:
            raise Wrong(f"{a}: nothing to wait for")
        if set(parts) != self.holders[a.stage]:
            return False
        rank.summed[a.stage] = sum(parts.values(), Counter())
        return True

    def do_STEP(self, number, rank, a):
        if self.with_sync:
            if a.stage not in rank.summed:
                raise Wrong(f"{a}: the gradients are not summed")
            new = rank.summed.pop(a.stage)
        else:
            new = rank.grads.pop(a.stage, Counter())
        if not self.schedule.flush and not new:
            raise Wrong(f"{a}: no gradients")
        rank.steps[a.stage] += 1
        if not self.schedule.flush and a.version not in (-1, rank.steps[a.stage]):
            raise Wrong(f"{a}: another version")
        rank.applied[a.stage] += new
        return True

    # -- the end ------------------------------------------------------------------------------

    def judge(self):
        """All gradients once, nothing left over."""
        if self.mail or any(rank.saved for rank in self.ranks):
            raise Wrong("something is left over")
        if any(len(posts) != len(self.sent[lane]) for lane, posts in self.posted.items()):
            raise Wrong("posted and never sent")
        for stage, holders in self.holders.items():
            every = Counter(m for pipe in self.schedule.pipes for m in pipe.microbatches)
            copies = [self.ranks[number] for number in holders]
            if not self.with_step and not self.with_sync:
                if sum((rank.grads[stage] for rank in copies), Counter()) != every:
                    raise Wrong(f"gradients of stage {stage}")
                continue
            for rank in copies:
                got = rank.applied[stage] if self.with_step else rank.summed.get(stage)
                if got != every or rank.grads[stage]:
                    raise Wrong(f"summed or applied gradients of stage {stage}")
            if len({rank.steps[stage] for rank in copies}) > 1:
                raise Wrong(f"steps of stage {stage}")
            if self.schedule.flush and copies[0].steps[stage] != self.with_step:
                raise Wrong(f"steps of stage {stage}")


def execute(schedule, *, tags=True):
    """Raises: Wrong."""
    Execution(schedule, tags=tags).run()
