"""What the actions of a schedule cost: seconds of compute, messages and all-reduces; memory.

Units are the caller's (seconds, or slots). The default is the convention of the literature:
forward 1, input gradient 1, weight gradient 1, so that a whole backward is 2 (3 with
recomputation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.schedule.pipeline_schedule import Action, ActionKind

Number = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Prices of the stages of a pipe; one entry per stage.

    Attributes:
        input_grad: Time of the gradient with respect to the stage's input.
        latency: Time from a message's handing over to its first byte's arrival.
        message: Time that the bytes of one micro-batch's activations need on the wire, by the
            stage that makes them; its gradients have the same size.
        overhead: Time that each action costs beyond its compute.
        slowness: By which each rank's times are multiplied; empty: all 1.
        activation: Memory of one micro-batch between its forward and its backward; of a stage
            that recomputes, while its backward runs.
        kept: Memory of one micro-batch between its forward and its backward, of a stage that
            recomputes (what enters it, or its blocks); empty: as `activation`.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency: float = 0.0
    message: tuple[float, ...] = ()
    sync: tuple[float, ...] = ()
    overhead: float = 0.0
    slowness: tuple[float, ...] = ()
    activation: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()

    @staticmethod
    def of(
        stages: int,
        *,
        ranks: int | None = None,
        forward: Number = 1.0,
        backward: Number | None = None,
        input_grad: Number | None = None,
        weight_grad: Number | None = None,
        latency: float = 0.0,
        message: Number = 0.0,
        sync: Number = 0.0,
        overhead: float = 0.0,
        slowness: Sequence[float] = (),
        kept: Number | None = None,
    ) -> StageCosts:
        """Costs of a *whole rank's share* of the model, spread evenly over its stages.

        A pipe with twice as many stages as ranks (interleaved, V-shaped) has stages of half the
        size: numbers are divided by stages / ranks, sequences are taken as they are.

        Args:
            backward: Input and weight gradient together, halved between them; twice the forward
                if not given.
            input_grad: In place of `backward`, with `weight_grad`.
            message: Not divided: the size of an activation does not depend on the cut.
            kept: As above; not divided: what enters a stage does not depend on the cut.
        """
        part = (ranks or stages) / stages

        def spread(value: Number, factor: float = part) -> tuple[float, ...]:
            if isinstance(value, Sequence):
                if len(value) != stages:
                    raise ValueError(f"{len(value)} costs for {stages} stages")
                return tuple(map(float, value))
            return (value * factor,) * stages

        ahead = spread(forward)
        if input_grad is None or weight_grad is None:
            # Each of a layer's two gradients is a product of the size of its forward.
            half = [b / 2 for b in spread(backward)] if backward is not None else ahead
            inputs, weights = tuple(half), tuple(half)
        else:
            inputs, weights = spread(input_grad), spread(weight_grad)
        return StageCosts(
            forward=ahead,
            input_grad=inputs,
            weight_grad=weights,
            latency=latency,
            message=spread(message, 1.0),
            sync=spread(sync),
            overhead=overhead,
            slowness=tuple(slowness),
            activation=(part,) * stages,
            kept=() if kept is None else spread(kept, 1.0),
            weight=(part,) * stages,
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def halved(self) -> StageCosts:
        """Of half a micro-batch, for tables with `halves`; all-reduces and weights stay."""
        # Overhead and latency stay: they are paid per action and per message, whatever the size.
        names = ("forward", "input_grad", "weight_grad", "message", "activation", "kept")
        halves: dict[str, Any] = {n: tuple(v / 2 for v in getattr(self, n)) for n in names}
        return replace(self, **halves)

    def seconds(self, action: Action, rank: int, *, recompute: bool) -> float:
        """Of an action of compute on a rank; 0 for everything else.

        Args:
            recompute: The backward (B, or I where it is split) begins with another forward.
        """
        stage = action.stage
        again = self.forward[stage] if recompute else 0.0
        match action.kind:
            case ActionKind.FORWARD:
                time = self.forward[stage]
            case ActionKind.BACKWARD:
                time = again + self.input_grad[stage] + self.weight_grad[stage]
            case ActionKind.INPUT_GRAD:
                time = again + self.input_grad[stage]
            case ActionKind.WEIGHT_GRAD:
                time = self.weight_grad[stage]
            case _:
                return 0.0
        return time * (self.slowness[rank] if self.slowness else 1.0) + self.overhead
