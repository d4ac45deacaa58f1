"""single: what has no rule on a split tensor raises, by name; the rest is like a tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import PlanError, RunError
from headway.parallel.spatial import SpatialAxis, SpatialContext, SplitTensor
from headway.parallel.spatial.halo_exchange import (
    SINGLE_RANK_AXIS,
    RangeExchange,
    fetch_for_operator,
)
from headway.parallel.spatial.spatial_context import by_samples
from headway.parallel.split_tensor import WHOLE_DIMENSION, RangeCut

HALF = SpatialContext(axes={-3: SpatialAxis(None, 2, 1)})
"""Rank 1 of 2 along the depth; nothing here exchanges messages."""


def half(*shape, **options):
    return HALF.split(torch.randn(*shape, **options))


REFUSED = {
    "torch.cumsum": lambda x: torch.cumsum(x, 2),
    "sort": lambda x: torch.sort(x, 2),
    "einsum": lambda x: torch.einsum("ncdhw->ncd", x),
    "fft": lambda x: torch.fft.fftn(x),
    "softmax": lambda x: F.softmax(x, 2),
    "max": lambda x: x.max(),
    "flip": lambda x: x.flip(1, 2),
    "std": lambda x: x.std(),
    "topk": lambda x: x.topk(2, dim=2),
    "rand_like": lambda x: torch.rand_like(x),
    "takes a piece of a cut dimension": lambda x: x[:, :, 1:],
    "picks by a tensor": lambda x: x[x > 0],
    "bicubic": lambda x: F.interpolate(x[:, :, :, 0].unsqueeze(-1)[..., 0], (4, 4), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (4, 4, 4), mode="area"),
    "reflect": lambda x: F.pad(x, (1,) * 6, mode="reflect"),
    "cat": lambda x: torch.cat([x, x], 2),
    "chunk": lambda x: x.chunk(2, 2),
    "return_indices|indices": lambda x: F.max_pool3d(x, 2, return_indices=True),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x, 2, output_size=2),
    "multiple": lambda x: F.adaptive_avg_pool3d(x, 3),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "embedding": lambda x: F.embedding(x, torch.ones(3, 3)),
    "bool": lambda x: bool((x > 0).any(1)),
    "numpy": lambda x: x.numpy(),
    "data": lambda x: x.data,
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_without_a_rule_is_refused_by_name(name):
    with pytest.raises(PlanError, match=name) as caught:
        REFUSED[name](half(2, 3, 8, 4, 4))
    if "bicubic" not in name:
        assert "gather" in str(caught.value)


def test_shapes_are_those_of_the_whole():
    x = half(2, 3, 9, 4, 5)
    assert x.shape == (2, 3, 9, 4, 5)
    assert (x.size(2), x.size(), x.dim(), x.ndim, len(x)) == (9, x.shape, 5, 5, 2)
    assert x.numel() == 2 * 3 * 9 * 4 * 5
    assert x.local.shape == (2, 3, 4, 4, 5)
    assert HALF.ranges(x.shape) == ((0, 2), (0, 3), (5, 9), (0, 4), (0, 5))
    assert "9, 4, 5" in repr(x)
    with pytest.raises(AttributeError, match="bogus"):
        _ = x.bogus
    assert not hasattr(x, "bogus")


def test_shapes_that_keep_split_dimensions():
    x = half(2, 6, 8, 4, 4)
    assert x.view(2, 3, 2, 8, 4, 4).splits.keys() == {3}
    assert x.view(2, 6, 8, 16).splits.keys() == {2}
    assert x.reshape(12, 8, -1).splits.keys() == {1}
    assert x.permute(0, 2, 3, 4, 1).splits.keys() == {1}
    assert x.transpose(1, 2).splits.keys() == {1}
    assert x.movedim(1, -1).splits.keys() == {1}
    assert x.movedim((2, 0), (0, 1)).splits.keys() == {0}
    assert x[:, 0].splits.keys() == {1}
    assert x[None, ..., 1].splits.keys() == {3}
    assert x.unsqueeze(-1).shape == (2, 6, 8, 4, 4, 1)
    assert x.select(1, 2).splits.keys() == {1}
    assert [part.shape[1] for part in x.split([1, 5], 1)] == [1, 5]
    assert x.expand(2, 6, 8, 4, 4).shape == x.shape
    assert x.argmax(1).splits.keys() == {1}
    assert x.flatten(3).splits.keys() == {2}


def test_a_view_of_a_part_equals_the_part_of_the_view():
    whole = torch.randn(2, 6, 8, 4, 4)
    x = HALF.split(whole)
    for change in (
        lambda t: t.view(2, 3, 2, 8, 4, 4),
        lambda t: t.permute(0, 2, 3, 4, 1),
        lambda t: t[:, 1:3, ..., 2],
        lambda t: F.one_hot((t > 0).long(), 2),
        lambda t: t * torch.arange(8.0).view(8, 1, 1) + whole[:, :1],
    ):
        expected, found = change(whole), change(x)
        (dim,) = found.splits
        assert torch.equal(found.local, expected.narrow(dim, 4, 4))


def test_a_whole_tensor_does_not_take_a_split_one_in_place():
    with pytest.raises(RuntimeError, match="in place"):
        torch.zeros(2, 3, 8, 4, 4).add_(half(2, 3, 8, 4, 4))


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(PlanError, match="4 entries"):
        half(2, 3, 8, 4, 4) + torch.zeros(4, 4, 4)
    with pytest.raises(PlanError, match="ranges"):
        HALF.adopt(torch.zeros(2, 3, 8, 4, 4), (2, 3, 8, 4, 4))
    assert isinstance(HALF.adopt(torch.zeros(1, 4, 4, 4), (1, 8, 4, 4)), SplitTensor)
    with pytest.raises(PlanError, match="counted from the end"):
        SpatialContext(axes={2: SpatialAxis(None, 2, 0)})


def test_a_mesh_that_cannot_share_out_samples_is_refused():
    axes = {-3: SpatialAxis(None, 2, 1), -2: SpatialAxis(None, 2, 0)}
    assert SpatialContext(axes=axes).everyone is None
    with pytest.raises(PlanError, match="several dimensions are split and `together`"):
        SpatialContext(axes=axes, head="samples")
    with pytest.raises(
        PlanError, match="has 4 ranks, of which this is 1; the mesh has 4, of which"
    ):
        SpatialContext(axes=axes, together=SpatialAxis(None, 4, 1))
    assert SpatialContext(axes=axes, together=SpatialAxis(None, 4, 2)).everyone is not None


def samples(*shape):
    """Of two samples, the second one."""
    everyone = HALF.everyone
    cuts = [RangeCut(everyone, ((0, 1), (1, 2))), *[WHOLE_DIMENSION] * len(shape)]
    return HALF.wrap(torch.randn(1, *shape), cuts)


def test_whole_samples_are_not_changed_by_what_has_no_rule():
    x = samples(3)
    assert by_samples(x)
    assert by_samples(x + 1)
    assert not by_samples(half(2, 3, 8, 4, 4))
    for name, change in (
        ("cumsum_", lambda: x.cumsum_(0)),
        ("sort", lambda: torch.sort(x, 0, out=(torch.empty(2, 3), torch.empty(2, 3)))),
    ):
        with pytest.raises(PlanError, match=name):
            change()
    square = half(2, 3, 8, 8, 4)
    with pytest.raises(PlanError, match="same ranks split one dimension of each"):
        square + square.transpose(2, 3)


def test_samples_change_in_place_what_is_theirs():
    x, whole = samples(3), torch.randn(2, 3)
    before, place = x.local.clone(), x.local.data_ptr()
    x.add_(whole)
    assert torch.equal(x.local, before + whole[1:])
    assert x.local.data_ptr() == place
    with pytest.raises(RuntimeError, match="in place"):
        whole.add_(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_a_gradient_that_would_be_lost_is_noticed():
    x = half(2, 3, 8, 4, 4, requires_grad=True)
    with pytest.raises(PlanError, match=r"torch\.autograd\.Function"):
        Double.apply(x)
    with torch.no_grad():
        constant = x * 2  # as in the unsplit model
    assert (constant + x).requires_grad
    with torch.no_grad():
        assert (constant + 1).shape == x.shape


def test_a_saved_activation_changed_in_place_is_noticed():
    x = torch.randn(1, 2, 8, 4, 4, requires_grad=True) * 1
    need = RangeExchange(2, SINGLE_RANK_AXIS, ((0, 8),), ((-1, 9),))
    with fetch_for_operator(x, [need]) as box:
        y = box**2
    x.relu_()
    with pytest.raises(RunError, match="in place"):
        y.sum().backward()


def test_modules_of_torch_find_their_rules():
    x = half(2, 4, 8, 4, 4)
    for module in (
        nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(), nn.ELU(), nn.Softplus(), nn.Tanh(),
        nn.Sigmoid(), nn.Identity(), nn.Softmax(1), nn.LogSoftmax(1), nn.GLU(1), nn.Linear(4, 3),
        nn.LayerNorm(4), nn.Dropout(0.5), nn.Dropout3d(0.5), nn.BatchNorm3d(4).eval(),
        nn.Conv3d(4, 2, 1), nn.AvgPool3d((1, 2, 2)),
    ):  # fmt: skip
        y, whole = module(x), module(torch.zeros(2, 4, 8, 4, 4))
        assert isinstance(y, SplitTensor), module
        assert y.shape == whole.shape, module
