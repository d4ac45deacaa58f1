"""One operator of a model as data: what goes in and out, what may be split, and what it costs.

Invariant: an operator names its tensors and never holds them; the specs stand in the `ModelGraph`.
The index of a tensor is a text, one word per dimension: "b s k", and "b s h*k" where a dimension
counts several axes, the slowest first; "1" is a dimension that no axis counts. A linear layer is
`b s k, o k -> b s o`, as in einsum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from headway.documents import document

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
class Axis:
    """One loop of an operator.

    Attributes:
        name: As in the indices.
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
class Axes:
    """What may be split.

    Attributes:
        loops: Every axis once.
        inputs: The index of each input.
        outputs: The index of each output.
        linear: Sets of inputs in which the operator is linear, jointly: pending sums pass through.
        added: Inputs that are added to a sum over an axis (a bias): only one part may add them.
        known: Whether a rule was found; if not, there are no loops, and all is replicated.
    """

    loops: tuple[Axis, ...] = ()
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
        bytes: Of the whole storage.
    """

    name: str
    bytes: int


@document
class Moments:
    """One part of a folded operator, as `Footprint` says.

    Attributes:
        saved: How many of what the folded operator saves it saves first.
        passing: Of it alone.
        weights: Of it alone.
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
    parts: tuple[Moments, ...] = ()


@document
class Kernel:
    """What one operator of the user's model is launched as; a folded one is launched as several.

    Attributes:
        kind: As in `Operator`, with " grouped" behind it for a convolution of several groups.
        flops: Of it alone.
        traffic: Of it alone.
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
        outputs: Tensors.
        parameters: The inputs that are trained.
        module: Path in the user's model; "" for the model itself.
        axes: What may be split.
        flops: As torch.utils.flop_counter counts them: a multiplication and an addition are two,
            only contractions count.
        traffic: Bytes read and written.
        saved: What autograd keeps for backward.
        footprint: What else it needs; of folded operators `passing`, `weights` and `parts` only.
        attributes: Arguments that are no tensors.
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
    axes: Axes = Axes(known=False)
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
    def moments(self) -> tuple[Moments, ...]:
        """One for each operator of the user's model, in order of execution."""
        own = self.footprint
        alone = Moments(saved=len(self.saved), passing=own.passing, weights=own.weights)
        return own.parts or (alone,)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """One for each operator of the user's model, in order of execution."""
        return self.folded or (
            Kernel(
                kind=pace_name(self.kind, self.attributes),
                flops=self.flops,
                traffic=self.traffic,
                calls=self.calls,
            ),
        )


def pace_name(kind: str, attributes: Mapping[str, Any]) -> str:
    """Of the kernels of an operator: convolutions of several groups are slower ones."""
    return f"{kind} grouped" if attributes.get("groups", 1) != 1 else kind
