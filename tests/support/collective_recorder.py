"""Records which collectives really run: every torch.distributed operation of this thread.

Observed below autograd and below DTensor, on real and on fake groups: the plain operations (c10d),
and those of compiled and tensor-parallel code (functional). An operation that is not known here is
recorded under torch's own name, so that no comparison overlooks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.collective.collective_calls import CollectiveCall
from support.fake_world import group_named

_SPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_QUIET = frozenset({"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"})
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
}


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One operation; see `collective.calls.Call`.

    Attributes:
        kind: As of a `CollectiveCall`; torch's name for others.
        ranks: Of its group; 2 for a message.
        bytes: As of a `CollectiveCall`.
    """

    kind: str
    ranks: int
    bytes: float


class CollectiveRecorder(TorchDispatchMode):
    """Within `with Recorder() as recorder:` all operations are noted in `recorder.seen`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[RecordedCollective] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with what it is made of
        name = function.overloadpacket.__name__
        if function.namespace in _SPACES and name not in _QUIET:
            self.seen.append(_look(name, args))
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> CollectiveRecorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


def _look(name: str, args: Sequence[Any]) -> RecordedCollective:
    kind = _KINDS.get(name, name)
    if kind in ("send", "receive"):
        return RecordedCollective(kind, 2, _bytes(args[0]))
    ranks = _ranks(args)
    # c10d's plain gathers and scatters have (outputs, inputs), the functional ones the input alone.
    plain = name.endswith("_")
    if kind == "all_gather":
        return RecordedCollective(kind, ranks, _bytes(args[1] if plain else args[0]) * ranks)
    if kind == "reduce_scatter":
        return RecordedCollective(kind, ranks, _bytes(args[0]) * (ranks if plain else 1))
    return RecordedCollective(
        kind, ranks, _bytes(args[1] if kind == "all_to_all" and plain else args[0])
    )


def _ranks(args: Sequence[Any]) -> int:
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg.size()
        if hasattr(arg, "_type") and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
    return group_named(next(arg for arg in reversed(args) if isinstance(arg, str))).size()


def _bytes(thing: Any) -> float:
    if isinstance(thing, Tensor):
        return float(thing.numel() * thing.element_size())
    return sum(map(_bytes, thing), 0.0) if isinstance(thing, list | tuple) else 0.0


def count_collectives(seen: Iterable[RecordedCollective]) -> Counter[RecordedCollective]:
    """How often each operation was seen."""
    return Counter(one for one in seen if one.ranks > 1 and one.bytes)


def expected_collectives(calls: Iterable[CollectiveCall]) -> Counter[RecordedCollective]:
    """What a list of calls says will be seen."""
    found: Counter[RecordedCollective] = Counter()
    for call in calls:
        found[RecordedCollective(call.kind, call.ranks, call.bytes)] += call.count
    return found


def collective_differences(
    calls: Iterable[CollectiveCall], seen: Iterable[RecordedCollective]
) -> Iterator[str]:
    """One line for each operation whose numbers differ; none if count and bytes are equal."""
    plan, run = expected_collectives(calls), count_collectives(seen)
    for one in sorted({*plan, *run}, key=lambda s: (s.kind, s.ranks, s.bytes)):
        if plan[one] != run[one]:
            yield (
                f"{one.kind} of {one.ranks} ranks, {one.bytes:.0f} bytes: "
                f"{plan[one]} in the plan, {run[one]} seen"
            )


def record_collectives(do: Callable[[], object]) -> list[RecordedCollective]:
    """What a function starts."""
    with CollectiveRecorder() as recorder:
        do()
    return recorder.seen
