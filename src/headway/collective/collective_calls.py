"""The communication calls of one rank in one training step: kind, mesh axis, bytes, count.

The planner predicts these lists, the dry run and the recorder observe them, and the two are
compared. `CommunicatingStage` holds what of a model decides which calls its rank makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from headway.graph.model_graph import TensorSpec
from headway.units import format_bytes

CallKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "receive",
]
Phase = Literal["forward", "backward", "gradients", "tally"]
CallListener = Callable[[CallKind, int, float], None]
"""Is told kind, ranks and bytes of an operation, as of a `CollectiveCall`."""


def ignore_call(kind: CallKind, ranks: int, size: float) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """Equal operations of one rank in one step.

    Attributes:
        axis: Of the mesh: "tensor", "space", "data", "pipe"; "world" for all ranks.
        ranks: That take part; 2 for a message.
        bytes: Of one: the buffer that is summed, gathered or scattered as a whole; for all_to_all
            what a rank hands over; of a message itself.
        phase: "forward", "backward" or "gradients", "tally" for the sum of losses.
        beside: Of `bytes`, those that are no numbers of the model: flags, filling up.
    """

    kind: CallKind
    axis: str
    ranks: int
    bytes: float
    count: int = 1
    phase: Phase
    beside: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return self.bytes * self.count


CollectiveCalls = tuple[CollectiveCall, ...]


Parameters = Mapping[str, TensorSpec]
"""By logical name, in the order of registration."""


@dataclass(frozen=True, kw_only=True)
class CommunicatingStage:
    """One stage of a model, or all of it, as a rank of a plan has it: what decides what it sends.

    Attributes:
        parameters: Those that it trains, as they lie on the rank where layers are split; one that
            several stages use stands in each of them.
        sends: For each later stage that it gives values to, the bytes of each tensor of one
            micro-batch, and whether its gradient comes back.
        frozen: Parameters that it uses and does not train.
        gathered: Of a whole model whose state is kept in parts: names of the parameters that FSDP2
            gathers together, but for the last such group (`parallel.state_sharding.groups_of`).
            None: not known.
        passes: What its operators send for one micro-batch, by the letter that an action has in a
            schedule (F, B, I, W). None: not known.
        cuts: Logical name -> axes (name, ranks) over which layers are split and the parameter is.
    """

    parameters: Parameters
    sends: Mapping[int, Sequence[tuple[int, bool]]] = field(default_factory=dict)
    frozen: Parameters = field(default_factory=dict)
    gathered: Sequence[Sequence[str]] | None = None
    passes: Mapping[str, CollectiveCalls] | None = None
    cuts: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)


def merge_calls(calls: Iterable[CollectiveCall]) -> CollectiveCalls:
    """Equal ones as one entry with their number, in the order of the first of them."""
    found: Counter[CollectiveCall] = Counter()
    for call in calls:
        if call.count and call.ranks > 1 and call.bytes:
            found[replace(call, count=1, bytes=float(call.bytes))] += call.count
    return tuple(replace(call, count=count) for call, count in found.items())


def call_table_lines(stages: Iterable[CollectiveCalls], what: str = "stage") -> Iterator[str]:
    """The lines of a table for people; stages, or what they are, that do the same share them."""
    alike: dict[CollectiveCalls, list[int]] = {}
    for number, calls in enumerate(stages):
        alike.setdefault(calls, []).append(number)
    for calls, numbers in alike.items():
        if len(alike) > 1:
            yield f"{what} {_number_ranges(numbers)}:"
        for call in calls:
            beside = f", of these {format_bytes(call.beside)} flags" if call.beside else ""
            yield (
                f"  {call.count:>7} x {format_bytes(call.bytes):>9}  {call.kind:<14} "
                f"{call.axis:<6} of {call.ranks:<5} {call.phase}{beside}"
            )
        if not calls:
            yield "  none"


def _number_ranges(numbers: list[int]) -> str:
    """ "0, 2-5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, dict.fromkeys(span))) for span in spans)
