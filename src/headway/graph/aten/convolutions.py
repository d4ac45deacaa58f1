"""Index expressions of convolutions, pooling and upsampling: sliding windows with halos.

A convolution is `n c h w, o c u v -> n o h w` with windows on h and w; c is summed. In groups it
is `n g*c h w, g*o c u v -> n g*o h w`. The letters are ParaDL's (Kahira et al. 2021): data n,
filter o, channel c, spatial h and w.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axis_labels,
)
from headway.graph.model_graph import LoopAxis, Window

KERNEL = "the kernel is not split"


def several(value: object, count: int, default: int) -> list[int]:
    """An attribute that is one number or one per dimension."""
    if value is None or value == []:
        return [default] * count
    if isinstance(value, int):
        return [value] * count
    listed = [int(v) for v in value] if isinstance(value, Sequence) else [default]
    return listed * count if len(listed) == 1 else listed


def spatial_dimensions(kind: str) -> int:
    """2 of "max_pool2d"."""
    return next(int(letter) for letter in kind if letter.isdigit())


def _windows(
    call: OperatorCall, names: Sequence[str], kernel: Sequence[int], source: Sequence[int]
) -> dict[str, LoopAxis]:
    """The spatial axes of a convolution or pooling.

    Args:
        call: With stride, padding and dilation among its attributes.
        source: Sizes of the input's dimensions.
    """
    count = len(names)
    attributes = call.attributes
    default = 1 if call.kind.startswith("conv") else 0
    strides = several(attributes.get("stride"), count, default)
    strides = [k if s == 0 else s for k, s in zip(kernel, strides, strict=True)]
    dilations = several(attributes.get("dilation"), count, 1)
    said = attributes.get("padding")
    if isinstance(said, str):  # "same" or "valid"
        paddings = [d * (k - 1) // 2 if said == "same" else 0 for d, k in zip(dilations, kernel)]  # noqa: B905
    else:
        paddings = several(said, count, 0)
    axes = {}
    for number, name in enumerate(names):
        window = Window(
            kernel=kernel[number],
            stride=strides[number],
            padding=paddings[number],
            dilation=dilations[number],
        )
        plain = window.kernel == window.stride == 1 and not window.padding
        size = call.result[len(call.result) - count + number]
        expected = _positions(source[number], window)
        if size != expected:  # ceil_mode, uneven "same"
            axes[name] = LoopAxis(name=name, size=0, kind="fixed", why="its windows are uneven")
        else:
            axes[name] = LoopAxis(name=name, size=0, window=None if plain else window)
    return axes


def _positions(size: int, window: Window) -> int:
    reach = window.dilation * (window.kernel - 1) + 1
    return (size + 2 * window.padding - reach) // window.stride + 1


def convolution(call: OperatorCall) -> IndexExpression:
    """conv1d, conv2d, conv3d and convolution that is not transposed."""
    if call.attributes.get("transposed"):
        return transposed(call)
    image, weight = call.shape("input"), call.shape("weight")
    space = axis_labels(len(weight) - 2, "h")
    kernel = axis_labels(len(weight) - 2, "u")
    batch = ["n"] if len(image) == len(weight) else []
    groups = call.number("groups", 1)
    many = groups > 1
    c, o = ("g*c", "g*o") if many else ("c", "o")
    sizes = {"g": groups, "c": weight[1], "o": weight[0] // groups} if many else {}
    summed = LoopAxis(name="c", size=0, kind="sum")
    spatial = _windows(call, space, weight[2:], image[-len(space) :])
    form = IndexExpression(
        inputs={
            "input": " ".join([*batch, c, *space]),
            "weight": " ".join([o, "c", *kernel]),
            "bias": o,
        },
        outputs=[" ".join([*batch, o, *space])],
        axes={"c": summed, **spatial},
        linear=_linear(call),
        added=("bias",),
        sizes=sizes,
    )
    return form.fix(KERNEL, *kernel)


def _linear(call: OperatorCall) -> list[tuple[str, ...]]:
    bias = ("bias",) if "bias" in call.roles else ()
    return [("input", *bias), ("weight", *bias)]


def transposed(call: OperatorCall) -> IndexExpression:
    """conv_transpose with kernel = stride, the enlargement of a U-Net: n c h, c o u -> n o h*u."""
    image, weight = call.shape("input"), call.shape("weight")
    count = len(weight) - 2
    space, kernel = axis_labels(count, "h"), axis_labels(count, "u")
    strides = several(call.attributes.get("stride"), count, 1)
    paddings = several(call.attributes.get("padding"), count, 0)
    extra = several(call.attributes.get("output_padding"), count, 0)
    if call.number("groups", 1) > 1 or len(image) != len(weight):
        raise UnsupportedCall("a transposed convolution in groups")
    form = IndexExpression(
        inputs={
            "input": " ".join(["n", "c", *space]),
            "weight": " ".join(["c", "o", *kernel]),
            "bias": "o",
        },
        outputs=[],
        axes={"c": LoopAxis(name="c", size=0, kind="sum")},
        linear=_linear(call),
        added=("bias",),
    )
    if list(weight[2:]) == strides and not any(paddings) and not any(extra):
        blocks = [f"{h}*{u}" for h, u in zip(space, kernel, strict=True)]
        form.outputs.append(" ".join(["n", "o", *blocks]))
        return form.fix(KERNEL, *kernel)
    results = axis_labels(count, "z")
    form.outputs.append(" ".join(["n", "o", *results]))
    return form.fix("overlapping windows of a transposed convolution", *space, *kernel, *results)


def pooling(call: OperatorCall) -> IndexExpression:
    """max_pool and avg_pool: every channel for itself."""
    image = call.shape("self")
    count = spatial_dimensions(call.kind)
    outer, space = axis_labels(len(image) - count), axis_labels(count, "h")
    kernel = several(call.value("kernel_size"), count, 1)
    axes = _windows(call, space, kernel, image[-count:])
    index = " ".join([*outer, *space])
    form = IndexExpression(
        inputs={"self": index},
        outputs=[index] * len(call.outputs),
        axes=axes,
        linear=[("self",)] if call.kind.startswith("avg") else [],
    )
    uncounted = call.attributes.get("count_include_pad") is False
    if call.kind.startswith("avg") and uncounted and any(a.window for a in axes.values()):
        form.fix("the mean leaves the padding out", *space)
    if len(call.outputs) > 1:
        form.fix("the places of the maxima are counted in the whole image", *space)
    return form


def adaptive(call: OperatorCall) -> IndexExpression:
    """adaptive_avg_pool where the windows do not overlap: n c h*u -> n c h, a mean over u."""
    image = call.shape("self")
    count = spatial_dimensions(call.kind)
    outer, space = axis_labels(len(image) - count), axis_labels(count, "h")
    pairs = list(zip(image[-count:], call.result[-count:], strict=True))
    inner, form = [], IndexExpression(inputs={}, outputs=[" ".join([*outer, *space])])
    mean = "avg" in call.kind
    for number, (size, target) in enumerate(pairs):
        if size % target:
            inner.append(f"v{number}")
            form.fix("its windows are uneven", f"v{number}", space[number])
            continue
        inner.append(f"{space[number]}*u{number}")
        form.axes[f"u{number}"] = LoopAxis(name="", size=0, kind="avg" if mean else "max")
    form.inputs["self"] = " ".join([*outer, *inner])
    form.linear.extend([("self",)] if mean else [])
    return form


def enlarged(call: OperatorCall) -> IndexExpression:
    """upsample_nearest by whole numbers: n c h -> n c h*u."""
    image = call.shape("self" if "self" in call.roles else "input")
    role = "self" if "self" in call.roles else "input"
    count = len(image) - 2
    space, result = axis_labels(count, "h"), list[str]()
    form = IndexExpression(
        inputs={role: " ".join(["n", "c", *space])}, outputs=[], linear=[(role,)]
    )
    for number, (size, target) in enumerate(zip(image[2:], call.result[2:], strict=True)):
        if "nearest" in call.kind and target % size == 0:
            result.append(f"{space[number]}*u{number}")
        else:
            result.append(f"z{number}")
            form.fix("its windows overlap", space[number], f"z{number}")
    form.outputs.append(" ".join(["n", "c", *result]))
    return form
