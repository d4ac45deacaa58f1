"""A pipeline schedule: which rank does what in which order, as one immutable table.

An `Action` is one cell: what a rank does with one micro-batch at one stage. It is a small value
with a text form, `d0.s2.F.5` (pipe d0, stage 2, forward of micro-batch 5), so that tables can
be written, read, compared and named in messages. The same `PipelineSchedule` is checked, timed,
drawn, written to CSV, lowered to messages and executed; generators make it, and nothing else
knows which one did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class ActionKind(StrEnum):
    """What is done. B is I and W together; SYNC, WAIT and STEP concern a stage, no micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "SYNC"  # start the all-reduce of the stage's gradients
    WAIT = "WAIT"  # until that all-reduce has ended
    STEP = "STEP"  # the optimiser's step of the stage
    SEND = "SEND"  # hand a message to the network; does not wait
    POST = "POST"  # be ready for a message; does not wait
    RECV = "RECV"  # wait for a message that was posted


COMPUTE_KINDS = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}
)
MESSAGE_KINDS = frozenset({ActionKind.SEND, ActionKind.POST, ActionKind.RECV})
STAGE_KINDS = frozenset({ActionKind.SYNC, ActionKind.WAIT, ActionKind.STEP})
BACKWARD_KINDS = COMPUTE_KINDS - {ActionKind.FORWARD}
WEIGHT_GRADIENT_KINDS = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})
"""Behind them the gradients of a stage's weights are complete and its activations are free."""
NO_NUMBER = -1  # and not None: actions are sorted, and hashed in the innermost loops
# Longer kinds first, or W would be tried before WAIT.
_KINDS = "|".join(sorted(ActionKind, key=len, reverse=True))
_TEXT = re.compile(
    rf"(?P<pipe>[A-Za-z]\w*)\.s(?P<stage>\d+)\.(?P<kind>{_KINDS})"
    r"(\.(?P<microbatch>\d+))?([<>](?P<other>\d+))?(@(?P<version>\d+))?"
)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that one rank does.

    Attributes:
        pipe: Name of the pipe (a chain of stages; several may share the ranks).
        stage: Number of the stage in its pipe, from 0.
        microbatch: Number of the micro-batch in the step, from 0; NO_NUMBER for SYNC, WAIT, STEP.
        other: Of a message: the stage at the other end. Between s and t > s, s sends activations
            and t sends their gradients. NO_NUMBER otherwise.
        version: Of F, B, I, W in schedules without a flush: the number of steps of this stage whose
            weights are used. NO_NUMBER: the newest. Of STEP in them: the version that it makes.
    """

    kind: ActionKind
    pipe: str
    stage: int
    microbatch: int = NO_NUMBER
    other: int = NO_NUMBER
    version: int = NO_NUMBER

    def __str__(self) -> str:
        text = f"{self.pipe}.s{self.stage}.{self.kind}"
        if self.microbatch != NO_NUMBER:
            text += f".{self.microbatch}"
        if self.other != NO_NUMBER:
            text += f"{'>' if self.kind == ActionKind.SEND else '<'}{self.other}"
        return text + (f"@{self.version}" if self.version != NO_NUMBER else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The action of a text form.

        Raises:
            ValueError: The text is none, with an example of one that is.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no action; write one like d0.s2.F.5 or d0.s2.STEP")

        def number(name: str) -> int:
            return NO_NUMBER if found[name] is None else int(found[name])

        kind = ActionKind(found["kind"])
        if (kind in STAGE_KINDS) == (found["microbatch"] is not None):
            verb = "has no" if kind in STAGE_KINDS else "needs a"
            raise ValueError(f"{text!r}: {kind} {verb} micro-batch")
        if (kind in MESSAGE_KINDS) != (found["other"] is not None):
            verb = "needs the" if kind in MESSAGE_KINDS else "has no"
            raise ValueError(f"{text!r}: {kind} {verb} stage at the other end")
        return Action(
            kind,
            found["pipe"],
            int(found["stage"]),
            number("microbatch"),
            number("other"),
            number("version"),
        )

    @property
    def carries_gradient(self) -> bool:
        """Of a message: gradients go from later to earlier stages."""
        earlier = self.other < self.stage
        return earlier if self.kind == ActionKind.SEND else not earlier


def message_actions(
    pipe: str, source: int, target: int, microbatch: int
) -> tuple[Action, Action, Action]:
    """SEND, POST and RECV of a result that goes from one stage to another."""
    return (
        Action(ActionKind.SEND, pipe, source, microbatch, target),
        Action(ActionKind.POST, pipe, target, microbatch, source),
        Action(ActionKind.RECV, pipe, target, microbatch, source),
    )


@dataclass(frozen=True, slots=True)
class SchedulePipe:
    """A chain of stages.

    Attributes:
        name: "d0", "u1": direction and number.
        microbatches: Numbers of the micro-batches that go through it, in the order in which they
            enter; every micro-batch of a step belongs to one pipe.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: tuple[int, ...]


