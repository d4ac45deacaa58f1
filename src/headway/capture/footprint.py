"""What a call of an operator needs in memory beside its tensors: autograd is asked, once per kind.

The call is repeated alone with stand-ins, forward and backward, and every storage that appears or
goes is counted. Invariant: two calls with equal shapes, strides, types, attributes and wanted
gradients are asked once; nothing of the recorded forward is touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headway.graph import Footprint

Key = Hashable


@dataclass
class Footprints:
    """What has been asked; `of` asks."""

    known: dict[Key, Footprint] = field(default_factory=dict)

    def of(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        used: Sequence[int],
    ) -> Footprint:
        """Of one call.

        Args:
            target: The operator.
            args: Its arguments, stand-ins.
            kwargs: By name.
            tensors: The tensors among the arguments, in the order of the graph's inputs.
            needs: For each of them, whether backward computes its gradient.
            used: The places of the results that are kept.
        """
        key = _key(target, args, kwargs, tensors, needs, used)
        if key not in self.known:
            try:
                found = _Probe(tensors, needs, used).ask(target, args, kwargs)
            except Exception:  # an operator that cannot be repeated alone: its own tensors count
                found = _plain(tensors, needs)
            self.known[key] = found
        return self.known[key]


def _plain(tensors: Sequence[Tensor], needs: Sequence[bool]) -> Footprint:
    bytes_ = sum(t.numel() * t.element_size() for t, n in zip(tensors, needs, strict=True) if n)
    return Footprint(backward=bytes_, gradients=tuple("new" if need else "" for need in needs))


def _key(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    used: Sequence[int],
) -> Key:
    first: dict[int, int] = {}
    wanted = {id(t): need for t, need in zip(tensors, needs, strict=True)}

    def said(value: Any) -> Key:
        if not isinstance(value, Tensor):
            return repr(value)
        place = first.setdefault(id(value), len(first))
        return (
            tuple(map(int, value.shape)),
            tuple(map(int, value.stride())),
            value.dtype,
            place,
            wanted.get(id(value), False),
        )

    leaves = tuple(said(leaf) for leaf in tree_leaves((tuple(args), dict(kwargs))))
    names = tuple(kwargs)
    return (target, leaves, names, tuple(used), torch.is_autocast_enabled("cpu"))


class _Meter(TorchDispatchMode):
    """Bytes of the storages that were made while it is on and are still alive.

    Attributes:
        now: Bytes.
        peak: The largest `now` since it was last set.
        serial: A number for every storage alive, by its identity.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.serial: dict[int, int] = {}
        self._count = 0
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.now)
        return result

    def watch(self, tensor: Tensor, *, count: bool = True) -> int:
        """The number of its storage; a new one is counted until it goes."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.serial:
            size = int(storage.nbytes()) if count else 0
            self._count += 1
            self.serial[key] = self._count
            self.now += size

            def gone(_: Any) -> None:
                self.now -= size
                self.serial.pop(key, None)
                self._watched.pop(key, None)

            self._watched[key] = weakref.ref(storage, gone)
        return self.serial[key]


class _Enter(torch.autograd.Function):
    """A tensor in new memory; its gradient is noted and kept by the probe."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, probe: _Probe, place: int) -> Tensor:
        ctx.probe, ctx.place = probe, place
        return _like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.probe.arrived[ctx.place] = gradient
        return None, None, None


class _Exit(torch.autograd.Function):
    """Makes the gradient with which the backward of a result begins, and keeps no hold of it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, probe: _Probe, place: int) -> Tensor:
        ctx.probe, ctx.place = probe, place
        ctx.meta = (tuple(result.shape), result.dtype)
        return torch.empty((), dtype=result.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        shape, dtype = ctx.meta
        made = torch.empty(shape, dtype=dtype)
        meter = ctx.probe.meter
        ctx.probe.begun[ctx.place] = meter.watch(made)
        ctx.probe.start = meter.peak = meter.now
        return made, None, None


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _same(tensor: Any) -> Any:
    return tensor


class _Probe:
    """One call, repeated.

    Attributes:
        arrived: Gradients of inputs, by place.
        begun: Numbers of the storages of results' gradients, by place.
        start: Bytes when the operator's own backward began.
    """

    def __init__(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], used: Sequence[int]
    ) -> None:
        self.tensors, self.needs, self.used = tensors, needs, used
        self.meter = _Meter()
        self.arrived: dict[int, Tensor] = {}
        self.begun: dict[int, int] = {}
        self.start = 0

    def ask(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Footprint:
        """Forward, then backward."""
        with saved_tensors_hooks(_same, _same):
            entered = self._enter()
            whole = (tuple(args), dict(kwargs))
            given, named = tree_map_only(Tensor, lambda t: entered[id(t)], whole)
            places = [self.meter.watch(entered[id(t)], count=False) for t in self.tensors]
            with self.meter:
                result = target(*given, **named)
            results = list(result) if isinstance(result, tuple | list) else [result]
            kept = [results[place] for place in self.used]
            del result, results, given, named
            forward = self.meter.peak - self.meter.now
            aliases, seen = [], list(places)
            for value in kept:
                number = self.meter.watch(value)
                aliases.append(seen.index(number) if number in seen else -1)
                seen.append(number)
            entered.clear()
            return self._footprint(forward, tuple(aliases), self._backward(kept))

    def _enter(self) -> dict[int, Tensor]:
        entered: dict[int, Tensor] = {}
        for place, (tensor, need) in enumerate(zip(self.tensors, self.needs, strict=True)):
            if id(tensor) in entered:
                continue
            fresh = _like(tensor)
            if need:
                fresh = _Enter.apply(fresh.requires_grad_(), self, place)  # type: ignore[no-untyped-call]
            entered[id(tensor)] = fresh
        return entered

    def _backward(self, kept: list[Tensor]) -> int:
        """Bytes above those at its beginning."""
        ends = [
            _Exit.apply(value, self, place)  # type: ignore[no-untyped-call]
            for place, value in enumerate(kept)
            if value.requires_grad
        ]
        if not ends or not any(self.needs):
            return 0
        total = torch.stack([end.float() if end.is_floating_point() else end for end in ends]).sum()
        with self.meter:
            total.backward()
        return self.meter.peak - self.start

    def _footprint(self, forward: int, aliases: tuple[int, ...], backward: int) -> Footprint:
        gradients, seen = [], dict[int, str]()
        for place, number in self.begun.items():
            seen.setdefault(number, f"out{place}")
        for place in range(len(self.tensors)):
            arrived = self.arrived.get(place)
            if arrived is None:
                gradients.append("")
                continue
            number = self.meter.watch(arrived)
            gradients.append(seen.get(number, "new"))
            seen.setdefault(number, f"in{place}")
        own = all(alias < 0 for alias in aliases)
        return Footprint(
            aliases=() if own else aliases,
            forward=forward,
            backward=backward,
            gradients=tuple(gradients) if any(gradients) else (),
        )
