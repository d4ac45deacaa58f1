"""Which memory a training step holds at every moment, storage by storage, and its peak.

Forward in order, backward in the reverse order of autograd's engine, the optimizer at the end. A
storage lives for the same reasons as in torch: a result until its last reader, a saved tensor
until its operator's backward, a gradient until it is used or has become a parameter's. Gradients
that meet are accumulated out of place. `MemoryLedger` counts the live bytes by category.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from headway.graph.model_graph import ModelGraph, Operator

Category = Literal[
    "parameters", "buffers", "batch", "gradients", "optimiser", "activations", "temporaries"
]


@dataclass(frozen=True)
class MemoryMoment:
    """Attributes:
    at: What runs: "backward of linear_3".
    bytes: By category.
    place: The number of the operator; -1: none.
    """

    at: str
    bytes: Mapping[Category, int]
    place: int = -1

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MemoryPeak:
    """Attributes:
    moment: The fullest one.
    curve: All of them, in order.
    """

    moment: MemoryMoment
    curve: tuple[MemoryMoment, ...]

    @property
    def bytes(self) -> int:
        return self.moment.total


@dataclass
class MemoryLedger:
    """The storages.

    Attributes:
        place: The operator that runs, for the moments that are noted.
    """

    place: int = -1
    _sizes: dict[str, tuple[int, Category]] = field(default_factory=dict)
    _holders: dict[str, int] = field(default_factory=dict)
    _now: dict[Category, int] = field(default_factory=dict)
    _curve: list[MemoryMoment] = field(default_factory=list)

    def add(self, key: str, size: int, category: Category) -> None:
        """A storage with one holder."""
        self._sizes[key] = size, category
        self._holders[key] = 1
        self._now[category] = self._now.get(category, 0) + size

    def hold(self, key: str) -> None:
        if key in self._holders:
            self._holders[key] += 1

    def drop(self, key: str) -> None:
        if key not in self._holders:
            return
        self._holders[key] -= 1
        if not self._holders[key]:
            size, category = self._sizes.pop(key)
            del self._holders[key]
            self._now[category] -= size

    def waits(self, key: str) -> None:
        """A gradient of a parameter for which another one will come."""
        size, category = self._sizes[key]
        self._sizes[key] = size, "gradients"
        self._now[category] -= size
        self._now["gradients"] = self._now.get("gradients", 0) + size

    def becomes_gradient(self, key: str, parameter: str, size: int) -> None:
        """A gradient arrives at its parameter: it is taken over, copied or added."""
        target = f"gradient of {parameter}"
        if target in self._holders:
            self.note(f"gradient of {parameter} is added")
        # AccumulateGrad takes a gradient over where nobody else holds it, and copies it otherwise.
        elif self._holders[key] == 1 and self._sizes[key][0] == size:
            self.drop(key)
            self.add(target, size, "gradients")
            return
        else:
            self.add(target, size, "gradients")
            self.note(f"gradient of {parameter} is copied")
        self.drop(key)

    def note(self, at: str, more: int = 0) -> None:
        """A moment at which `more` temporary bytes are there, too."""
        bytes_ = {category: size for category, size in self._now.items() if size}
        if more:
            bytes_["temporaries"] = bytes_.get("temporaries", 0) + more
        self._curve.append(MemoryMoment(at, bytes_, self.place))

    def peak(self) -> MemoryPeak:
        empty = MemoryMoment("", {})
        return MemoryPeak(
            max(self._curve, key=lambda m: m.total, default=empty), tuple(self._curve)
        )


# Which memory a training step holds at every moment, storage by storage, and its peak.


@dataclass(frozen=True)
class GraphSlice:
    """Some neighbouring operators of a graph, and what storages they work with.

    Attributes:
        graph: The whole model, not folded.
    """

    graph: ModelGraph
    start: int
    stop: int

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        return self.graph.operators[self.start : self.stop]

    @cached_property
    def roots(self) -> dict[str, str]:
        """For every tensor the one in whose memory it lies."""
        found: dict[str, str] = {}
        for operator in self.graph.operators:
            near = [*operator.inputs, *operator.outputs]
            aliases = operator.footprint.aliases or (-1,) * len(operator.outputs)
            for tensor, alias in zip(operator.outputs, aliases, strict=True):
                # Of a view of a view, too, the tensor that has the memory.
                found[tensor] = tensor if alias < 0 else found.get(near[alias], near[alias])
        return found

    def root(self, tensor: str) -> str:
        return self.roots.get(tensor, tensor)

    @cached_property
    def held(self) -> frozenset[str]:
        """What is there before and after: parameters, buffers, the batch."""
        graph = self.graph
        return frozenset((*graph.parameters, *graph.buffers, *graph.inputs))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every storage."""
        sizes = {name: spec.bytes for name, spec in self.graph.tensors.items()}
        return sizes | {s.name: s.bytes for o in self.graph.operators for s in o.saved}

    @cached_property
    def own(self) -> dict[int, tuple[str, ...]]:
        """For every operator the storages that it makes: results, and saved ones without name."""
        found = {}
        for place, operator in enumerate(self.operators):
            made = [t for t in operator.outputs if self.root(t) == t]
            inside = [s.name for s in operator.saved if s.name.startswith(f"{operator.name}/")]
            found[place] = tuple(dict.fromkeys((*made, *inside)))
        return found

    @cached_property
    def saved(self) -> dict[int, tuple[str, ...]]:
        """For every operator the storages that its backward needs."""
        return {
            place: tuple(s.name for s in operator.saved if s.name not in self.held)
            for place, operator in enumerate(self.operators)
        }

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Storages of activations that come from before the part."""
        made = {t for operator in self.operators for t in operator.outputs}
        used = (t for operator in self.operators for t in operator.inputs)
        outside = (self.root(t) for t in used if t not in made and t not in self.held)
        # A view of a parameter lies in memory that is counted elsewhere.
        return tuple(dict.fromkeys(t for t in outside if t not in self.held))

    @cached_property
    def exits(self) -> tuple[str, ...]:
        """Tensors that later parts use, or results."""
        later = {t for o in self.graph.operators[self.stop :] for t in o.inputs}
        later.update(self.graph.outputs)
        return tuple(t for o in self.operators for t in o.outputs if t in later)

    @cached_property
    def last_use(self) -> dict[int, tuple[str, ...]]:
        """For every operator the tensors that no later one of the part reads.

        What a module makes itself, and not by a module inside of it, may be a local variable of its
        forward: it stays until that returns.
        """
        last: dict[str, int] = {}
        returns = self._returns
        for place, operator in enumerate(self.operators):
            last |= dict.fromkeys(operator.outputs, returns[place])
            last |= {t: max(place, last[t]) for t in operator.inputs if t in last}
        found: dict[int, list[str]] = {}
        for tensor, place in last.items():
            found.setdefault(place, []).append(tensor)
        return {place: tuple(tensors) for place, tensors in found.items()}

    @cached_property
    def _returns(self) -> list[int]:
        """For every operator the last one of the call of the module in which it stands."""
        found: list[int] = []
        ends: dict[str, int] = {}
        for place in reversed(range(len(self.operators))):
            path = self.operators[place].module
            open_ = {path[:n] for n, letter in enumerate(path) if letter == "."} | {"", path}
            # Behind other operators, the same path is another call of the module.
            ends = {module: end for module, end in ends.items() if module in open_}
            for module in open_:
                ends.setdefault(module, place)
            found.append(ends[path])
        return found[::-1]

    @cached_property
    def parameter_uses(self) -> dict[str, int]:
        """How many gradients come together for every parameter."""
        uses: dict[str, int] = {}
        for operator in self.operators:
            for tensor, code in zip(operator.inputs, operator.footprint.gradients, strict=False):
                if code and tensor in self.graph.parameters:
                    uses[tensor] = uses.get(tensor, 0) + 1
        return uses


@dataclass
class MicrobatchPass:
    """One micro-batch on its way through a part.

    Args:
        regions: Ranges of the part's operators that keep only what enters them.
        results: The caller keeps what leaves until the end of backward.
    """

    part: GraphSlice
    ledger: MemoryLedger
    name: str
    regions: Sequence[tuple[int, int]] = ()
    results: bool = True
    pending: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def _key(self, storage: str) -> str:
        return self.again.get(storage, f"{self.name}:{storage}")

    def _region(self, place: int) -> tuple[int, int] | None:
        return next((r for r in self.regions if r[0] <= place < r[1]), None)

    # -- forward -----------------------------------------------------------------------------

    def forward(self) -> None:
        """All operators; then only what is saved and what leaves is there."""
        part, ledger = self.part, self.ledger
        for storage in part.entries:
            ledger.add(self._key(storage), part.sizes[storage], "activations")
        for place in range(len(part.operators)):
            region = self._region(place)
            if region and place == region[0]:
                for storage in self._enters(region):
                    ledger.hold(self._key(storage))
            self._operator(place, keeps=region is None)
            for tensor in part.last_use.get(place, ()):
                if tensor not in part.exits:
                    ledger.drop(self._key(part.root(tensor)))
        for storage in part.entries:
            ledger.drop(self._key(storage))
        if not self.results:
            self._results_go()

    def _enters(self, region: tuple[int, int]) -> tuple[str, ...]:
        inside = GraphSlice(
            self.part.graph, self.part.start + region[0], self.part.start + region[1]
        )
        return inside.entries

    def _operator(self, place: int, *, keeps: bool) -> None:
        part, ledger = self.part, self.ledger
        operator = part.operators[place]
        ledger.place = part.start + place
        for storage in part.own[place]:
            ledger.add(self._key(storage), part.sizes[storage], "activations")
        for tensor in operator.outputs:  # a reader of each
            ledger.hold(self._key(part.root(tensor)))
        ledger.note(f"forward of {operator.name}", operator.footprint.forward)
        if keeps:
            for storage in part.saved[place]:
                ledger.hold(self._key(storage))
        # `add` has made the operator itself the first holder.
        for storage in part.own[place]:
            ledger.drop(self._key(storage))

    # -- backward ----------------------------------------------------------------------------

    def backward(self) -> None:
        """From the gradients of what leaves to the parameters'."""
        part, ledger = self.part, self.ledger
        given = []
        for tensor in part.exits:
            if part.graph.tensors[tensor].floating:
                self.pending[tensor] = self._gradient(tensor)
                given.append(self.pending[tensor])
                # The caller holds the gradients that it gives until backward is over.
                ledger.hold(self.pending[tensor])
        # Autograd's engine runs the backward of the newest operator first.
        for place in reversed(range(len(part.operators))):
            region = self._region(place)
            if region and place == region[1] - 1:
                self._once_more(region)
            self._operator_back(place)
            if region and place == region[0]:
                for storage in self._enters(region):
                    ledger.drop(self._key(storage))
        for key in self.pending.values():
            ledger.drop(key)
        self.pending.clear()
        for key in given:
            ledger.drop(key)
        if self.results:
            self._results_go()

    def _results_go(self) -> None:
        for tensor in self.part.exits:
            self.ledger.drop(self._key(self.part.root(tensor)))

    def _once_more(self, region: tuple[int, int]) -> None:
        """Compute a region's forward again, as far as something of it is saved."""
        part, ledger = self.part, self.ledger
        places = [p for p in range(*region) if part.saved[p]]
        # Recomputation ends with the last tensor that backward needs, as in torch.utils.checkpoint.
        stop = places[-1] + 1 if places else region[0]
        inside = {s for place in range(region[0], stop) for s in part.own[place]}
        # Not the first forward's storages, of which some may be alive.
        self.again |= {s: f"{self.name}:{s}:again" for s in inside}
        readers: set[str] = set()
        for place in range(region[0], stop):
            self._operator(place, keeps=True)
            readers.update(part.operators[place].outputs)
            gone = readers.intersection(part.last_use.get(place, ()))
            for tensor in gone if place < stop - 1 else readers:
                ledger.drop(self._key(part.root(tensor)))
            readers -= gone

    def _gradient(self, tensor: str) -> str:
        self.count += 1
        key = f"{self.name}:gradient {self.count}"
        self.ledger.add(key, self.part.graph.tensors[tensor].bytes, "temporaries")
        return key

    def _operator_back(self, place: int) -> None:
        part, ledger = self.part, self.ledger
        operator = part.operators[place]
        ledger.place = part.start + place
        codes = operator.footprint.gradients
        incoming = [self.pending.pop(tensor, None) for tensor in operator.outputs]
        runs = any(codes) and any(incoming)
        if runs:
            ledger.note(f"backward of {operator.name}", operator.footprint.backward)
        for storage in part.saved[place]:
            ledger.drop(self._key(storage))
        made: dict[int, str] = {}
        for number, code in enumerate(codes if runs else ()):
            if not code:
                continue
            key = None
            if code.startswith("out"):
                key = incoming[int(code[3:])]
            elif code.startswith("in"):
                key = made[int(code[2:])]
            if key is None:
                key = self._gradient(operator.inputs[number])
            else:
                # Two gradients in one memory: both hold it.
                ledger.hold(key)
            made[number] = key
        for key in incoming:
            if key is not None:
                ledger.drop(key)
        for number, key in made.items():
            self._arrive(operator.inputs[number], key)

    def _arrive(self, tensor: str, key: str) -> None:
        """A gradient meets those that are there already."""
        ledger = self.ledger
        so_far = self.pending.pop(tensor, None)
        # Autograd adds gradients out of place: for a moment both and their sum are alive.
        if so_far is not None:
            total = self._gradient(tensor)
            ledger.note(f"sum of the gradients of {tensor}")
            ledger.drop(so_far)
            ledger.drop(key)
            key = total
        if tensor not in self.part.graph.parameters:
            self.pending[tensor] = key
            return
        # The engine calls AccumulateGrad once, with the sum over all uses.
        self.arrived[tensor] = self.arrived.get(tensor, 0) + 1
        if self.arrived[tensor] < self.part.parameter_uses[tensor]:
            self.pending[tensor] = key
            ledger.waits(key)
        else:
            ledger.becomes_gradient(key, tensor, self.part.graph.tensors[tensor].bytes)


