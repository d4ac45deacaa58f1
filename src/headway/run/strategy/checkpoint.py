"""What a checkpoint of a run holds, and how a run is restored from one.

`headway train` and `Executor.save` write the same. Where each rank has a part of the model
(`CheckpointInventory`), the ranks report to each other what they hold.

Of workers that meet in rounds there may be several models and optimisers. What all have alike has
its name; "worker 2.model.NAME" is what a worker has for itself. Under the plain names a plan with
other workers, or none, finds the mean of the models, and the rest of worker 0.

Of workers that do not meet a checkpoint holds one model: before the end what the leading worker has
seen of the servers or the centre, else its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from headway.channel.facts import gather_facts
from headway.checkpoint.format import Manifest
from headway.checkpoint.save_plan import HeldTensorSpec, Holdings
from headway.checkpoint.staging import specs_of
from headway.checkpoint.store import CheckpointStore
from headway.plans import Plan
from headway.run.strategy.slot_states import PREFIX as SLOT_PREFIX
from headway.run.strategy.slot_states import SlotStates
from headway.run.strategy.strategy import Strategy
from headway.run.strategy.training_state import Facts, TrainingState
from headway.run.synchrony.free_run import FreeRun
from headway.run.synchrony.replica import StateRows
from headway.run.synchrony.rounds import START, RoundsRun
from headway.run.synchrony.worker_group import GroupRun

if TYPE_CHECKING:
    from headway.run.distributed.world import World


class CheckpointInventory:
    """What each rank holds of a checkpoint, as the ranks have reported it to each other."""

    def __init__(
        self, world: World, workers: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """
        Args:
            group: Of the ranks that save together; None: all.
        """
        self._world, self._workers, self._group = world, workers, group
        ranks = world.ranks if group is None else group.size()
        self._told: dict[str, HeldTensorSpec] = {}
        self._known: list[dict[str, HeldTensorSpec]] = [{}] * ranks

    def agree(self, tensors: Mapping[str, Tensor], facts: Facts) -> tuple[Holdings, Facts]:
        """Who has which tensors, and the facts of all ranks together; collective."""
        own = specs_of(tensors)
        # Names and shapes are the bulk of it, and change only when parameters are frozen.
        news = own if own != self._told else None
        self._told = own
        # On the default group, from the main thread: the side group belongs to the checkpoint that
        # may still be being written.
        with self._world.explained("agreeing on a checkpoint"):
            found = gather_facts((news, facts["optimizer"]["scalars"]), self._group)
        self._known = [
            known if specs is None else specs
            for known, (specs, _) in zip(self._known, found, strict=True)
        ]
        scalars: list[dict[str, Any]] = [{} for _ in range(self._workers)]
        for rank, (_, told) in enumerate(found):
            scalars[rank * self._workers // len(found)] |= told
        optimizer = {**facts["optimizer"], "scalars": dict(sorted(scalars[0].items()))}
        if any(scalars[1:]):
            facts["workers"]["scalars"] = scalars
        return Holdings.of(self._known), {**facts, "optimizer": optimizer}


def make_inventory(
    plan: Plan, world: World, group: dist.ProcessGroup | None = None, *, slots: bool = False
) -> CheckpointInventory | None:
    """The inventory of a plan under which ranks hold parts, or models of their own, or one of them
    more than the others; None: each rank holds everything.

    Args:
        group: Of the ranks that save together; None: all.
        slots: The data have a state, of which each rank has its slots.
    """
    parts = (plan.needs_batch or plan.memory.zero or slots) and plan.ranks > 1
    own = plan.workers > 1 and plan.synchrony.in_rounds
    if not (parts or own or plan.has_leaders):
        return None
    return CheckpointInventory(world, plan.workers if own else 1, group)


def checkpoint_contents(
    trained: TrainingState,
    strategy: Strategy,
    inventory: CheckpointInventory | None,
    slots: SlotStates,
) -> tuple[dict[str, Tensor], Facts, Holdings | None]:
    """This rank's part of a checkpoint, the facts, and who holds what; collective."""
    tensors, facts = trained.tensors(), trained.facts()
    if isinstance(strategy.rounds, RoundsRun):
        tensors = _by_worker(tensors, trained, strategy, strategy.rounds)
        facts["workers"] = {**_signature(strategy), "met": strategy.rounds.met}
    if isinstance(strategy.rounds, FreeRun):
        tensors, facts = _as_seen(strategy.rounds.snapshot(), tensors, facts)
    if isinstance(strategy.rounds, GroupRun) and strategy.rounds.under_way:
        tensors, facts = _as_seen_by_leader(trained, strategy.rounds, tensors, facts)
    tensors |= strategy.exchange_state() | slots.tensors()
    if inventory is None:
        return tensors, facts, None
    holdings, facts = inventory.agree(tensors, facts)
    return tensors, facts, holdings


