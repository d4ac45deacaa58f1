"""What a rank asks for, as it travels to the coordinator, and what ranks must agree about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class HorovodOp(IntEnum):
    """How values of ranks are combined; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


FIRST_DIM_FREE = ("allgather", "alltoall")
"""Kinds whose tensors may differ in the first dimension from rank to rank."""
NEEDS_ROWS = ("allgather", "alltoall", "reducescatter")
"""Kinds that cut or join tensors along the first dimension."""
GLOBAL_SET = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One operation of one rank.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
            "add_set" or "remove_set".
        process_set: The number of the process set.
        dtypes: Of each tensor of the operation: several for one that is grouped.
        root: A global rank.
        before: Factor of each rank's values, before they are combined.
        after: Factor of the result.
        splits: Rows for each rank of the set, of an alltoall; empty: equal parts.
        ranks: Of the set that is to be added.
    """

    kind: str
    name: str
    process_set: int = GLOBAL_SET
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = HorovodOp.SUM
    root: int = 0
    before: float = 1.0
    after: float = 1.0
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        """What operations of ranks are matched by."""
        return self.process_set, self.name

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(
            math.prod(shape) * dtype_of(name).itemsize
            for name, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    def to_message(self) -> list[Any]:
        """Plain values."""
        return [getattr(self, each.name) for each in fields(self)]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Request:
        """The inverse of `to_message`, of values that have been a text."""
        return cls(*(_hashable(value) for value in message))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def dtype_name(tensor: Tensor) -> str:
    """ "float32" """
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def disagreement(requests: Mapping[int, Request], members: Sequence[int]) -> str:
    """Why ranks cannot do together what they ask for; empty where they can.

    Args:
        requests: By rank.
        members: The ranks of the process set.
    """
    ranks = sorted(requests)
    first = requests[ranks[0]]
    name = f"{first.kind} {first.name!r}"
    for rank in ranks[1:]:
        for what, one, other in _facts(first, requests[rank]):
            if one != other:
                return f"{name}: {what} differ: rank {ranks[0]} has {one}, rank {rank} has {other}"
    return ""


def wrong_argument(requests: Mapping[int, Request], members: Sequence[int]) -> str:
    """What is wrong with what ranks that agree ask for; empty: nothing."""
    first = next(iter(requests.values()))
    name = f"{first.kind} {first.name!r}"
    if first.kind == "broadcast" and first.root not in members:
        return f"{name}: the root, rank {first.root}, is none of the ranks {_listed(members)}"
    if first.kind in NEEDS_ROWS and () in first.shapes:
        return f"{name}: a tensor without dimensions has no rows"
    return _wrong_splits(requests, members) if first.kind == "alltoall" else ""


def _wrong_splits(requests: Mapping[int, Request], members: Sequence[int]) -> str:
    """What is wrong with the rows that ranks send to each other in an alltoall."""
    for rank, request in sorted(requests.items()):
        rows, splits = request.shapes[0][0], request.splits
        where = f"alltoall {request.name!r}, rank {rank}"
        if not splits:
            if rows % len(members):
                return f"{where}: {rows} rows cannot be divided by {len(members)} ranks"
        elif len(splits) != len(members):
            return f"{where}: {len(splits)} splits for {len(members)} ranks"
        elif min(splits) < 0:
            return f"{where}: a split is negative: {_listed(splits)}"
        elif sum(splits) > rows:
            return f"{where}: the splits are {sum(splits)} rows together, the tensor has {rows}"
    return ""


def _facts(one: Request, other: Request) -> list[tuple[str, Any, Any]]:
    free = one.kind in FIRST_DIM_FREE
    shapes = [
        [shape[1:] if free and shape else shape for shape in request.shapes]
        for request in (one, other)
    ]
    dims = [[len(shape) for shape in request.shapes] for request in (one, other)]
    return [
        ("operations of this name", one.kind, other.kind),
        ("numbers of tensors", len(one.shapes), len(other.shapes)),
        ("types", _listed(one.dtypes), _listed(other.dtypes)),
        ("numbers of dimensions", _listed(dims[0]), _listed(dims[1])),
        ("shapes", _listed(shapes[0]), _listed(shapes[1])),
        ("devices", one.device, other.device),
        ("reductions", HorovodOp(one.op).name, HorovodOp(other.op).name),
        ("roots", one.root, other.root),
        ("scale factors", (one.before, one.after), (other.before, other.after)),
        ("ranks of the process set", _listed(one.ranks), _listed(other.ranks)),
    ]


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values)
