"""Metrics of the validation data: parts of micro-batches and of ranks, put together."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from headway.channel.facts import gather_facts
from headway.metrics import Statistic, check_fit, together
from headway.run.distributed.world import World


class MetricParts:
    """The parts of this rank's micro-batches, by the metric's name."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Statistic]] = {}

    def add(self, more: Mapping[str, Statistic]) -> None:
        """Take the parts of a micro-batch.

        Raises:
            RecipeError: A part does not fit to the ones before.
        """
        for name, part in more.items():
            known = self._parts.setdefault(name, [])
            # Sums are added at once: a histogram for each micro-batch would fill the memory.
            known[:] = [together([*known, part])] if part.join == "sum" else [*known, part]

    def joined(self) -> dict[str, Statistic]:
        """One statistic for each name.

        Raises:
            RecipeError: Parts do not fit together.
        """
        return {name: together(parts) for name, parts in self._parts.items()}


def metrics_over_ranks(own: Mapping[str, Statistic], world: World, doing: str) -> dict[str, float]:
    """The metrics of the parts of all ranks, which need not have met all names; collective.

    Returns:
        The same bits on every rank.

    Raises:
        RecipeError: Parts do not fit together; on all ranks.
    """
    if world.alone or world.ranks == 1:
        return {name: part.value() for name, part in own.items()}
    with world.explained(doing):
        told = gather_facts({n: (part.join, tuple(part.part.shape)) for n, part in own.items()})
    names = list(dict.fromkeys(name for facts in told for name in facts))
    wholes = {}
    for name in names:
        kinds = [facts[name] for facts in told if name in facts]
        check_fit(kinds)
        # Rows have a place for those of each rank, and zeros elsewhere: one sum does for both.
        lengths = [facts[name][1][0] if name in facts else 0 for facts in told]
        first = sum(lengths[: world.rank])
        join, shape = kinds[0]
        wholes[name] = torch.zeros(
            (sum(lengths), *shape[1:]) if join == "rows" else shape, dtype=torch.float64
        )
        if name in own:
            part = own[name].part
            place = slice(first, first + len(part)) if join == "rows" else ...
            wholes[name][place] = part
    flat = torch.cat([whole.flatten() for whole in wholes.values()]) if names else torch.zeros(0)
    world.sum(flat, doing)
    parts = flat.split([prod(whole.shape) for whole in wholes.values()])
    made = {
        name: float(own[name].final(part.view_as(whole)))
        for (name, whole), part in zip(wholes.items(), parts, strict=True)
        if name in own
    }
    # A rank without samples has the sums, and not the function.
    with world.explained(doing):
        values = gather_facts(made)
    return {name: next(each[name] for each in values if name in each) for name in names}
