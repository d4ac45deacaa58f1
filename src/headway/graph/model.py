"""A model as data: its operators in the order of execution, its tensors, what all of it costs.

Invariant (`check`): every tensor has one spec and is made before it is used, and the index of every
tensor of an operator fits its shape. Names of parameters are logical names, tied ones stand once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path

from headway.documents import document, read_document
from headway.errors import PlanError
from headway.graph.index import parse
from headway.graph.operator import Axis, Operator, TensorSpec, Work


@document
class ModelGraph:
    """A model.

    Attributes:
        operators: In the order of execution, which is a topological one.
        values: Tensors that operators make.
        inputs: Tensors that the caller gives.
        outputs: Names of the results.
        parameters: By logical name.
        buffers: By logical name, and tensors that the code holds elsewhere.
        tied: Other logical names of parameters.
        frozen: Parameters that are not trained.
    """

    operators: tuple[Operator, ...]
    values: dict[str, TensorSpec] = field(default_factory=dict)
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    parameters: dict[str, TensorSpec] = field(default_factory=dict)
    buffers: dict[str, TensorSpec] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    # -- tensors -------------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """All of them."""
        return {**self.inputs, **self.parameters, **self.buffers, **self.values}

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """The place of the operator that makes a tensor."""
        return {
            tensor: place
            for place, operator in enumerate(self.operators)
            for tensor in operator.outputs
        }

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """The places of the operators that use a tensor."""
        found: dict[str, list[int]] = {}
        for place, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(operator.inputs):
                found.setdefault(tensor, []).append(place)
        return {tensor: tuple(places) for tensor, places in found.items()}

    def specs(self, operator: Operator) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Of its inputs and its outputs."""
        all_ = self.tensors
        return tuple(all_[t] for t in operator.inputs), tuple(all_[t] for t in operator.outputs)

    @cached_property
    def descriptions(self) -> Mapping[str, str]:
        """What each operator is, whatever it and its tensors are called; by its name."""
        known: dict[object, str] = {}  # repeated blocks often share their axes and attributes
        found = {}
        for o in self.operators:
            key = (o.kind, o.roles, id(o.axes), o.flops, o.traffic, o.folded, id(o.attributes))
            if key not in known:
                facts = (o.kind, o.roles, o.axes, o.flops, o.traffic, o.folded, dict(o.attributes))
                known[key] = repr(facts)
            found[o.name] = known[key]
        return found

    # -- totals --------------------------------------------------------------------------------

    @cached_property
    def flops(self) -> Work:
        return sum((operator.flops for operator in self.operators), Work())

    @property
    def traffic(self) -> Work:
        return sum((operator.traffic for operator in self.operators), Work())

    @property
    def parameter_count(self) -> int:
        return sum(spec.elements for spec in self.parameters.values())

    @property
    def parameter_bytes(self) -> int:
        return sum(spec.bytes for spec in self.parameters.values())

    @property
    def saved_bytes(self) -> int:
        """What backward keeps beside parameters, buffers and inputs; each storage once."""
        return sum(self.saved_by(self.operators).values())

    def saved_by(self, operators: tuple[Operator, ...]) -> dict[str, int]:
        """Bytes that some operators keep, by the name of the storage."""
        return {s.name: s.bytes for o in operators for s in o.saved if s.name not in self.held}

    @cached_property
    def held(self) -> frozenset[str]:
        """Names of what is there before the first operator: parameters, buffers, inputs."""
        return frozenset([*self.parameters, *self.buffers, *self.inputs])

    @property
    def unknown(self) -> tuple[str, ...]:
        """Kinds of operators without a rule; they can only be replicated."""
        return tuple(sorted({o.kind for o in self.operators if not o.axes.known}))

    # -- file ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The file form; the same graph gives the same bytes."""
        return json.dumps(to_plain(self), separators=(",", ":"), allow_nan=False) + "\n"

    @property
    def hash(self) -> str:
        """SHA-256 of the file form, 16 digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    # -- check ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a graph that cannot exist.

        Raises:
            PlanError: With every problem.
        """
        problems = list(self._problems())
        if problems:
            raise PlanError("a graph that cannot exist", problems=problems)

    def _problems(self) -> Iterator[str]:
        made = {*self.inputs, *self.parameters, *self.buffers}
        names: set[str] = set()
        for operator in self.operators:
            if operator.name in names:
                yield f"two operators are called {operator.name}"
            names.add(operator.name)
            missing = [tensor for tensor in operator.inputs if tensor not in made]
            yield from (f"{operator.name} uses {t}, which nothing has made" for t in missing)
            for tensor in operator.outputs:
                if tensor in made:
                    yield f"{operator.name} makes {tensor}, which is there already"
                if tensor not in self.values:
                    yield f"{operator.name} makes {tensor}, of which no shape is given"
            made.update(operator.outputs)
            if not missing and all(t in self.values for t in operator.outputs):
                yield from self._wrong_axes(operator)
        yield from (f"the result {t} is not made" for t in self.outputs if t not in made)

    def _wrong_axes(self, operator: Operator) -> Iterator[str]:
        axes = operator.axes
        if not axes.known:
            return
        loops = {axis.name: axis for axis in axes.loops}
        inputs, outputs = self.specs(operator)
        for index, spec, tensor in (
            *zip(axes.inputs, inputs, operator.inputs, strict=False),
            *zip(axes.outputs, outputs, operator.outputs, strict=False),
        ):
            if not _fits(index, spec, loops):
                yield f"{operator.name}: {tensor} has shape {spec.shape}, its index is {index!r}"
        if (len(axes.inputs), len(axes.outputs)) != (len(inputs), len(outputs)):
            yield f"{operator.name} has not one index for each tensor"


def _fits(index: str, spec: TensorSpec, loops: Mapping[str, Axis]) -> bool:
    dims = parse(index)
    if len(dims) != len(spec.shape) or any(name not in loops for names in dims for name in names):
        return False
    return all(
        any(loops[name].window for name in names)
        or math.prod(loops[name].size for name in names) == size
        for names, size in zip(dims, spec.shape, strict=True)
    )


def to_plain(value: object) -> object:
    """Dataclasses as tables without the fields that have their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_plain(found)
            for f in dataclasses.fields(value)
            if (found := getattr(value, f.name)) != _default(f)
        }
    if isinstance(value, Mapping):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    return value


def _default(f: dataclasses.Field[object]) -> object:
    made = f.default_factory
    return f.default if made is dataclasses.MISSING else made()


def read_graph(path: Path) -> ModelGraph:
    """Read and check a graph.

    Raises:
        DocumentError: The file has problems.
        PlanError: The graph has.
    """
    graph = read_document(path, ModelGraph)
    graph.check()
    return graph
