"""Replicas of `headway.synchrony.actors`: parameters of the user's model, with its optimiser.

`ModelReplica` is the model of a worker itself. `SharedReplica` is a copy of some of its parameters
with an optimiser of the same kind, which a holder steps by gradients that were computed elsewhere.
`ShareReplica` is a worker's model as servers see it: a value for each of their shares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.checkpoint.staging import local_data
from headway.comm.exchange.priority_exchange import empty_copy
from headway.errors import RunError
from headway.parallel.fsdp import part_as_dtensor
from headway.run.synchrony.bundle import Bundle

StateRows: TypeAlias = tuple[tuple[str, str, Any], ...]
"""State of an optimiser: logical name of the parameter, key, value."""


class ModelReplica:
    """Parameters where they lie in the model, stepped by the user's optimiser.

    Of a parameter that the ranks of a worker keep in parts, a value has this rank's part.

    Args:
        named: The parameters that this rank updates, by logical name.

    Attributes:
        check_state: Called with the names of the optimiser's tensors before they are read.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self.check_state: Callable[[Sequence[str]], None] | None = None
        self._named = named
        self._optimizer = optimizer

    @property
    def _tensors(self) -> list[Tensor]:
        return [local_data(parameter.detach()) for parameter in self._named.values()]

    def read(self) -> Bundle:
        return Bundle.of(self._tensors)

    def write(self, value: Bundle) -> None:
        value.copy_to(self._tensors)

    def step(self, gradient: object, rate: float = 1.0) -> None:
        """The optimiser's step, with the gradients that backward has left in the parameters."""
        assert rate == 1.0  # only servers divide the rate by a staleness
        self._optimizer.step()

    def clone(self) -> ModelReplica:
        raise RunError("a copy of a worker's own model: no rule of synchrony asks for one")

    def state_tensors(self) -> dict[str, Tensor]:
        """What of the optimiser's state has a number for each element of a parameter."""
        return {
            f"{name}.{key}": local_data(value)
            for name, parameter in self._named.items()
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
        }

    def read_state(self) -> Bundle | None:
        found = self.state_tensors()
        if self.check_state is not None:
            self.check_state(list(found))
        return Bundle.of(list(found.values())) if found else None

    def write_state(self, state: Bundle | None) -> None:
        if state is None:
            self._optimizer.state.clear()
        else:
            state.copy_to(list(self.state_tensors().values()))

    def by_name(self, value: Bundle) -> dict[str, Tensor]:
        """A value of all parameters, by logical name, each in parts as the parameter is."""
        parts = zip(self._named.items(), value.parts(self._tensors), strict=True)
        return {name: _like(parameter, part) for (name, parameter), part in parts}

    def from_names(self, tensors: Mapping[str, Tensor]) -> Bundle:
        """The inverse of `by_name`."""
        return Bundle.of([local_data(tensors[name]) for name in self._named])


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A rank's part of a value, as a part of the whole where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return part
    return part_as_dtensor(part, parameter.device_mesh, parameter.placements, parameter.shape)


