"""single: every rule of the table, carried out with numbers on parts (test C3 of the planner)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.capture import capture
from headway.graph.sharding_rules import enumerate_rules
from support.split_rules import At, Sample, check, specs, tuple_of, whole


def r(*shape, dtype=torch.float64):
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=dtype)


def ids(high, *shape):
    torch.manual_seed(high)
    return torch.randint(0, high, shape)


def cumulative(count, size):
    return torch.arange(0, count * size, size)


# -- parts that need more than a call --------------------------------------------------------------


def masked_rows(t, at):
    """Rows of a table that other parts hold give zeros."""
    table, indices = t
    local = indices - at.part * len(table)
    inside = (local >= 0) & (local < len(table))
    return F.embedding(local.clamp(0, len(table) - 1), table) * inside[..., None]


def masked_bags(t, at):
    table, indices, offsets = t
    local = indices - at.part * len(table)
    inside = ((local >= 0) & (local < len(table))).to(table.dtype)
    local = local.clamp(0, len(table) - 1)
    return F.embedding_bag(local, table, offsets, mode="sum", per_sample_weights=inside)


def own_bags(t, at):
    table, indices, offsets = t
    return F.embedding_bag(indices, table, offsets - offsets[0], mode="sum")


def own_mean_bags(t, at):
    table, indices, offsets = t
    return F.embedding_bag(indices, table, offsets - offsets[0], mode="mean")


def normed(parts):
    """Batch norm: count, sum and sum of squares are added over the parts."""
    images = [p[0] for p in parts]
    dims = [d for d in range(images[0].dim()) if d != 1]
    count = sum(x.numel() / x.shape[1] for x in images)
    mean = sum(x.sum(dims) for x in images) / count
    square = sum(x.square().sum(dims) for x in images) / count
    shape = [1, -1] + [1] * (images[0].dim() - 2)
    scale = (square - mean**2 + 1e-5).rsqrt()
    return [
        (p[0] - mean.view(shape)) * (scale * p[1]).view(shape) + p[2].view(shape) for p in parts
    ]


def class_parts(parts):
    """Cross-entropy: maximum, sum of exponentials and the target's entry are exchanged."""
    top = torch.stack([p[0].amax(1) for p in parts]).amax(0)
    sums = sum((p[0] - top[:, None]).exp().sum(1) for p in parts)
    width, hit = parts[0][0].shape[1], 0
    for number, (logits, target) in enumerate(parts):
        local = target - number * width
        inside = (local >= 0) & (local < width)
        picked = logits.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
        hit = hit + picked * inside
    loss = (top + sums.log() - hit).mean()
    return [loss] * len(parts)


def first(call):
    return lambda t, at: call(*t)


