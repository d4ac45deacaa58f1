"""Index expressions of operators that add up: products, sliding windows, reductions, norms, losses.

An axis that occurs in the operands only is summed; splitting it leaves a partial sum on every
rank (DTensor's `Partial`).

A convolution is `n c h w, o c u v -> n o h w` with windows on h and w; c is summed. In groups it
is `n g*c h w, g*o c u v -> n g*o h w`. The letters are ParaDL's (Kahira et al. 2021): data n,
filter o, channel c, spatial h and w.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axis_labels,
    broadcast_index,
)
from headway.graph.model_graph import Kind, LoopAxis, Window, format_index


def summed(*names: str) -> dict[str, LoopAxis]:
    """Axes over which a result is added up."""
    return {name: LoopAxis(name=name, size=0, kind="sum") for name in names}


def linear(call: OperatorCall) -> IndexExpression:
    """... k, o k (, o) -> ... o."""
    names = axis_labels(len(call.result) - 1)
    # With a bias, only both can be pending: every summand adds the bias that it is given.
    sets: list[tuple[str, ...]] = (
        [("input",), ("weight",)] if "bias" not in call.roles else [("input", "bias")]
    )
    if "bias" in call.roles:
        sets.append(("weight", "bias"))
    return IndexExpression(
        inputs={"input": " ".join([*names, "k"]), "weight": "o k", "bias": "o"},
        outputs=[" ".join([*names, "o"])],
        axes=summed("k"),
        linear=sets,
        added=("bias",),
    )


def matmul(call: OperatorCall) -> IndexExpression:
    """... m k, ... k n -> ... m n, with vectors and broadcasting."""
    left, right = ("self", "mat2") if "mat2" in call.roles else ("self", "other")
    a, b = call.shape(left), call.shape(right)
    rows, columns = ["m"] * (len(a) > 1), ["n"] * (len(b) > 1)
    batch = axis_labels(len(call.result) - len(rows) - len(columns))
    outer = call.result[: len(batch)]
    return IndexExpression(
        inputs={
            left: " ".join([broadcast_index(a[:-2], outer, batch), *rows, "k"]),
            right: " ".join([broadcast_index(b[:-2], outer, batch), "k", *columns]),
        },
        outputs=[" ".join([*batch, *rows, *columns])],
        axes=summed("k"),
        linear=[(left,), (right,)],
    )


def addmm(call: OperatorCall) -> IndexExpression:
    """addmm, baddbmm: self + first @ second."""
    first, second = ("mat1", "mat2") if "mat1" in call.roles else ("batch1", "batch2")
    batch = axis_labels(len(call.result) - 2)
    names = [*batch, "m", "n"]
    return IndexExpression(
        inputs={
            "self": broadcast_index(call.shape("self"), call.result, names),
            first: " ".join([*batch, "m", "k"]),
            second: " ".join([*batch, "k", "n"]),
        },
        outputs=[" ".join(names)],
        axes=summed("k"),
        linear=[("self", first), ("self", second)],
        added=("self",),
    )


def einsum(call: OperatorCall) -> IndexExpression:
    """As its equation says; without "..." and repeated letters in one operand."""
    equation = str(call.value("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if not arrow or "." in equation or any(len(set(o)) < len(o) for o in operands):
        raise UnsupportedCall(f"einsum {equation}")
    only = [letter for letter in string.ascii_letters if letter in left and letter not in right]
    return IndexExpression(
        inputs={role: " ".join(o) for role, o in zip(call.roles, operands, strict=True)},
        outputs=[" ".join(right)],
        axes=summed(*only),
        linear=[(role,) for role in call.roles],
    )


def outer(call: OperatorCall) -> IndexExpression:
    """m, n -> m n."""
    second = "vec2" if "vec2" in call.roles else "other"
    return IndexExpression(
        inputs={"self": "m", second: "n"},
        outputs=["m n"],
        linear=[("self",), (second,)],
    )


def attention(call: OperatorCall) -> IndexExpression:
    """... h s k, ... h t k, ... h t v -> ... h s v (Vaswani et al. 2017, equation 1).

    Groups of heads that share keys and values (Ainslie et al. 2023) are h*g in the queries.
    """
    query, key = call.shape("query"), call.shape("key")
    batch = axis_labels(len(query) - 3)
    grouped = len(query) > 3 and query[-3] != key[-3]
    head: list[tuple[str, ...]] = []
    if len(query) > 2:
        head.append(("h", "g") if grouped else ("h",))
    inner = [("h",)] if head else []
    before = [(name,) for name in batch]
    queries = [*before, *head]
    form = IndexExpression(
        inputs={
            "query": format_index([*queries, ("s",), ("k",)]),
            "key": format_index([*before, *inner, ("t",), ("k",)]),
            "value": format_index([*before, *inner, ("t",), ("v",)]),
        },
        outputs=[format_index([*queries, ("s",), ("v",)])],
        linear=[] if call.attributes.get("dropout_p") else [("value",)],
        # In h*g of the queries neither size can be read; the keys have h alone.
        sizes={"h": key[-3]} if head else {},
    )
    if "attn_mask" in call.roles:
        mask = call.shape("attn_mask")
        named = [*queries, ("s",), ("t",)]
        full = (*query[:-1], key[-2])
        behind = len(full) - len(mask)
        dims = [
            () if size == 1 and full[behind + dim] != 1 else named[behind + dim]
            for dim, size in enumerate(mask)
        ]
        form.inputs["attn_mask"] = format_index(dims)
    form.fix("the softmax needs all keys of a query", "t")
    form.fix("the scores are needed whole by the softmax", "k")
    if call.attributes.get("is_causal"):
        form.fix("the causal mask depends on the position", "s")
    return form


# Convolutions, pooling and upsampling: sliding windows with halos.


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
    # 0 stands for a pooling's default, which is its kernel.
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
        # A window of one entry needs nothing of a neighbour.
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
        return transposed_convolution(call)
    image, weight = call.shape("input"), call.shape("weight")
    space = axis_labels(len(weight) - 2, "h")
    kernel = axis_labels(len(weight) - 2, "u")
    batch = ["n"] if len(image) == len(weight) else []
    groups = call.number("groups", 1)
    many = groups > 1
    c, o = ("g*c", "g*o") if many else ("c", "o")
    # Dimensions of two axes do not tell the size of either.
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


def transposed_convolution(call: OperatorCall) -> IndexExpression:
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
        # A second result, of the maxima's places, has the same shape.
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


def adaptive_pooling(call: OperatorCall) -> IndexExpression:
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


def upsample(call: OperatorCall) -> IndexExpression:
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


# Reductions, normalisations, softmax, embeddings, indexing and losses.


PENDING: dict[str, Kind] = {
    "sum": "sum", "mean": "avg", "amax": "max", "amin": "min",
    "any": "max", "all": "min",
}  # fmt: skip


def reduction(call: OperatorCall) -> IndexExpression:
    """sum, mean, amax, amin: the dimensions that vanish are pending where they are split."""
    shape = call.shape("self")
    dims = call.attributes.get("dim")
    # torch takes no dimension, and an empty list, for all of them.
    listed = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    gone = {int(dim) % max(len(shape), 1) for dim in listed}
    names = axis_labels(len(shape))
    kept = bool(call.attributes.get("keepdim"))
    out = [
        "1" if dim in gone else name for dim, name in enumerate(names) if kept or dim not in gone
    ]
    form = IndexExpression(
        inputs={"self": " ".join(names)}, outputs=[" ".join(out)] * len(call.outputs)
    )
    kind = PENDING.get(call.kind)
    if kind is None:
        return form.fix("it needs the whole dimension", *(names[dim] for dim in sorted(gone)))
    for dim in gone:
        form.axes[names[dim]] = LoopAxis(name=names[dim], size=0, kind=kind)
    if kind in ("sum", "avg"):
        form.linear.append(("self",))
    return form


def softmax(call: OperatorCall) -> IndexExpression:
    """softmax, log_softmax: a row is not split."""
    role = call.roles[0]
    rank = len(call.result)
    names = axis_labels(rank)
    form = IndexExpression(inputs={role: " ".join(names)}, outputs=[" ".join(names)])
    return form.fix("the softmax needs the whole row", names[call.dim("dim", rank, -1)])


def row_norm(call: OperatorCall) -> IndexExpression:
    """layer_norm, rms_norm: the normalised dimensions are fixed."""
    normal = call.value("normalized_shape")
    names = axis_labels(len(call.result))
    last = " ".join(names[len(names) - len(normal) :])
    form = IndexExpression(
        inputs={"input": " ".join(names), "weight": last, "bias": last},
        outputs=[" ".join(names)] * len(call.outputs),
    )
    return form.fix("mean and variance need the whole row", *last.split())


def group_norm(call: OperatorCall) -> IndexExpression:
    """n g*c h: samples and groups are normalised each for itself."""
    shape = call.shape("input")
    groups = call.number("num_groups", 1)
    space = axis_labels(len(shape) - 2, "h")
    index = " ".join(["n", "g*c", *space])
    form = IndexExpression(
        inputs={"input": index, "weight": "g*c", "bias": "g*c"},
        outputs=[index],
        sizes={"g": groups, "c": shape[1] // groups},
    )
    return form.fix("mean and variance need the whole group", "c", *space)


def batch_norm(call: OperatorCall) -> IndexExpression:
    """n c h: channels are free; over samples and places the parts add up their statistics.

    Count, sum and sum of squares of every channel (Ioffe and Szegedy 2015, algorithm 1).
    """
    shape = call.shape("input")
    space = axis_labels(len(shape) - 2, "h")
    index = " ".join(["n", "c", *space])
    form = IndexExpression(
        inputs={"input": index} | {role: "c" for role in call.roles if role != "input"},
        outputs=[index],
    )
    if bool(call.attributes.get("training", True)):
        bytes_ = (2 * shape[1] + 1) * call.inputs[0].itemsize
        for name in ("n", *space):
            form.axes[name] = LoopAxis(name=name, size=0, kind="statistics", exchange=bytes_)
    return form


def embedding(call: OperatorCall) -> IndexExpression:
    """b, v d -> b d: the rows of the table are masked, its columns are free."""
    names = axis_labels(len(call.shape("indices")), "b")
    return IndexExpression(
        inputs={"weight": "v d", "indices": " ".join(names)},
        outputs=[" ".join([*names, "d"])],
        axes={"v": LoopAxis(name="v", size=0, kind="masked", why="rows of other parts give zeros")},
        linear=[("weight",)],
    )


def embedding_bag(call: OperatorCall) -> IndexExpression:
    """b*i, v d, b -> b d: bags of indices, summed (Naumov et al. 2019, section 2).

    The example's bags must have equal sizes: in a run their borders decide which indices a part
    gets.
    """
    indices, bags = call.shape("indices"), call.shape("offsets")
    if len(call.outputs) < 1 or indices[0] % bags[0]:
        raise UnsupportedCall("bags of unequal sizes")
    # torch's modes: 0 is the sum, 1 the mean, 2 the maximum.
    mode = call.number("mode", 0)
    form = IndexExpression(
        inputs={"weight": "v d", "indices": "b*i", "offsets": "b", "per_sample_weights": "b*i"},
        outputs=["b d"],
        sizes={"b": bags[0], "i": indices[0] // bags[0]},
        axes={"b": LoopAxis(name="b", size=0, why="offsets count from the first bag of a part")},
    )
    form.fix("a bag is not split", "i")
    if mode == 0:
        form.axes["v"] = LoopAxis(
            name="v", size=0, kind="masked", why="rows of other parts give zeros"
        )
        form.linear.append(("weight",))
    else:
        form.fix("the mean or maximum needs all rows of a bag", "v")
    for number, spec in enumerate(call.outputs[1:], start=1):
        form.outputs.append(" ".join(axis_labels(len(spec.shape), f"z{number}_")))
        form.fix("bookkeeping of the kernel", *axis_labels(len(spec.shape), f"z{number}_"))
    return form


def index_select(call: OperatorCall) -> IndexExpression:
    """index_select: along the selected dimension every part needs the whole."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    names = axis_labels(len(shape))
    out = [*names[:dim], "i", *names[dim + 1 :]]
    form = IndexExpression(
        inputs={"self": " ".join(names), "index": "i"},
        outputs=[" ".join(out)],
        linear=[("self",)],
    )
    return form.fix("any element can be selected", names[dim])