class SharedReplica:
    """Copies of some parameters, and an optimiser like the user's for them.

    Args:
        named: The model's parameters whose values it begins with.
        optimizer: The user's, whose class and settings it takes; None: it is never stepped.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> None:
        self._copies = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
        self._optimizer: Optimizer | None = None
        self._groups: list[int] = []
        if optimizer is not None:
            self._optimizer = empty_copy(optimizer)
            self._optimizer.param_groups = []
            copies = {p: self._copies[name] for name, p in named.items()}
            for number, group in enumerate(optimizer.param_groups):
                own = [copies[p] for p in group["params"] if p in copies]
                for p in group["params"]:
                    if p in copies and p in optimizer.state:  # of a run that is resumed
                        self._optimizer.state[copies[p]] = copy.deepcopy(optimizer.state[p])
                if own:
                    self._groups.append(number)
                    self._optimizer.param_groups.append({**group, "params": own})

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        return self._copies

    def read(self) -> Bundle:
        return Bundle.of(list(self._copies.values()))

    def write(self, value: Bundle) -> None:
        value.copy_to([p.data for p in self._copies.values()])

    def step(self, gradient: Bundle, rate: float = 1.0) -> None:
        """A step, with the learning rates that came with the gradient, times `rate`."""
        if self._optimizer is None or not self._optimizer.param_groups:
            return
        used = gradient.used or (True,) * len(self._copies)
        values = gradient.parts(list(self._copies.values()))
        for parameter, value, has in zip(self._copies.values(), values, used, strict=True):
            parameter.grad = value if has else None
        for number, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            rates = gradient.rates
            group["lr"] = (group["lr"] if rates is None else rates[number]) * rate
        self._optimizer.step()
        for parameter in self._copies.values():
            parameter.grad = None

    def clone(self) -> SharedReplica:
        found = copy.copy(self)
        found._copies = {n: nn.Parameter(p.detach().clone()) for n, p in self._copies.items()}
        if self._optimizer is not None:
            mine: dict[Any, nn.Parameter] = dict(
                zip(self._copies.values(), found._copies.values(), strict=True)
            )
            found._optimizer = empty_copy(self._optimizer)
            found._optimizer.param_groups = [
                {**group, "params": [mine[p] for p in group["params"]]}
                for group in self._optimizer.param_groups
            ]
            for parameter, state in self._optimizer.state.items():
                found._optimizer.state[mine[parameter]] = copy.deepcopy(state)
        return found

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimiser's state, by logical name of the parameter."""
        if self._optimizer is None:
            return {}
        state = self._optimizer.state
        return {name: dict(state[p]) for name, p in self._copies.items() if p in state}

    def read_state(self) -> StateRows | None:
        """All of it, copied; None without an optimiser."""
        if self._optimizer is None:
            return None
        rows = (
            (n, key, value) for n, of in self.optimizer_state().items() for key, value in of.items()
        )
        return tuple((name, key, copy.deepcopy(value)) for name, key, value in rows)

    def write_state(self, state: object) -> None:
        raise RunError("state of a server's optimiser is not averaged")


class InitialShare:
    """A share of the parameters that another process holds: what it begins with."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = named

    def read(self) -> Bundle:
        return Bundle.of([p.data for p in self._named.values()])


class ShareReplica:
    """A worker's model with a value for each server's share.

    Args:
        shares: The names in each share.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        shares: Sequence[Sequence[str]],
    ) -> None:
        self._optimizer = optimizer
        self._shares = [{name: named[name] for name in names} for names in shares]

    def read(self) -> tuple[Bundle, ...]:
        return tuple(Bundle.of(list(share.values())) for share in self._shares)

    def write(self, value: Sequence[Bundle]) -> None:
        for share, bundle in zip(self._shares, value, strict=True):
            bundle.copy_to([p.data for p in share.values()])

    def step(self, gradient: object, rate: float = 1.0) -> None:
        """A step of the worker's own, between two fetches."""
        self._optimizer.step()

    def gradient(self) -> tuple[Bundle, ...]:
        """What backward has left in the parameters, by share."""
        return tuple(gradient_of(share, self._optimizer) for share in self._shares)

    def clone(self) -> ShareReplica:
        raise RunError("a copy of a worker's own model: no rule of synchrony asks for one")

    def read_state(self) -> None:
        return None

    def write_state(self, state: object) -> None:
        raise RunError("state of a worker's optimiser is not averaged beside servers")


def gradient_of(named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> Bundle:
    """The gradients of some parameters, with the learning rates of all groups."""
    grads = [p.grad for p in named.values()]
    dense = [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for p, g in zip(named.values(), grads, strict=True)
    ]
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    return Bundle(Bundle.of(dense).flat, tuple(g is not None for g in grads), rates)


def balanced_shares(named: Mapping[str, nn.Parameter], shares: int) -> list[list[str]]:
    """Whole parameters in so many shares: the largest first, each to the least loaded one.

    Where there are fewer parameters than shares, the last ones are empty.
    """
    found: list[list[str]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for name, parameter in sorted(named.items(), key=lambda one: -one[1].numel()):
        least = loads.index(min(loads))
        found[least].append(name)
        loads[least] += parameter.nbytes
    order = list(named)
    return [sorted(names, key=order.index) for names in found]
