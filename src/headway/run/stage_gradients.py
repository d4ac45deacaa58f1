"""The hands on the gradients where every rank trains only the stages that it holds.

Sums over the copies of a stage are made by the schedule's SYNC; what is left is scaling, clipping
by the norm over all stages, and the update. Each parameter has an owner, the first rank that holds
its first stage. Invariant: after `flush` every rank has the whole model and the optimiser's whole
state, so that checkpoints, validation and verification need not know of stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headway.run.gradients import Gradients


@dataclass(frozen=True)
class Homes:
    """Who trains what.

    Attributes:
        owner: Logical name of each parameter and buffer -> the rank whose numbers count.
        own: Names of the parameters that this rank trains.
        holders: Logical name of each parameter -> how many ranks train it.
    """

    owner: Mapping[str, int]
    own: frozenset[str]
    holders: Mapping[str, int]


class StageGradients(Gradients):
    """As `Gradients`; the arguments are the same.

    Attributes:
        homes: Who trains what; set at the first step, when the model has been cut.
    """

    homes: Homes | None = None
    _stale = False

    def clip(self) -> None:
        """Limit the global norm, to which every parameter counts once."""
        assert self._clip is not None
        assert self.homes is not None
        square = torch.zeros((), dtype=torch.float64)
        for name in self.homes.own:
            gradient = self._all[name].grad
            if gradient is not None:
                norm = torch.linalg.vector_norm(gradient).double().cpu()
                square += norm.square() / self.homes.holders[name]
        with self.exchanging():
            dist.all_reduce(square)
        self._record.norm = math.sqrt(float(square))
        if not math.isfinite(self._record.norm):
            raise self._diverged(f"the norm of the gradients is {self._record.norm}")
        factor = self._clip / (self._record.norm + 1e-6)  # torch's
        if factor < 1.0:
            for name in self.homes.own:
                gradient = self._all[name].grad
                if gradient is not None:
                    gradient.mul_(factor)

    def update(self) -> None:
        super().update()
        self._stale = True

    def flush(self) -> None:
        """Give every rank the owners' parameters, buffers and optimiser state; collective."""
        if not self._stale:
            return
        self._stale = False
        assert self.homes is not None
        tensors = {**self._all, **dict(self._model.named_buffers())}
        with self.exchanging(), torch.no_grad():
            _broadcast({name: t.data for name, t in tensors.items()}, self.homes.owner)
            self._share_state(self.homes.owner)

    def show(self) -> None:
        """Give every rank all gradients, too."""
        self.flush()
        assert self.homes is not None
        mine = [n for n, p in self._all.items() if p.grad is not None and self._owns(n)]
        present: list[Sequence[str]] = [()] * self._world.ranks
        with self.exchanging(), torch.no_grad():
            dist.all_gather_object(present, mine)
            for name in (name for names in present for name in names):
                parameter = self._all[name]
                if parameter.grad is None or parameter.grad.is_sparse:
                    dense = torch.zeros_like(parameter)
                    parameter.grad = dense if parameter.grad is None else parameter.grad.to_dense()
            gradients = {n: self._all[n].grad for names in present for n in names}
            _broadcast({n: g for n, g in gradients.items() if g is not None}, self.homes.owner)

    def close(self) -> None:
        self.flush()
        super().close()

    def _owns(self, name: str) -> bool:
        assert self.homes is not None
        return self.homes.owner[name] == self._world.rank

    def _share_state(self, owner: Mapping[str, int]) -> None:
        state = self._optimizer.state
        own = {
            name: {k: _Form.of(v) for k, v in state[self._all[name]].items()}
            for name in self._all
            if self._owns(name) and self._all[name] in state
        }
        gathered: list[dict[str, dict[str, object]]] = [{}] * self._world.ranks
        dist.all_gather_object(gathered, own)
        tensors: dict[str, Tensor] = {}
        for name, entries in ((n, e) for found in gathered for n, e in found.items()):
            target = state[self._all[name]]
            for key, value in entries.items():
                if not isinstance(value, _Form):
                    target[key] = value
                    continue
                if key not in target:
                    target[key] = value.empty(self._all[name].device)
                tensors[f"{name}\n{key}"] = target[key]
        _broadcast(tensors, {key: owner[key.partition("\n")[0]] for key in tensors})


@dataclass(frozen=True)
class _Form:
    """What a tensor of an optimiser's state looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @staticmethod
    def of(value: object) -> object:
        if isinstance(value, Tensor):
            return _Form(tuple(value.shape), value.dtype, value.device.type == "cpu")
        return value

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(
            self.shape, dtype=self.dtype, device=torch.device("cpu") if self.on_cpu else device
        )


def _broadcast(tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> None:
    """Give every rank the owners' numbers; in one message per owner, type and device."""
    groups: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        groups.setdefault((owner[name], tensor.dtype, tensor.device), []).append(tensor)
    for (rank, _, _), chosen in groups.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        dist.broadcast(flat, src=rank)
        _spread(flat, chosen)


def _spread(flat: Tensor, targets: Iterable[Tensor]) -> None:
    start = 0
    for target in targets:
        target.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()
