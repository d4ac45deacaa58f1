"""The model as data: `ModelGraph`, its operators in execution order, and the specs of its tensors.

An operator names its tensors and never holds them; the specs stand in the `ModelGraph`. The index
of a tensor is a text with one word per dimension, as in einsum: a linear layer is
`b s k, o k -> b s o`. In "b s h*k" the last dimension counts two axes, the slowest first (a
contiguous layout); "1" is a dimension that no axis counts. Parameters have their logical names;
tied ones stand once. `ModelGraph.check` verifies that every tensor has one spec, is made before it
is used, and fits its index.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from headway.documents import document
from headway.errors import PlanError

_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

Kind = Literal["free", "sum", "avg", "max", "min", "masked", "statistics", "fixed"]
"""What becomes of the results where an axis is split.

free: every result is split as well. sum, avg, max, min: every part has a result that is pending.
masked: a pending sum to which a part contributes zeros for the rows that it does not hold.
statistics: parts exchange a few numbers (`exchange`). fixed: the axis may not be split.
"""


@document
class TensorSpec:
    """A tensor's shape and type, as torch names it: "float32"."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for the eight-bit types without an entry of their own."""
        return _BYTES.get(self.dtype, 1)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def floating(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@document
class Window:
    """A window that slides along an axis: of a convolution or a pooling."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1


@document
class LoopAxis:
    """One loop of an operator.

    Attributes:
        size: Of the loop; with a window, of the result.
        kind: What becomes of the results where it is split.
        why: The reason of a fixed axis, or what has to be minded.
        window: How far a part looks into its neighbours.
        exchange: Bytes of the statistics that all parts exchange in a forward pass.
    """

    name: str
    size: int
    kind: Kind = "free"
    why: str = ""
    window: Window | None = None
    exchange: int = 0


@document
class OperatorAxes:
    """What may be split.

    Attributes:
        linear: Sets of inputs in which the operator is linear, jointly: pending sums pass through.
        added: Inputs that are added to a sum over an axis (a bias): only one part may add them.
        known: Whether a rule was found; if not, there are no loops, and all is replicated.
    """

    loops: tuple[LoopAxis, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    added: tuple[int, ...] = ()
    known: bool = True

    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.loops}


@document
class Work:
    """An amount for each of the three passes of an operator."""

    forward: int = 0
    input_gradient: int = 0
    weight_gradient: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            forward=self.forward + other.forward,
            input_gradient=self.input_gradient + other.input_gradient,
            weight_gradient=self.weight_gradient + other.weight_gradient,
        )

    @property
    def total(self) -> int:
        return self.forward + self.input_gradient + self.weight_gradient


@document
class Saved:
    """Memory that is kept for backward.

    Attributes:
        name: The tensor of the graph that owns it, or "operator/number" where it is none.
    """

    name: str
    bytes: int


@document
class FusedFootprint:
    """One part of a folded operator, as `Footprint` says.

    Attributes:
        saved: How many of what the folded operator saves it saves first.
    """

    saved: int
    passing: int = 0
    weights: int = 0


@document
class Footprint:
    """Memory that an operator needs beside its inputs, its results and what is saved.

    Attributes:
        aliases: For each result the number of the tensor, inputs first, then results, in whose
            memory it lies; -1: in memory of its own. Empty: all in their own.
        forward: Bytes at most while it runs, above what is there when it is done.
        backward: Bytes at most while its backward runs, above what was there before, the gradients
            that it makes included.
        gradients: For each input "" where it has none, "new", or whose memory it is: "out0" that
            of the first result's gradient, "in1" that of the second input's. Empty: none.
        passing: Bytes of activations and their gradients that are alive, besides what this and
            earlier operators have saved, while it or its backward runs; of a folded operator the
            most of its parts. `liveness.with_passing` finds it out.
        weights: Bytes of parameters' gradients that are under way at that moment.
        parts: Of a folded operator, in order of execution; empty: nothing was folded.
    """

    aliases: tuple[int, ...] = ()
    forward: int = 0
    backward: int = 0
    gradients: tuple[str, ...] = ()
    passing: int = 0
    weights: int = 0
    parts: tuple[FusedFootprint, ...] = ()


@document
class Kernel:
    """What one operator of the user's model is launched as; a folded one is launched as several.

    Attributes:
        kind: As in `Operator`, with " grouped" behind it for a convolution of several groups.
        calls: As in `Operator`.
    """

    kind: str
    flops: Work = Work()
    traffic: Work = Work()
    calls: int = 1


@document
class Operator:
    """One operator.

    Attributes:
        name: Of one operator of a graph.
        kind: "linear", "conv2d", ...: torch's name, without a trailing underscore.
        inputs: Tensors, in the order of its arguments.
        roles: The name of the argument of each input: "input", "weight", "tensors.0".
        module: Path in the user's model; "" for the model itself.
        flops: As torch.utils.flop_counter counts them: a multiplication and an addition are two,
            only contractions count.
        traffic: Bytes read and written.
        footprint: What else it needs; of folded operators `passing`, `weights` and `parts` only.
        calls: How often its kernel is called, one after the other: of a recurrent layer.
        parts: Names of the operators that were folded into this one, itself included.
        modules: Those that the parts lie in, in order of execution; empty: nothing was folded.
        folded: Their kernels, in order of execution; empty: nothing was folded.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    module: str = ""
    axes: OperatorAxes = OperatorAxes(known=False)
    flops: Work = Work()
    traffic: Work = Work()
    saved: tuple[Saved, ...] = ()
    footprint: Footprint = Footprint()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    parts: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    folded: tuple[Kernel, ...] = ()

    @property
    def moments(self) -> tuple[FusedFootprint, ...]:
        """One for each operator of the user's model, in order of execution."""
        own = self.footprint
        alone = FusedFootprint(saved=len(self.saved), passing=own.passing, weights=own.weights)
        return own.parts or (alone,)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """One for each operator of the user's model, in order of execution."""
        return self.folded or (
            Kernel(
                kind=kernel_pace_key(self.kind, self.attributes),
                flops=self.flops,
                traffic=self.traffic,
                calls=self.calls,
            ),
        )


def kernel_pace_key(kind: str, attributes: Mapping[str, Any]) -> str:
    """Of the kernels of an operator: convolutions of several groups are slower ones."""
    return f"{kind} grouped" if attributes.get("groups", 1) != 1 else kind


# Indices as texts: "b s h*k" to ((b,), (s,), (h, k)) and back, and the factors of a reshape.


Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dimension its axes, the slowest first; () for a dimension that no axis counts."""


@lru_cache(maxsize=4096)
def parse_index(index: str) -> Dims:
    return tuple(() if word == "1" else tuple(word.split("*")) for word in index.split())


def format_index(dims: Iterable[Sequence[str]]) -> str:
    return " ".join("*".join(axes) or "1" for axes in dims)


def locate_axis(index: Dims, axis: str, sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Where an axis stands: its dimension, and how many times the dimension runs through it.

    Returns:
        (dimension, product of the sizes of slower axes in it), or None.
    """
    for dim, axes in enumerate(index):
        if axis in axes:
            return dim, math.prod(sizes[slower] for slower in axes[: axes.index(axis)])
    return None


def common_factors(first: Sequence[int], second: Sequence[int]) -> list[int] | None:
    """The coarsest factors, slowest first, of which both groupings of one number consist.

    [6, 4] and [2, 12] give [2, 3, 4]; [4, 6] and [3, 8] have none: None. Nor has a dimension of an
    empty tensor.
    """
    if 0 in (*first, *second):
        return None
    # Products from the fastest dimension on: where one of the groupings has a border.
    steps = {1}
    for group in (first, second):
        product = 1
        for size in reversed(group):
            product *= size
            steps.add(product)
    ordered = sorted(steps)
    pairs = list(pairwise(ordered))
    # A border that does not divide the next one lies inside of a factor.
    if any(larger % smaller for smaller, larger in pairs):
        return None
    return [larger // smaller for smaller, larger in reversed(pairs)]


def take_factors(factors: list[int], names: list[str], size: int) -> list[str]:
    """Take the names of the slowest factors whose product is `size` off both lists."""
    taken: list[str] = []
    while size > 1:
        size //= factors.pop(0)
        taken.append(names.pop(0))
    return taken


def matching_runs(first: Sequence[int], second: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes of equal size whose products agree; sizes of 1 left out.

    Returns:
        Pairs of lists of dimensions.
    """
    left = [dim for dim, size in enumerate(first) if size != 1]
    right = [dim for dim, size in enumerate(second) if size != 1]
    found = []
    while left or right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (x := math.prod(first[d] for d in a)) != (y := math.prod(second[d] for d in b)):
            if x < y:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        found.append((a, b))
    return found


# A model as data: its operators in the order of execution, its tensors, what all of it costs.


@document
class ModelGraph:
    """A model.

    Attributes:
        operators: In the order of execution, which is a topological one.
        parameters: By logical name.
        buffers: By logical name, and tensors that the code holds elsewhere.
        tied: Other logical names of parameters.
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
            # An operator that reads a tensor twice is one consumer.
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
            # Identities are safe keys: the graph keeps these objects alive.
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
            # Also after a problem, so that each is reported once.
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


def _fits(index: str, spec: TensorSpec, loops: Mapping[str, LoopAxis]) -> bool:
    dims = parse_index(index)
    if len(dims) != len(spec.shape) or any(name not in loops for names in dims for name in names):
        return False
    return all(
        # With a window the loop counts results, and the input has another size.
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
