"""The state of a training job under logical names, independent of the plan.

Tensors: `model.<name>` for parameters and persistent buffers, `optimizer.<parameter name>.<key>`
for the optimiser's tensors, `exchange.<parameter name>/<what>` for residuals of compressors.
Facts (plain values): the optimiser's groups and scalars, the scheduler, the cursor, the number of
steps. Random numbers need no state: they follow from (seed, epoch, position). Nothing here knows
about ranks, so any number of processes can resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.channel.mapped_memory import copy_rows, file_of
from headway.checkpoint.format import Manifest, TensorEntry
from headway.checkpoint.store import check_match
from headway.checkpoint.tensor_part import TensorPart
from headway.comm.compress.state import STATE_PREFIX
from headway.errors import CheckpointError, CheckpointMismatch
from headway.run.strategy.growing_tables import GrowingTables
from headway.run.strategy.parameter_layout import ParameterLayout
from headway.run.synchrony.rounds import MOMENTUM, START

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The objects whose state is saved and restored.

    Attributes:
        away: Parameters and buffers that only other ranks hold (stages of a pipeline).
        layout: Of split layers or tables; None: parameters are held as they are saved.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    away: frozenset[Tensor] = frozenset()
    layout: ParameterLayout | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Logical name -> the live tensor; tied tensors once, under their first name. Collective
        where the layout says so."""
        state, layout = self._state(), self.layout
        model = model_tensors(self.model, self.away)
        if layout is not None:
            state = {name: layout.logical(parameter_of(name), t) for name, t in state.items()}
            model = {
                name: layout.saved(name.removeprefix("model."), t) for name, t in model.items()
            }
        rows = self._growing.saved(self.optimizer)
        return {**model, **state, **rows}

    def tensors_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Kind (gradient, parameter, buffer, optimizer) -> logical name -> live tensor."""
        growing = self._growing
        parameters = {n: p for n, p in self._parameters().items() if not growing.has(n)}
        state = self._state()
        rows = growing.numbers(self.optimizer) if self.layout is None else {}
        found: dict[str, dict[str, Tensor]] = {
            "gradient": {n: p.grad for n, p in parameters.items() if p.grad is not None},
            "parameter": {n: p.detach() for n, p in parameters.items()},
            "buffer": dict(self.model.named_buffers()),
            "optimizer": {n.removeprefix("optimizer."): t for n, t in state.items()},
        }
        return {kind: {**found.get(kind, {}), **rows.get(kind, {})} for kind in {**found, **rows}}

    @property
    def _growing(self) -> GrowingTables:
        """Tables that grow; without a layout this process has all of them."""
        grown = None if self.layout is None else self.layout.growing
        return grown or GrowingTables(self.model)

    def _state(self) -> dict[str, Tensor]:
        """The optimiser's tensors; of tables that grow those that belong to no row."""
        # Adagrad has something of a parameter before its first step, also of one that is away.
        here = {p: name for p, name in self.names().items() if p not in self.away}
        state, growing = _optimizer_tensors(self.optimizer, here), self._growing
        return {name: t for name, t in state.items() if not (t.dim() and growing.has(name))}

    def facts(self) -> Facts:
        """Everything that is not a tensor, as plain values."""
        return {
            "optimizer": _optimizer_facts(self.optimizer, self.names()),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def names(self) -> dict[Tensor, str]:
        """Parameter -> logical name; `check_components` has refused an optimiser of others."""
        return {parameter: name for name, parameter in self._parameters().items()}

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        found = self.layout.named if self.layout else {}
        return found or dict(self.model.named_parameters())

    def destinations(self, manifest: Manifest) -> dict[str, Tensor]:
        """The memory to read a checkpoint into: the model's own, new tensors for the optimiser.

        Nothing is read of what only other ranks hold.

        Raises:
            CheckpointMismatch: Names, shapes or types differ; all differences are listed.
        """
        targets = model_tensors(self.model)
        away = targets.keys() - model_tensors(self.model, self.away).keys()
        layout = self.layout
        if layout is not None:
            targets = {n: layout.target(n.removeprefix("model."), t) for n, t in targets.items()}
        places = {name: parameter for parameter, name in self.names().items()}
        growing = self._growing
        targets |= growing.needed()
        for name, entry in manifest.tensors.items():
            if growing.has(name) and (name.startswith("model.") or entry.shape):
                targets[name] = growing.target(name, entry)
                continue
            # Residuals of compressors are read even if this run has no compressor, to warn of it.
            if name.startswith((STATE_PREFIX, "optimizer.")):
                targets[name] = self._place(name, entry, places)
        check_match(targets, manifest, "", complete=True)
        # What is away has no memory to read into; the meta device marks its optimiser state.
        return {n: t for n, t in targets.items() if n not in away and not t.is_meta}

    def _place(self, name: str, entry: TensorEntry, places: Mapping[str, Tensor]) -> Tensor:
        """New memory for a tensor of a checkpoint; on the meta device where it is away."""
        device = torch.device("cpu")
        common = name.endswith((f"/{MOMENTUM}", f"/{START}"))
        if common or name.startswith("optimizer."):
            owner = places[_owner(name, places)]
            # Single numbers, such as Adam's step, stay on the host, as torch keeps them.
            room: Tensor | None = None
            if self.layout is not None:
                room = self.layout.room(parameter_of(name), entry.shape, _dtype_of(entry))
            if owner in self.away:
                device = torch.device("meta")
            elif room is not None:
                return room
            elif isinstance(owner, DTensor) and tuple(entry.shape) == tuple(owner.shape):
                return torch.empty_like(owner, dtype=_dtype_of(entry))
            elif entry.shape:
                device = owner.device
        return torch.empty(entry.shape, dtype=_dtype_of(entry), device=device)

    def apply(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Restore optimiser and scheduler, once `tensors` have been read."""
        facts, growing = manifest.facts, self._growing
        rows = {n: t for n, t in tensors.items() if growing.has(n)}
        tensors = {n: t for n, t in tensors.items() if not (n in rows and t.dim())}
        if self.layout is not None:
            tensors = self._laid_out(self.layout, tensors)
        if facts.get("optimizer") is not None:
            away = {name for p, name in self.names().items() if p in self.away}
            tensors = _beside_parameters(tensors, self._parameters())
            _restore_optimizer(self.optimizer, self.names(), facts["optimizer"], tensors, away)
        growing.restore({n: t for n, t in rows.items() if n.startswith("model.") or t.dim()},
                        self.optimizer)  # fmt: skip
        if self.scheduler is not None and facts.get("scheduler") is not None:
            self.scheduler.load_state_dict(facts["scheduler"])

    def _laid_out(
        self, layout: ParameterLayout, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Put what has been read into the layout in which this rank holds it."""
        for name, parameter in layout.named.items():
            if parameter in self.away or self._growing.has(name):
                continue
            with torch.no_grad():
                held = layout.held(name, tensors[f"model.{name}"])
                if file_of(parameter) is None:
                    parameter.copy_(held)
                elif held.data_ptr() != parameter.data_ptr():
                    copy_rows(parameter.detach(), held)
        return {
            name: layout.held(parameter_of(name), tensor)
            if isinstance(tensor, DTensor | TensorPart)
            else tensor
            for name, tensor in tensors.items()
            if name.startswith("optimizer.")
        }


def _dtype_of(entry: TensorEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def parameter_of(name: str) -> str:
    """The parameter of an optimiser tensor, or of what workers have agreed on."""
    if name.startswith(STATE_PREFIX):
        return name.removeprefix(STATE_PREFIX).rpartition("/")[0]
    # Names of parameters contain dots themselves.
    return name.removeprefix("optimizer.").rpartition(".")[0]


def model_tensors(model: nn.Module, away: Set[Tensor] = frozenset()) -> dict[str, Tensor]:
    """`model.<name>` -> live tensor of every parameter and persistent buffer, tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    growing = GrowingTables(model)
    with growing.rows_apart():
        # `keep_vars`, because detached tensors would not show that two names are tied.
        state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if growing.has(name):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"model.{name} is a {type(value).__name__}, not a tensor",
                fix="Keep extra state of modules in buffers.",
            )
        if id(value) not in seen and value not in away:
            seen.add(id(value))
            found[f"model.{name}"] = value.detach()
    return found


def _optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _optimizer_facts(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Facts:
    groups = [
        {
            "names": [names[p] for p in group["params"]],
            "values": {key: _plain(value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    scalars = {
        names[p]: {k: v for k, v in optimizer.state[p].items() if not isinstance(v, Tensor)}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    }
    return {
        "groups": groups,
        "scalars": {name: values for name, values in scalars.items() if values},
    }


def _plain(value: Any) -> Any:
    """A tensor learning rate as a number; everything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _owner(name: str, places: Mapping[str, Tensor]) -> str:
    owner = parameter_of(name)
    if owner not in places:
        raise CheckpointMismatch(
            f"the checkpoint has optimiser state for {owner}, which the model does not have",
            fix="Resume with the model that was saved, or start from its weights only.",
        )
    return owner


def _beside_parameters(
    tensors: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What an optimiser keeps of a DTensor is one, also a number for each row, of which every rank
    has all, as `new_zeros` makes it. Single numbers are none."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        owner = named.get(parameter_of(name)) if name.startswith("optimizer.") else None
        if isinstance(owner, DTensor) and tensor.dim() and not isinstance(tensor, DTensor):
            mesh = owner.device_mesh
            everywhere = [Replicate()] * mesh.ndim
            found[name] = DTensor.from_local(tensor, mesh, everywhere, run_check=False)
    return found


def _restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    facts: Facts,
    tensors: Mapping[str, Tensor],
    away: Set[str],
) -> None:
    # `Optimizer.load_state_dict` identifies parameters by their position, not by name.
    live = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["names"]) for group in facts["groups"]]
    if live != saved:
        raise CheckpointMismatch(
            "the optimiser groups the parameters differently than the saved one",
            why=f"Saved groups of {[len(g) for g in saved]} parameters, here "
            f"{[len(g) for g in live]}.",
            fix="Resume with the optimiser that was saved.",
        )
    order = [name for group in live for name in group]
    found: dict[str, dict[str, Any]] = {
        name: {} if name in away else dict(facts["scalars"].get(name, {})) for name in order
    }
    for full, tensor in tensors.items():
        owner, _, key = full.removeprefix("optimizer.").rpartition(".")
        if full.startswith("optimizer.") and owner in found:
            found[owner][key] = tensor
    state = {number: found[name] for number, name in enumerate(order) if found[name]}
    positions = iter(range(len(order)))
    groups = [
        {**group["values"], "params": [next(positions) for _ in group["names"]]}
        for group in facts["groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
