"""Who holds what of a model that is cut into stages, as data that is equal on all ranks.

Invariant: every parameter and buffer has an owner, the first rank that holds its first stage; where
several ranks hold a tensor, the owner's numbers are those that count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway.parallel import Stages
from headway.schedule import PipelineSchedule


@dataclass(frozen=True)
class Homes:
    """Who holds what.

    Attributes:
        rank: This rank.
        holders: Logical name of each parameter and buffer -> the ranks that hold it, first its
            owner.
        trainers: Logical name of each parameter -> the ranks that make its gradient; the others
            that hold it use it in evaluation only.
    """

    rank: int
    holders: Mapping[str, tuple[int, ...]]
    trainers: Mapping[str, tuple[int, ...]]

    def holds(self, name: str) -> bool:
        """Whether this rank holds a parameter or buffer."""
        return self.rank in self.holders[name]

    def owns(self, name: str) -> bool:
        """Whether this rank's numbers are those that count."""
        return self.rank == self.holders[name][0]

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters whose gradient is made here."""
        return tuple(name for name, ranks in self.trainers.items() if self.rank in ranks)

    def copied(self) -> dict[tuple[int, int], list[str]]:
        """What may differ from the owner's, buffers above all: (owner, holder) -> names."""
        found: dict[tuple[int, int], list[str]] = {}
        for name, (owner, *others) in sorted(self.holders.items()):
            if self.holders[name] != self.trainers.get(name):
                for rank in others:
                    found.setdefault((owner, rank), []).append(name)
        return dict(sorted(found.items()))


def homes_of(
    stages: Stages, schedule: PipelineSchedule, copies: Sequence[tuple[int, ...]], rank: int
) -> Homes:
    """The homes of all tensors of a model.

    Args:
        stages: Of the model.
        schedule: Of one pipeline.
        copies: For each pipeline the global rank of each rank of the schedule.
        rank: This one.
    """
    training: dict[str, dict[int, None]] = {}
    using: dict[str, dict[int, None]] = {}
    for stage in stages:
        for name in (*stage.parameters, *stage.buffers):
            training.setdefault(name, {}).update(dict.fromkeys(schedule.holders(stage.number)))
    names = _names(stages)
    for stage in stages.evaluating or stages:
        held = {id(t) for t in (*stage.module.parameters(), *stage.module.buffers())}
        for name in (name for number, name in names.items() if number in held):
            using.setdefault(name, {}).update(dict.fromkeys(schedule.holders(stage.number)))
    # A loss may use buffers that no stage does, wherever it is carried out.
    last, *rest = reversed(range(len(copies[0])))
    everywhere = dict.fromkeys((last, *rest))
    return Homes(
        rank,
        {
            name: _ranks({**training.get(name, {}), **using.get(name, {})} or everywhere, copies)
            for name in names.values()
        },
        {
            name: _ranks(training[name], copies)
            for name, _ in stages.model.named_parameters()
            if name in training
        },
    )


def _names(stages: Stages) -> dict[int, str]:
    """Identity -> logical name of all parameters and buffers; tied ones under the first."""
    model = stages.model
    return {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}


def _ranks(places: Iterable[int], copies: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(copy[place] for copy in copies for place in places)
