"""What the parts of a strategy share: what is trained, and the step that is under way.

`StepReduction` sums loss, count and votes over all ranks in one small all-reduce. It starts as
soon as the last forward pass has the loss and overlaps with the backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.errors import Stalled
from headway.plans import Plan
from headway.plans.layer_split import SPACE
from headway.run.step.record import StepRecord

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_SMALL = 1 << 16
_MOST_BUCKETS = 4  # that a stall names


class StepContext:
    """The step in progress on this rank.

    Attributes:
        samples: Of this rank.
        doing: "step 12".
        remarks: Sentences for the journal about changes of the exchange.
        waiting: Lines that say what a broken exchange waits for.
        inside: The ranks that agree at every step; None: all.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.record = StepRecord()
        self.samples = 0
        self.doing = ""
        self.remarks: list[str] = []
        self.waiting: Callable[[], Iterable[str]] = tuple
        self.inside: dist.ProcessGroup | None = None

    def wait_for(self, text: str, *arguments: object) -> None:
        """Note what this rank is about to wait for."""
        self.world.doing(f"{text} of {self.doing}", *arguments)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Explain torch's errors of a broken exchange; a stall also lists the waiting buckets."""
        try:
            with self.world.explained(f"the exchange of {self.doing}"):
                yield
        except Stalled as error:
            lines = [f"here {line}" for line in itertools.islice(self.waiting(), _MOST_BUCKETS)]
            error.why = "\n  ".join([error.why, *lines])
            raise


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What is trained, by which plan.

    Attributes:
        weight: This rank's gradients are multiplied by it before they are summed.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    plan: Plan
    world: World
    clip: float | None
    seed: int
    weight: float = 1.0

    @property
    def share(self) -> float:
        """The weight of a rank's loss: all ranks that share a sample compute the whole of it."""
        return self.weight / self.plan.mesh.degree(SPACE)


class StepReduction:
    """Loss, count and votes of one step.

    Args:
        shares: Of this rank's micro-batches: loss sum divided by the samples of the global batch.
        counts: What the loss of each micro-batch is a sum over.
        same: Numbers that are the same on all ranks, if nothing is wrong.
        group: Over which is summed; None: all ranks.
    """

    def __init__(
        self,
        shares: Sequence[Tensor],
        counts: Sequence[Tensor | float],
        *,
        vote: bool,
        device: torch.device,
        together: bool,
        same: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Their sums and those of their squares: equal numbers have no variance. Small ones, so
        # that all of it is exact.
        small = [float(number % _SMALL) for number in same] if together else []
        powers = torch.tensor(
            [x for number in small for x in (number, number**2)],
            dtype=torch.float64,
            device=device,
        )
        self._sums = torch.stack(
            [
                _total(shares, device),
                _total(counts, device),
                torch.tensor(float(vote), dtype=torch.float64, device=device),
                *powers,
            ]
        )
        self._work = dist.all_reduce(self._sums, group=group, async_op=True) if together else None
        self._group = group
        self._read: tuple[float, float, int] | None = None
        self.differ = False
        """Whether `same` was not the same on all ranks; known behind `read`."""

    def read(self) -> tuple[float, float, int]:
        """Wait; returns the loss share, the count, and the number of votes of all ranks."""
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            share, count, votes, *powers = self._sums.tolist()
            self._read = share, count, round(votes)
            pairs = zip(powers[::2], powers[1::2], strict=True)
            self.differ = any(dist.get_world_size(self._group) * b != a**2 for a, b in pairs)
        return self._read


def _total(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    # float64 counts samples and words exactly up to 2^53, whatever the precision of the model.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value in values:
        total += value.detach() if isinstance(value, Tensor) else value
    return total