def gather(call: OperatorCall) -> IndexExpression:
    """gather: the other dimensions are free where the index runs through all of them."""
    shape, index = call.shape("self"), call.shape("index")
    dim = call.dim("dim", len(shape))
    own, out = axis_labels(len(shape)), axis_labels(len(shape))
    for number, (size, picked) in enumerate(zip(shape, index, strict=True)):
        if number == dim or size != picked:
            own[number] = f"y{number}"
    form = IndexExpression(
        inputs={"self": " ".join(own), "index": " ".join(out)},
        outputs=[" ".join(out)],
        linear=[("self",)],
    )
    form.fix("any element can be selected", *(name for name in own if name.startswith("y")))
    cut = [f"x{n}" for n, name in enumerate(own) if name.startswith("y") and n != dim]
    return form.fix("the index starts at the first element", *cut)


def index(call: OperatorCall) -> IndexExpression:
    """index: tensor[:, first, second] with neighbouring index tensors of whole numbers."""
    shape = call.shape("self")
    listed = [role for role in call.roles if role != "self"]
    places = [int(role.rpartition(".")[2]) for role in listed]
    whole = all(not call.inputs[call.roles.index(r)].dtype.startswith("bool") for r in listed)
    # The dimensions of index tensors that are apart come first in torch's result.
    if not whole or places != list(range(places[0], places[0] + len(places))):
        raise UnsupportedCall("an index by a mask, or by several tensors that are apart")
    names = axis_labels(len(shape))
    before, behind = names[: places[0]], names[places[-1] + 1 :]
    middle = axis_labels(len(call.result) - len(before) - len(behind), "i")
    picked = call.result[len(before) : len(before) + len(middle)]
    form = IndexExpression(
        inputs={"self": " ".join(names)}
        | {role: broadcast_index(call.shape(role), picked, middle) for role in listed},
        outputs=[" ".join([*before, *middle, *behind])],
        linear=[("self",)],
    )
    return form.fix("any element can be selected", *(names[place] for place in places))


