"""The step program: what a plan makes a rank do in one optimiser step, as data.

`compile_step` turns a plan and the number of micro-batches into a list of instructions; the
executor carries them out one after the other with one handler per kind. A feature adds
instructions and their handlers; it never adds a branch to the executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.plan import Plan

Kind = Literal[
    "clear",
    "pipeline",
    "forward",
    "idle",
    "tally",
    "arm",
    "backward",
    "settle",
    "propose",
    "send",
    "receive",
    "adopt",
    "scale",
    "clip",
    "update",
    "release",
]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do.

    Kinds, with what they mean for synchronous data parallelism:
        clear: forget the last step's gradients.
        pipeline: forward and backward of all micro-batches through the stages of a pipeline, and
            the sums of the gradients of each stage's copies.
        forward: the loss of micro-batch `microbatch`.
        idle: a forward pass that counts nothing, in place of a micro-batch that this rank lacks
            and another one has: where state is sharded, all ranks gather it together.
        tally: start to sum loss, count and votes over all ranks.
        arm: gradients may leave as soon as the next backward pass has made them.
        backward: the gradients of micro-batch `microbatch`, added to those before.
        send: start the exchange of all gradients that have not left.
        receive: wait for the summed gradients.
        scale: divide by a global count that is only known now.
        clip: limit the global norm of the gradients.
        update: the optimiser's and the scheduler's step.
        release: let the exchange make the update, while the next step begins (priority).
        settle: the pipeline's table has made the updates; read the tally, step the scheduler.
        propose: make this rank's own update and exchange it in place of the gradients.
        adopt: make the combined update.
    """

    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.kind if self.microbatch is None else f"{self.kind} {self.microbatch}"


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The instructions of one rank for one optimiser step."""

    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.instructions))


def compile_step(
    plan: Plan, num_microbatches: int, *, clip: bool, passes: int | None = None
) -> StepProgram:
    """The program of a rank.

    Args:
        plan: A legal plan.
        num_microbatches: Of this rank in this step; 0 where a ragged batch leaves it without work.
        clip: Whether the recipe limits the norm of the gradients.
        passes: The most micro-batches that any rank has in this step; None: as this one.
    """
    if plan.pipe_degree > 1:
        limit: list[Kind] = ["clip"] if clip else []
        ending: list[Kind] = ["scale", *limit, "update"] if plan.flushes else ["settle"]
        kinds: list[Kind] = ["clear", "pipeline", "tally", *ending]
        return StepProgram(tuple(map(Instruction, kinds)))
    most = max(passes or 0, num_microbatches) if plan.memory.zero else num_microbatches
    own = [_microbatch(number, idle=number >= num_microbatches) for number in range(most)]
    exchange = plan.exchange
    together = plan.ranks > 1
    updates = exchange.values == "updates"
    if own:
        arm = [Instruction("arm")] if together and not updates else []
        own[-1][1:1] = [Instruction("tally"), *arm]
    else:
        own.append([Instruction("tally")])
    return StepProgram(
        (
            Instruction("clear"),
            *(instruction for one in own for instruction in one),
            *map(Instruction, _ending(together, updates, exchange.priority, clip)),
        )
    )


def _ending(together: bool, updates: bool, priority: bool, clip: bool) -> list[Kind]:
    """What follows the last backward pass."""
    if updates:
        return ["propose", "send", "receive", "adopt"] if together else ["propose", "adopt"]
    if together and priority and not clip:  # a clipped norm needs all gradients together
        return ["send", "release"]
    arrive: list[Kind] = ["send", "receive"] if together else []
    limit: list[Kind] = ["clip"] if clip else []
    return [*arrive, "scale", *limit, "update"]


def _microbatch(number: int, *, idle: bool) -> list[Instruction]:
    return [Instruction("idle" if idle else "forward", number), Instruction("backward", number)]