MASK = torch.zeros(1, 1, 6, 4, dtype=torch.float64).masked_fill(torch.arange(4) > 2, float("-inf"))
SAMPLES = {
    "linear": Sample(first(F.linear), [r(2, 4, 6), r(8, 6), r(8)]),
    "linear_plain": Sample(first(F.linear), [r(4, 6), r(8, 6)]),
    "matmul": Sample(first(torch.matmul), [r(2, 4, 6), r(6, 8)]),
    "matmul_batch": Sample(first(torch.matmul), [r(2, 1, 4, 6), r(4, 6, 8)]),
    "matmul_vector": Sample(first(torch.matmul), [r(4, 6), r(6)]),
    "bmm": Sample(first(torch.bmm), [r(2, 4, 6), r(2, 6, 8)]),
    "mm": Sample(first(torch.mm), [r(4, 6), r(6, 8)]),
    "addmm": Sample(first(torch.addmm), [r(8), r(4, 6), r(6, 8)]),
    "baddbmm": Sample(first(torch.baddbmm), [r(2, 4, 8), r(2, 4, 6), r(2, 6, 8)]),
    "einsum": Sample(lambda t, at: torch.einsum("bid,bjd->bij", *t), [r(2, 4, 6), r(2, 8, 6)]),
    "outer": Sample(first(torch.outer), [r(4), r(6)]),
    "attention": Sample(
        first(F.scaled_dot_product_attention), [r(2, 4, 6, 8), r(2, 4, 4, 8), r(2, 4, 4, 2)]
    ),
    "attention_causal": Sample(
        lambda t, at: F.scaled_dot_product_attention(*t, is_causal=True), [r(2, 4, 6, 8)] * 3
    ),
    "attention_mask": Sample(
        lambda t, at: F.scaled_dot_product_attention(*t[:3], attn_mask=t[3]),
        [r(2, 4, 6, 8), r(2, 4, 4, 8), r(2, 4, 4, 8), MASK],
        no_gradients=True,
    ),
    "attention_groups": Sample(
        lambda t, at: F.scaled_dot_product_attention(*t, enable_gqa=True),
        [r(2, 4, 6, 8), r(2, 2, 4, 8), r(2, 2, 4, 8)],
    ),
    "relu": Sample(first(torch.relu), [r(4, 6)]),
    "gelu": Sample(first(F.gelu), [r(4, 6)]),
    "add": Sample(first(torch.add), [r(2, 4, 6), r(4, 6)]),
    "add_number": Sample(lambda t, at: t[0] + 1, [r(4, 6)]),
    "sub": Sample(first(torch.sub), [r(4, 6), r(4, 1)]),
    "mul": Sample(first(torch.mul), [r(4, 6), r(4, 6)]),
    "div": Sample(first(torch.div), [r(4, 6), r(6).abs() + 1]),
    "where": Sample(first(torch.where), [r(4, 6) > 0, r(4, 6), r(4, 6)]),
    "masked_fill": Sample(lambda t, at: t[0].masked_fill(t[1], 0.0), [r(4, 6), r(4, 6) > 0]),
    "tril": Sample(first(torch.tril), [r(2, 4, 6)]),
    "softmax": Sample(lambda t, at: torch.softmax(t[0], -1), [r(2, 4, 6)]),
    "log_softmax": Sample(lambda t, at: torch.log_softmax(t[0], 1), [r(2, 4, 6)]),
    "cumsum": Sample(lambda t, at: t[0].cumsum(1), [r(2, 4, 6)]),
    "flip": Sample(lambda t, at: t[0].flip([1]), [r(2, 4, 6)]),
    "topk": Sample(lambda t, at: t[0].topk(2, 1)[0], [r(2, 4, 6)]),
    "layer_norm": Sample(
        lambda t, at: F.layer_norm(t[0], t[1].shape, t[1], t[2]), [r(2, 4, 6), r(6), r(6)]
    ),
    "rms_norm": Sample(lambda t, at: F.rms_norm(t[0], t[1].shape, t[1]), [r(2, 4, 6), r(6)]),
    "group_norm": Sample(
        lambda t, at: F.group_norm(t[0], 4 // at.parts("g"), t[1], t[2]),
        [r(2, 8, 4), r(8), r(8)],
    ),
    "batch_norm": Sample(
        lambda t, at: F.batch_norm(t[0], None, None, t[1], t[2], training=True),
        [r(4, 6, 2, 2), r(6), r(6)],
        statistics={"n": normed, "h0": normed, "h1": normed},
    ),
    "batch_norm_eval": Sample(
        lambda t, at: F.batch_norm(*t), [r(4, 6, 2), r(6), r(6).abs(), r(6), r(6)],
        no_gradients=True,
    ),
    "conv1d": Sample(
        lambda t, at: F.conv1d(*t, stride=2, padding=at.pad("h0", 1)),
        [r(2, 4, 8), r(6, 4, 3), r(6)],
    ),
    "conv2d": Sample(
        lambda t, at: F.conv2d(*t, padding=(at.pad("h0", 1), at.pad("h1", 1))),
        [r(2, 4, 8, 8), r(6, 4, 3, 3), r(6)],
    ),
    "conv2d_stem": Sample(
        lambda t, at: F.conv2d(*t, stride=2, padding=(at.pad("h0", 3), at.pad("h1", 3))),
        [r(2, 4, 16, 16), r(4, 4, 7, 7)],
    ),
    "conv2d_dilated": Sample(
        lambda t, at: F.conv2d(*t, dilation=2, padding=(at.pad("h0", 2), at.pad("h1", 2))),
        [r(2, 2, 8, 8), r(4, 2, 3, 3)],
    ),
    "conv2d_point": Sample(first(F.conv2d), [r(2, 4, 4, 4), r(6, 4, 1, 1)]),
    "conv2d_groups": Sample(
        lambda t, at: F.conv2d(*t, groups=4 // at.parts("g"), padding=(at.pad("h0", 1), 1)
                               if at.rule and at.rule.axis == "h0"
                               else (1, at.pad("h1", 1))),
        [r(2, 8, 4, 4), r(8, 2, 3, 3), r(8)],
    ),
    "conv3d": Sample(
        lambda t, at: F.conv3d(*t, padding=tuple(at.pad(f"h{n}", 1) for n in range(3))),
        [r(1, 2, 4, 4, 4), r(2, 2, 3, 3, 3)],
    ),
    "conv_transpose": Sample(
        lambda t, at: F.conv_transpose2d(*t, stride=2), [r(2, 4, 4, 4), r(4, 6, 2, 2), r(6)]
    ),
    "conv_transpose_overlap": Sample(
        lambda t, at: F.conv_transpose2d(*t, stride=2), [r(2, 4, 4, 4), r(4, 6, 3, 3), r(6)]
    ),
    "max_pool": Sample(
        lambda t, at: F.max_pool2d(t[0], 3, 2, (at.pad("h0", 1), at.pad("h1", 1))),
        [r(2, 4, 8, 8)],
        fill=float("-inf"),
    ),
    "max_pool_even": Sample(lambda t, at: F.max_pool2d(t[0], 2), [r(2, 4, 8, 8)]),
    "avg_pool": Sample(
        lambda t, at: F.avg_pool2d(t[0], 3, 2, (at.pad("h0", 1), at.pad("h1", 1))),
        [r(2, 4, 8, 8)],
    ),
    "adaptive": Sample(
        lambda t, at: F.adaptive_avg_pool2d(t[0], at.shape[2:] or (2, 1)), [r(2, 4, 8, 6)]
    ),
    "nearest": Sample(lambda t, at: F.interpolate(t[0], at.shape[2:] or (4, 4)), [r(2, 4, 2, 2)]),
    "bilinear": Sample(
        lambda t, at: F.interpolate(t[0], scale_factor=2, mode="bilinear"), [r(2, 4, 2, 2)]
    ),
    "embedding": Sample(
        lambda t, at: F.embedding(t[1], t[0]), [r(8, 6), ids(8, 2, 4)], by_hand={"v": masked_rows}
    ),
    "embedding_bag": Sample(
        lambda t, at: F.embedding_bag(t[1], t[0], t[2], mode="sum"),
        [r(8, 6), ids(8, 12), cumulative(4, 3)],
        by_hand={"v": masked_bags, "b": own_bags},
    ),
    "embedding_bag_mean": Sample(
        lambda t, at: F.embedding_bag(t[1], t[0], t[2], mode="mean"),
        [r(8, 6), ids(8, 12), cumulative(4, 3)],
        by_hand={"b": own_mean_bags},
    ),
    "index_select": Sample(lambda t, at: t[0].index_select(1, t[1]), [r(2, 4, 6), ids(4, 2)]),
    "gather": Sample(lambda t, at: t[0].gather(1, t[1]), [r(4, 6), ids(6, 4, 2)]),
    "index": Sample(lambda t, at: t[0][:, t[1], t[2]], [r(4, 6, 6), ids(6, 4), ids(5, 4)]),
    "mean": Sample(lambda t, at: t[0].mean(1), [r(2, 4, 6)]),
    "sum_all": Sample(lambda t, at: t[0].sum(), [r(2, 4, 6)]),
    "amax": Sample(lambda t, at: t[0].amax(-1, keepdim=True), [r(2, 4, 6)]),
    "argmax": Sample(lambda t, at: t[0].argmax(1), [r(2, 4, 6)]),
    "cross_entropy": Sample(
        first(F.cross_entropy), [r(4, 6), ids(6, 4)], statistics={"c": class_parts}
    ),
    "cross_entropy_rows": Sample(
        lambda t, at: F.cross_entropy(*t, reduction="sum"),
        [r(4, 5, 2), ids(5, 4, 2)],
    ),
    "mse": Sample(first(torch.ops.aten.mse_loss), [r(4, 6), r(4, 6)]),
    "bce": Sample(
        first(F.binary_cross_entropy_with_logits), [r(4, 6), torch.sigmoid(r(4, 6))]
    ),
    "view_split": Sample(lambda t, at: t[0].view(at.shape or (2, 4, 4, 3)), [r(2, 4, 12)]),
    "view_join": Sample(lambda t, at: t[0].reshape(at.shape or (8, 12)), [r(2, 4, 4, 3)]),
    "view_mixed": Sample(lambda t, at: t[0].view(at.shape or (3, 8, 2)), [r(4, 6, 2)]),
    "flatten": Sample(lambda t, at: t[0].flatten(1), [r(2, 4, 6)]),
    "squeeze": Sample(lambda t, at: t[0].squeeze(1), [r(4, 1, 6)]),
    "transpose": Sample(lambda t, at: t[0].transpose(1, 2), [r(2, 4, 6)]),
    "permute": Sample(lambda t, at: t[0].permute(2, 0, 1), [r(2, 4, 6)]),
    "expand": Sample(lambda t, at: t[0].expand(at.shape or (4, 2, 6)), [r(2, 1 * 6)]),
    "repeat": Sample(lambda t, at: t[0].repeat(2 // at.parts("r0"), 1), [r(4, 6)]),
    "slice": Sample(lambda t, at: t[0][:, 1:3], [r(4, 6)]),
    "select": Sample(lambda t, at: t[0].select(1, 2), [r(4, 6)]),
    "chunk": Sample(lambda t, at: t[0].chunk(3, 1), [r(4, 12)]),
    "split_uneven": Sample(lambda t, at: t[0].split([2, 4], 1), [r(4, 6)]),
    "cat": Sample(lambda t, at: torch.cat(t, 1), [r(4, 6), r(4, 6)]),
    "cat_uneven": Sample(lambda t, at: torch.cat(t, 1), [r(4, 6), r(4, 2)]),
    "stack": Sample(lambda t, at: torch.stack(t, 1), [r(4, 6), r(4, 6)]),
    "pad": Sample(lambda t, at: F.pad(t[0], [1, 1]), [r(4, 6)]),
}  # fmt: skip


class Called(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(list(tensors), At(None, 0, ()))


def operator_of(sample):
    """The last operator of the call, its inputs in the order of the sample's tensors."""
    graph = capture(Called(sample.call), tuple(sample.tensors))
    found = graph.operators[-1]
    order = [found.inputs.index(f"example_{n}") for n in range(len(sample.tensors))]
    axes = found.axes
    place = {old: new for new, old in enumerate(order)}
    axes = replace(
        axes,
        inputs=tuple(axes.inputs[n] for n in order) if axes.known else (),
        linear=tuple(tuple(sorted(place[n] for n in group)) for group in axes.linear),
        added=tuple(place[n] for n in axes.added),
    )
    return replace(found, inputs=tuple(found.inputs[n] for n in order), axes=axes)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_rule_gives_the_whole_result(name):
    sample = SAMPLES[name]
    operator = operator_of(sample)
    assert operator.axes.known
    compared = check(sample, operator, 2)
    assert any(rule.parts == 2 for rule in compared) or name in ("view_mixed", "sum_all")


def axes_of(name, parts=2):
    sample = SAMPLES[name]
    found = enumerate_rules(
        operator_of(sample), specs(sample.tensors), specs(tuple_of(whole(sample))), parts
    )
    return {rule.axis: (" ".join(rule.inputs), " ".join(rule.outputs)) for rule in found}


def test_the_rules_of_a_linear_layer():
    assert axes_of("linear_plain") == {
        "": ("R P", "P"),  # of three without an axis: replicated, P R, R P
        "x0": ("S0 R", "S0"),
        "k": ("S1 S1", "P"),
        "o": ("R S0", "S1"),
    }


def test_heads_positions_and_widths_of_attention():
    assert set(axes_of("attention")) == {"", "x0", "h", "s", "v"}
    assert set(axes_of("attention_causal")) == {"", "x0", "h", "v"}


def test_parts_inside_of_a_dimension_are_told_apart():
    assert axes_of("view_join")["x1"] == ("S1", "S0/2")


def test_a_halo_is_what_the_neighbours_send():
    """Rows of 2 samples, 4 channels, 8 columns in float64; kernel 3: one row on each side."""
    sample = SAMPLES["conv2d"]
    operator, tensors = operator_of(sample), specs(sample.tensors)
    halos = {
        parts: {
            r.axis: r.halo
            for r in enumerate_rules(operator, tensors, specs([whole(sample)]), parts)
        }
        for parts in (2, 4)
    }
    row = 2 * 4 * 8 * 8
    assert (halos[2]["h0"], halos[4]["h0"]) == (row, 2 * row)


def test_a_part_must_not_be_smaller_than_its_halo():
    """Kernel 7, stride 2 on 16 rows: 8 parts of 2 rows need 3 rows above."""
    assert "h0" in axes_of("conv2d_stem", 4)
    assert "h0" not in axes_of("conv2d_stem", 8)


def test_an_unknown_operator_is_replicated_and_named():
    graph = capture(nn.LSTM(4, 4), torch.zeros(3, 2, 4))
    lstm = next(o for o in graph.operators if o.kind == "lstm")
    inputs, outputs = graph.specs(lstm)
    assert graph.unknown == ("lstm",)
    assert [rule.inputs for rule in enumerate_rules(lstm, inputs, outputs, 2)] == [
        ("R",) * len(inputs)
    ]
    assert lstm.flops.forward == 3 * 2 * 2 * 4 * (4 + 4) * 4


WRONG = {
    "softmax": lambda axes: _kind(axes, "fixed", "free"),
    "linear": lambda axes: replace(axes, added=()),
    "mean": lambda axes: _kind(axes, "avg", "sum"),
    "relu": lambda axes: replace(axes, linear=((0,),)),
    "conv2d": lambda axes: replace(axes, loops=tuple(replace(a, window=None) for a in axes.loops)),
    "view_split": lambda axes: replace(axes, outputs=("x0 x1 x3 x2",)),
    "transpose": lambda axes: replace(axes, outputs=axes.inputs),
    "attention_causal": lambda axes: _kind(axes, "fixed", "free"),
    "group_norm": lambda axes: _kind(axes, "fixed", "free"),
    "cumsum": lambda axes: _kind(axes, "fixed", "free"),
    "chunk": lambda axes: replace(axes, inputs=("x0 p*j",)),
    "embedding": lambda axes: _kind(axes, "masked", "avg"),
}


def _kind(axes, old, new):
    loops = [replace(axis, kind=new) if axis.kind == old else axis for axis in axes.loops]
    return replace(axes, loops=tuple(loops))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    sample = SAMPLES[name]
    operator = operator_of(sample)
    wrong = replace(operator, axes=WRONG[name](operator.axes))
    assert wrong.axes != operator.axes
    with pytest.raises((AssertionError, RuntimeError)):
        check(sample, wrong, 2)


def test_a_wrong_gradient_is_caught(monkeypatch):
    sample = SAMPLES["linear"]
    monkeypatch.setattr("headway.graph.sharding_rules._gradient", lambda placement, loop: placement)
    with pytest.raises(AssertionError, match=r"gradient|differ"):
        check(sample, operator_of(sample), 2)
