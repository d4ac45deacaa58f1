"""Index expressions of reductions, normalisations, softmax, embeddings, indexing and losses."""

from __future__ import annotations

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axis_labels,
    broadcast_index,
)
from headway.graph.model_graph import Kind, LoopAxis

PENDING: dict[str, Kind] = {
    "sum": "sum", "mean": "avg", "amax": "max", "amin": "min",
    "any": "max", "all": "min",
}  # fmt: skip


def reduction(call: OperatorCall) -> IndexExpression:
    """sum, mean, amax, amin: the dimensions that vanish are pending where they are split."""
    shape = call.shape("self")
    dims = call.attributes.get("dim")
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


def selected(call: OperatorCall) -> IndexExpression:
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


def gathered(call: OperatorCall) -> IndexExpression:
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


def indexed(call: OperatorCall) -> IndexExpression:
    """index: tensor[:, first, second] with neighbouring index tensors of whole numbers."""
    shape = call.shape("self")
    listed = [role for role in call.roles if role != "self"]
    places = [int(role.rpartition(".")[2]) for role in listed]
    whole = all(not call.inputs[call.roles.index(r)].dtype.startswith("bool") for r in listed)
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
