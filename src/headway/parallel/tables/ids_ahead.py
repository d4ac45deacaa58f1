"""Which parts of a batch hold the ids that tables are asked for: known before the model runs.

Found out in a step: the ids that the modules were given are compared with the tensors of the batch,
and their columns. Of the next batch these are hints then, from which rows can be read ahead; that a
model computes its ids otherwise, or does so from some step on, costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_ALIKE = 0.9
"""The share of ids that must be the same: a model may replace some, of padding."""

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Source:
    """Where ids come from.

    Attributes:
        path: Keys to the tensor in a batch.
        pick: Dimension and index of the part of it; None: all.
        shift: What is added, by column: the beginnings of fields that share a table.
    """

    path: Path
    pick: tuple[int, int] | None = None
    shift: Tensor | None = None

    def ids(self, leaves: Mapping[Path, Tensor]) -> Tensor | None:
        leaf = leaves.get(self.path)
        if leaf is None:
            return None
        if self.pick is not None:
            dim, index = self.pick
            if leaf.ndim <= dim or leaf.shape[dim] <= index:
                return None
            leaf = leaf.select(dim, index)
        if self.shift is not None:
            if leaf.shape[1:] != self.shift.shape[1:]:
                return None
            leaf = leaf + self.shift
        return leaf.reshape(-1)


class IdsAhead:
    """Learns where the ids of tables come from, and finds those of another batch.

    Args:
        modules: Name of a table -> the modules that look it up.
    """

    def __init__(self, modules: Mapping[str, Sequence[nn.Module]]) -> None:
        self._asked: list[tuple[str, Tensor]] = []
        self._sources: list[tuple[str, _Source]] = []
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, users in modules.items()
            for module in users
        ]

    @property
    def is_learning(self) -> bool:
        """Whether `learn` has not been called."""
        return bool(self._hooks)

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        if isinstance(ids, Tensor):
            self._asked.append((name, ids.detach()))

    def learn(self, batches: Sequence[Any]) -> list[str]:
        """Compare what has been asked for with the batches of which the model has made it.

        Returns:
            Names of tables with ids that are in none of them.
        """
        found, known = set(), {name for name, _ in self._asked}
        for batch in batches:
            leaves = dict(_leaves(batch))
            for name, ids in self._asked:
                for source in _sources(ids, leaves):
                    found.add(name)
                    if not any(n == name and _same(s, source) for n, s in self._sources):
                        self._sources.append((name, source))
                    break
        self.close()
        return sorted(known - found)

    def ids_of(self, batches: Sequence[Any]) -> dict[str, Tensor]:
        """By table, what it will be asked for of these batches; int64."""
        found: dict[str, list[Tensor]] = {}
        for batch in batches:
            leaves = dict(_leaves(batch))
            for name, source in self._sources:
                ids = source.ids(leaves)
                if ids is not None:
                    found.setdefault(name, []).append(ids.long())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._asked = [], []


def _same(one: _Source, other: _Source) -> bool:
    return (one.path, one.pick) == (other.path, other.pick)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Tensors of integers, wherever they lie in a batch."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() and value.dtype != torch.bool and value.numel():
            yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(value, tuple | list):
        for key, part in enumerate(value):
            yield from _leaves(part, (*path, key))


def _sources(ids: Tensor, leaves: Mapping[Path, Tensor]) -> Iterator[_Source]:
    """What of a batch these ids may be, the likeliest first."""
    if not ids.numel():
        return
    for path, leaf in leaves.items():
        if leaf.numel() == ids.numel() and _is(ids, leaf):
            yield _Source(path)
    for path, leaf in leaves.items():
        # From the last dimension: columns are asked for more often than samples.
        for dim in reversed(range(leaf.ndim)):
            if leaf.numel() == ids.numel() * leaf.shape[dim]:
                for index in range(leaf.shape[dim]):
                    if _is(ids, leaf.select(dim, index)):
                        yield _Source(path, (dim, index))
    for path, leaf in leaves.items():
        if leaf.shape == ids.shape and leaf.ndim > 1 and len(leaf) > 1:
            shift = (ids - leaf).mode(0, keepdim=True).values
            if _is(ids, leaf + shift):
                yield _Source(path, shift=shift)


def _is(ids: Tensor, part: Tensor) -> bool:
    same = ids.reshape(-1) == part.reshape(-1)
    return int(same.sum()) >= _ALIKE * ids.numel()
