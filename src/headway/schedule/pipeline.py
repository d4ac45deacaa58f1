"""A pipeline schedule: which rank does what in which order, as one immutable table.

The same object is checked (`check`), timed (`timing`), drawn, written to CSV, lowered to messages
(`lowering`) and executed. Generators make it; nothing below knows which one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headway.schedule.action import COMPUTE, OF_STAGE, Action


@dataclass(frozen=True, slots=True)
class Pipe:
    """A chain of stages.

    Attributes:
        name: "d0", "u1": direction and number.
        placement: The rank of each stage.
        microbatches: Numbers of the micro-batches that go through it, in the order in which they
            enter; every micro-batch of a step belongs to one pipe.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: tuple[int, ...]


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
    pipes: tuple[Pipe, ...]
    order: tuple[tuple[Action, ...], ...]
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
        """Their numbers."""
        return tuple(range(self.stages))

    @property
    def num_microbatches(self) -> int:
        return sum(len(pipe.microbatches) for pipe in self.pipes)

    @cached_property
    def pipe_of(self) -> Mapping[str, Pipe]:
        """By name."""
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
        return tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.order)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (earlier, later) pairs of stages between which something is passed."""
        chain = [(stage, stage + 1) for stage in range(self.stages - 1)]
        return tuple(sorted({*chain, *self.skips}))

    def hosted(self, rank: int) -> tuple[tuple[str, int], ...]:
        """(pipe, stage) of every stage on a rank."""
        return tuple(
            (pipe.name, stage)
            for pipe in self.pipes
            for stage, place in enumerate(pipe.placement)
            if place == rank
        )

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
        """Whether messages and what concerns whole stages are in the table."""
        return any(action.kind not in COMPUTE | OF_STAGE for _, action in self.actions())