def class_loss(call: OperatorCall) -> IndexExpression:
    """cross_entropy_loss: n c, n -> 1 or n; classes exchange maximum, sum and target of each row.

    Over the classes as in Megatron-LM (Shoeybi et al. 2019, section 3).
    """
    shape, target = call.shape("self"), call.shape("target")
    if len(shape) < 2 or len(target) != len(shape) - 1 or "weight" in call.roles:
        raise UnsupportedCall("classes as probabilities, or weighted")
    space = axis_labels(len(shape) - 2, "h")
    rows = ["n", *space]
    mode = call.number("reduction", 1)
    form = IndexExpression(
        inputs={"self": " ".join(["n", "c", *space]), "target": " ".join(rows)},
        outputs=[" ".join(rows) if mode == 0 else ""] * len(call.outputs),
    )
    count = call.inputs[call.roles.index("self")]
    # Three numbers of each row: the largest logit, the sum of exponentials, the target's logit.
    bytes_ = 3 * count.bytes // shape[1]
    form.axes["c"] = LoopAxis(name="c", size=0, kind="statistics", exchange=bytes_)
    if call.kind.startswith("nll"):
        form.fix("the target's entry is needed", "c")
    if mode:
        for name in rows:
            form.axes[name] = _mean_or_sum(name, mode)
    return form


def element_loss(call: OperatorCall) -> IndexExpression:
    """mse_loss and others between two tensors of one shape."""
    shape = call.shape("self")
    names = axis_labels(len(shape))
    mode = call.number("reduction", 1)
    form = IndexExpression(
        inputs={
            role: broadcast_index(spec.shape, shape, names)
            for role, spec in zip(call.roles, call.inputs, strict=True)
        },
        outputs=["" if mode else " ".join(names)],
    )
    for name in names if mode else ():
        form.axes[name] = _mean_or_sum(name, mode)
    return form


def _mean_or_sum(name: str, mode: int) -> LoopAxis:
    """torch's reductions: 1 mean, 2 sum."""
    if mode == 2:
        return LoopAxis(name=name, size=0, kind="sum")
    return LoopAxis(name=name, size=0, kind="avg", why="a mean of means: parts of equal count")
