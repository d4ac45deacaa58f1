"""What a checkpoint of a run holds, and how a run is restored from one.

`headway train` and `Executor.save` write the same. Where each rank has a part of the model
(`CheckpointInventory`), the ranks report to each other what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from headway.channel.facts import gather_facts
from headway.checkpoint.format import Manifest
from headway.checkpoint.save_plan import HeldTensorSpec, Holdings
from headway.checkpoint.staging import specs_of
from headway.checkpoint.store import CheckpointStore
from headway.plans import Plan
from headway.run.strategy.strategy import Strategy
from headway.run.strategy.training_state import Facts, TrainingState

if TYPE_CHECKING:
    from headway.run.distributed.world import World


class CheckpointInventory:
    """What each rank holds of a checkpoint, as the ranks have reported it to each other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[str, HeldTensorSpec] = {}
        self._known: list[dict[str, HeldTensorSpec]] = [{}] * world.ranks

    def agree(self, tensors: Mapping[str, Tensor], facts: Facts) -> tuple[Holdings, Facts]:
        """Who has which tensors, and the facts of all ranks together; collective."""
        own = specs_of(tensors)
        # Names and shapes are the bulk of it, and change only when parameters are frozen.
        news = own if own != self._told else None
        self._told = own
        # On the default group, from the main thread: the side group belongs to the checkpoint that
        # may still be being written.
        with self._world.explained("agreeing on a checkpoint"):
            found = gather_facts((news, facts["optimizer"]["scalars"]))
        self._known = [
            known if specs is None else specs
            for known, (specs, _) in zip(self._known, found, strict=True)
        ]
        scalars = {name: values for _, told in found for name, values in told.items()}
        optimizer = {**facts["optimizer"], "scalars": dict(sorted(scalars.items()))}
        return Holdings.of(self._known), {**facts, "optimizer": optimizer}


def make_inventory(plan: Plan, world: World) -> CheckpointInventory | None:
    """The inventory of a plan under which ranks hold parts; None: each rank holds everything."""
    parts = plan.pipe_degree > 1 or plan.split.tensor or (plan.memory.zero and plan.ranks > 1)
    return CheckpointInventory(world) if parts else None


def checkpoint_contents(
    trained: TrainingState, strategy: Strategy, inventory: CheckpointInventory | None
) -> tuple[dict[str, Tensor], Facts, Holdings | None]:
    """This rank's part of a checkpoint, the facts, and who holds what; collective."""
    tensors = {**trained.tensors(), **strategy.exchange_state()}
    facts = trained.facts()
    if inventory is None:
        return tensors, facts, None
    holdings, facts = inventory.agree(tensors, facts)
    return tensors, facts, holdings


def restore_checkpoint(
    store: CheckpointStore, trained: TrainingState, strategy: Strategy
) -> Manifest | None:
    """Restore the newest sound checkpoint; None: there is none. Collective.

    Raises:
        CheckpointError: As of `CheckpointStore.restore`.
    """
    destinations: dict[str, Tensor] = {}

    def prepare(manifest: Manifest) -> dict[str, Tensor]:
        destinations.update(trained.destinations(manifest))
        return destinations

    manifest = store.restore(prepare)
    if manifest is not None:
        trained.apply(manifest, destinations)
        strategy.restore_exchange(destinations)
    return manifest
