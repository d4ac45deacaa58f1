"""What a checkpoint holds, where every rank of a pipeline has a part of it.

Agreed on by one exchange on the default group, from the main thread: the side group belongs to the
checkpoint that is being written meanwhile. Names and shapes are told again only when they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from headway.checkpoint.shares import Holdings, Spec
from headway.checkpoint.staging import specs_of
from headway.run.training_state import Facts
from headway.run.world import World


class Inventory:
    """Keeps what the ranks have told each other.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[str, Spec] = {}
        self._known: list[dict[str, Spec]] = [{}] * world.ranks

    def agree(self, tensors: Mapping[str, Tensor], facts: Facts) -> tuple[Holdings, Facts]:
        """Who has which tensors, and the facts of all ranks together; collective.

        Args:
            tensors: What this rank has, by logical name.
            facts: As `Trained.facts` gives them on this rank.
        """
        own = specs_of(tensors)
        news = own if own != self._told else None
        self._told = own
        found: list[Any] = [None] * self._world.ranks
        with self._world.explained("agreeing on a checkpoint"):
            dist.all_gather_object(found, (news, facts["optimizer"]["scalars"]))
        self._known = [
            known if specs is None else specs
            for known, (specs, _) in zip(self._known, found, strict=True)
        ]
        scalars = {name: values for _, told in found for name, values in told.items()}
        optimizer = {**facts["optimizer"], "scalars": dict(sorted(scalars.items()))}
        return Holdings.of(self._known), {**facts, "optimizer": optimizer}