def simulate_liveness(
    graph: ModelGraph,
    *,
    units: tuple[int, int] | None = None,
    actions: Sequence[tuple[str, int]] = (("F", 0), ("B", 0)),
    regions: Sequence[tuple[int, int]] = (),
    gradients: bool = False,
) -> MemoryPeak:
    """Forward and backward of some micro-batches through some operators.

    Args:
        graph: Not folded; `capture` makes it.
        units: The first operator, and the one behind the last; None: all.
        actions: ("F", 0): forward of micro-batch 0; ("B", 0): its backward. In order.
        regions: Ranges of operators (of the whole graph) that are computed again in backward and
            keep only what enters them.
        gradients: The parameters have gradients before it begins.

    Returns:
        Bytes beside parameters, buffers, the batch and the optimiser's state.
    """
    start, stop = units or (0, len(graph.operators))
    part = GraphSlice(graph, start, stop)
    inside = [(max(a, start) - start, min(b, stop) - start) for a, b in regions]
    inside = [(a, b) for a, b in inside if a < b]
    ledger = MemoryLedger()
    if gradients:
        for tensor in part.parameter_uses:
            ledger.add(f"gradient of {tensor}", graph.tensors[tensor].bytes, "gradients")
    under_way: dict[int, MicrobatchPass] = {}
    for kind, number in actions:
        if kind == "F":
            name = f"micro-batch {number}"
            # A stage sends its results away; those of the whole model stay with the caller.
            under_way[number] = MicrobatchPass(part, ledger, name, inside, results=units is None)
            under_way[number].forward()
        else:
            under_way.pop(number).backward()
    return ledger.peak()