# Without `slots`: `cached_property` needs a `__dict__`, to which it writes past the frozen setter.
@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """Who does what in which order.

    Attributes:
        name: As a user writes it, with its variant: "chimera", "chimera-doubling".
        pipes: All have the same number of stages.
        order: For each rank its actions, in the order in which it carries them out.
        slots: Where a generator has one: the slot of each action in a drawing of equal slots.
        recompute: Stages, ascending, whose backward computes the forward again: activations are
            not kept from forward to backward.
        blockwise: Those stages are computed again block by block, each when backward reaches it,
            so that the inputs of the blocks and the activations of one are held; else at once.
        skips: Edges between stages beyond s -> s + 1, as (earlier, later).
        halves: A micro-batch of this table is half of one of the plan (backward halving).
        flush: The pipeline runs empty before the weights change; else actions carry versions.
        most_activations: Declared bound on live activations per rank, in units of one stage of a
            pipe with as many stages as ranks; None: not declared.
    """

    name: str
    pipes: tuple[SchedulePipe, ...]
    order: tuple[tuple[Action, ...], ...]
    # Not compared: slots only matter to drawings, and a mapping cannot be hashed.
    slots: Mapping[Action, int] | None = field(default=None, compare=False)
    recompute: tuple[int, ...] = ()
    blockwise: bool = False
    skips: tuple[tuple[int, int], ...] = ()
    halves: bool = False
    flush: bool = True
    most_activations: float | None = None

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        """Of each pipe."""
        return len(self.pipes[0].placement)

    @property
    def every_stage(self) -> tuple[int, ...]:
        return tuple(range(self.stages))

    @property
    def num_microbatches(self) -> int:
        return sum(len(pipe.microbatches) for pipe in self.pipes)

    @cached_property
    def pipe_of(self) -> Mapping[str, SchedulePipe]:
        return {pipe.name: pipe for pipe in self.pipes}

    def rank_of(self, action: Action) -> int:
        """Where an action belongs by the placement of its pipe."""
        return self.pipe_of[action.pipe].placement[action.stage]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """All actions with the rank that carries them out."""
        for rank, actions in enumerate(self.order):
            for action in actions:
                yield rank, action

    @cached_property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """For each rank F, B, I and W alone."""
        return tuple(tuple(a for a in actions if a.kind in COMPUTE_KINDS) for actions in self.order)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (earlier, later) pairs of stages between which something is passed."""
        chain = [(stage, stage + 1) for stage in range(self.stages - 1)]
        return tuple(sorted({*chain, *self.skips}))

    def transfers(self) -> Iterator[tuple[str, int, int, int]]:
        """Every result that goes to another rank: (pipe, from stage, to stage, micro-batch)."""
        for pipe in self.pipes:
            for earlier, later in self.edges:
                if pipe.placement[earlier] != pipe.placement[later]:
                    for microbatch in pipe.microbatches:
                        yield pipe.name, earlier, later, microbatch
                        yield pipe.name, later, earlier, microbatch

    def hosted(self, rank: int) -> tuple[tuple[str, int], ...]:
        """(pipe, stage) of every stage on a rank."""
        return tuple(
            (pipe.name, stage)
            for pipe in self.pipes
            for stage, place in enumerate(pipe.placement)
            if place == rank
        )

    def stages_on(self, rank: int) -> dict[int, str]:
        """The stages of a rank, ascending, each with the first pipe that brings it there."""
        found: dict[int, str] = {}
        for pipe, stage in self.hosted(rank):
            found.setdefault(stage, pipe)
        return dict(sorted(found.items()))

    def holders(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold a copy of a stage: they sum its gradients."""
        return tuple(sorted({pipe.placement[stage] for pipe in self.pipes}))

    @property
    def recomputes(self) -> str:
        """What is computed again, in words; empty: nothing."""
        if not self.recompute:
            return ""
        stages = ", ".join(map(str, self.recompute))
        where = "" if self.recompute == self.every_stage else f" in stages {stages}"
        return f"recomputes{where}{', block by block' if self.blockwise else ''}"

    @property
    def is_lowered(self) -> bool:
        """Whether messages are in the table."""
        return any(action.kind in MESSAGE_KINDS for _, action in self.actions())


Groups = tuple[tuple[int, ...], ...]
"""For each STEP the micro-batches behind it, in the order of their gradients."""


def update_groups(schedule: PipelineSchedule, stage: int) -> Groups:
    """Which micro-batches each weight update of a stage is made of, in a table without a flush.

    The STEPs of a stage cut its gradients into groups. Copies of a stage make their steps together,
    so the k-th group is that of all of them.
    """
    found: list[list[int]] = []
    for rank in schedule.holders(stage):
        number = 0
        waiting: list[int] = []
        for action in schedule.order[rank]:
            if action.stage == stage and action.kind in WEIGHT_GRADIENT_KINDS:
                waiting.append(action.microbatch)
            elif action.stage == stage and action.kind == ActionKind.STEP:
                if number == len(found):
                    found.append([])
                found[number] += waiting
                waiting, number = [], number + 1
    return tuple(map(tuple, found))


def common_update_groups(schedule: PipelineSchedule) -> Groups | None:
    """Those of all stages; None where two stages put different micro-batches together."""
    groups = [update_groups(schedule, stage) for stage in range(schedule.stages)]
    # As sets: two stages may come to the micro-batches of one group in different orders.
    sets = [list(map(frozenset, of_stage)) for of_stage in groups]
    return groups[0] if all(one == sets[0] for one in sets) else None