def _as_seen(
    snapshot: tuple[dict[str, Tensor], StateRows | None], tensors: dict[str, Tensor], facts: Facts
) -> tuple[dict[str, Tensor], Facts]:
    """With the parameters, and the optimiser's state, that are held where the workers push to."""
    parameters, state = snapshot
    tensors |= {f"model.{name}": value for name, value in parameters.items()}
    if state is None:
        return tensors, facts
    found = {n: tensor for n, tensor in tensors.items() if not n.startswith("optimizer.")}
    scalars: dict[str, dict[str, Any]] = {}
    for name, key, value in state:
        if isinstance(value, Tensor):
            found[f"optimizer.{name}.{key}"] = value
        else:
            scalars.setdefault(name, {})[key] = value
    return found, {**facts, "optimizer": {**facts["optimizer"], "scalars": scalars}}


def _as_seen_by_leader(
    trained: TrainingState, run: GroupRun, tensors: dict[str, Tensor], facts: Facts
) -> tuple[dict[str, Tensor], Facts]:
    """Parameters and the optimiser's state are whole on the first rank of a worker, and only there;
    buffers where they are."""
    parameters = {f"model.{name}" for name in trained.names().values()}
    buffers = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in parameters and not name.startswith("optimizer.")
    }
    return _as_seen(run.snapshot() or ({}, ()), buffers, facts)


def _signature(strategy: Strategy) -> Facts:
    """What has to be the same where each worker is to go on with what is its own."""
    plan = strategy.plan
    return {"rules": str(replace(plan.synchrony, copies=1)), "workers": plan.workers}


def _by_worker(
    own: Mapping[str, Tensor], trained: TrainingState, strategy: Strategy, rounds: RoundsRun
) -> dict[str, Tensor]:
    """This rank's tensors under the names of a checkpoint of several workers; collective."""
    models = {f"model.{name}" for name in trained.names().values()}
    alike = {f"optimizer.{name}" for name in rounds.agreed_state}
    alike |= models if rounds.met else set()
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        plain = name in alike or (rounds.number == 0 and name not in models)
        found[name if plain else f"{_prefix(rounds.number)}{name}"] = tensor
    if not rounds.met:
        found |= {f"model.{name}": tensor for name, tensor in strategy.mean_model().items()}
    return found


def _prefix(worker: int) -> str:
    return f"{_WORKER}{worker}."


_WORKER = "worker "


def _seen(manifest: Manifest, strategy: Strategy) -> tuple[Manifest, dict[str, str]]:
    """A checkpoint as it concerns this rank, and name -> name in the checkpoint where it differs.

    A worker of a run that goes on as it was finds what is its own.
    """
    others = (_WORKER, SLOT_PREFIX)
    tensors = {n: e for n, e in manifest.tensors.items() if not n.startswith(others)}
    told, rounds = manifest.facts.get("workers", {}), strategy.rounds
    if not isinstance(rounds, RoundsRun):
        return replace(manifest, tensors=tensors), {}
    known = _signature(strategy).items() <= told.items()
    rounds.resume(manifest.step, met=not known or told["met"])
    if not known:  # all begin with one model, from which an outer optimiser steps then
        tensors = {n: e for n, e in tensors.items() if not n.endswith(f"/{START}")}
        return replace(manifest, tensors=tensors), {}
    prefix, facts = _prefix(rounds.number), manifest.facts
    names = {n.removeprefix(prefix): n for n in manifest.tensors if n.startswith(prefix)}
    if rounds.number and not rounds.averages_state:
        # A worker may have no state of a parameter of which worker 0 has some.
        tensors = {n: e for n, e in tensors.items() if not n.startswith("optimizer.")}
    if "scalars" in told:
        optimizer = {**facts["optimizer"], "scalars": told["scalars"][rounds.number]}
        facts = {**facts, "optimizer": optimizer}
    tensors |= {name: manifest.tensors[real] for name, real in names.items()}
    return replace(manifest, tensors=tensors, facts=facts), names


def restore_checkpoint(
    store: CheckpointStore,
    trained: TrainingState,
    strategy: Strategy,
    slots: SlotStates,
    *,
    only: int | None = None,
) -> Manifest | None:
    """Restore the newest sound checkpoint; None: there is none. Collective.

    Args:
        only: That of this step, and no other.

    Raises:
        CheckpointError: As of `CheckpointStore.restore`.
    """
    destinations: dict[str, Tensor] = {}

    def prepare(manifest: Manifest) -> dict[str, Tensor]:
        strategy.finish()  # workers that are under way have no messages on theirs afterwards
        view, names = _seen(manifest, strategy)
        destinations.update(trained.destinations(view) | slots.destinations(manifest))
        return {names.get(name, name): tensor for name, tensor in destinations.items()}

    manifest = store.restore(prepare, only=only)
    if manifest is not None:
        trained.apply(_seen(manifest, strategy)[0], destinations)
        strategy.restore_exchange(destinations)
        slots.apply(destinations)
    return manifest
