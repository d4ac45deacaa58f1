"""single: what functions of torch make of parts, for every rank of a grid in one process.

Each case needs no exchange in its forward pass; the result's part must be the part of the serial
result.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headway.errors import PlanError
from headway.parallel.split_layers.split_model import ExecutionContext
from headway.parallel.split_tensor import WHOLE_DIMENSION, DimensionCut, SplitTensor
from headway.parallel.tensor.grid import ProcessGrid, local_slice
from headway.parallel.tensor.layer_context import SplitSettings, cuts_of
from headway.plans.tensor_layout import TensorGrid

PLAN = TensorGrid.cuboid(2, 3, 1)
BY_I, BY_J = DimensionCut("i"), DimensionCut("j")
THREE = DimensionCut("j", 3)


def contexts():
    """One for each rank."""
    for i in range(2):
        for j in range(3):
            grid = ProcessGrid(plan=PLAN, mesh=None, place={"j": j, "l": 0, "i": i})
            yield ExecutionContext(grid, SplitSettings())


def cut_up(context, x, cuts):
    for dim, cut in enumerate(cuts):
        if cut.axes:
            x = local_slice(x, context.grid, cut.axes, dim, cut.blocks)
    return x


def leaves(value):
    return (
        [leaf for v in value for leaf in leaves(v)] if isinstance(value, tuple | list) else [value]
    )


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


MASK = numbers(1, 1, 5, 5) > 0
HEADS = ((4, 6, 5, 2), (BY_I, BY_J, WHOLE_DIMENSION, WHOLE_DIMENSION))
ROWS = ((4, 5, 36), (BY_I, WHOLE_DIMENSION, BY_J))
FUSED = ((4, 5, 54), (BY_I, WHOLE_DIMENSION, THREE))
CASES = {
    "heads": (lambda x: x.view(4, 5, 6, 6).transpose(1, 2), ROWS),
    "heads by unflatten": (lambda x: x.unflatten(-1, (3, -1)).permute(0, 2, 1, 3), ROWS),
    "back": (lambda x: x.transpose(1, 2).contiguous().view(4, 5, 12), HEADS),
    "back by flatten": (lambda x: x.transpose(1, 2).flatten(2), HEADS),
    "rows joined": (lambda x: x.reshape(-1, x.size(-1)), ROWS),
    "rows apart": (lambda x: x.reshape(2, 2, 5, 36), ROWS),
    "new dims": (lambda x: x[:, None].unsqueeze(-1).squeeze(1), ROWS),
    "thirds": (lambda x: x.chunk(3, dim=-1), FUSED),
    "thirds by size": (lambda x: x.split(18, dim=2), FUSED),
    "thirds by sizes": (lambda x: x.split([36, 18], dim=2), FUSED),
    "thirds by view": (lambda x: x.view(4, 5, 3, 6, 3).permute(2, 0, 3, 1, 4).unbind(0), FUSED),
    "thirds by slices": (lambda x: (x[..., :18], x[..., 18:36], x[:, 1:3, 36:]), FUSED),
    "last position": (lambda x: x[:, -1], ROWS),
    "every other position": (lambda x: x[:, ::2], ROWS),
    "groups repeated": (lambda x: x.repeat_interleave(2, 1), HEADS),
    "groups stretched": (
        lambda x: x[:, :, None].expand(4, 6, 2, 5, 2).reshape(4, 12, 5, 2),
        HEADS,
    ),
    "turned halves": (lambda x: torch.cat((-x[..., 1:], x[..., :1]), -1) * 2 + x, HEADS),
    "stacked": (lambda x: torch.stack((x, x + 1), dim=1), ROWS),
    "scores": (lambda x: (x @ x.transpose(-2, -1) / 3).masked_fill(MASK, -9.0).softmax(-1), HEADS),
    "scores by einsum": (lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x), HEADS),
    "slopes": (lambda x: x + torch.arange(6.0)[:, None, None], HEADS),
    "shape": (lambda x: x * x.shape[1] + torch.zeros(x.shape), HEADS),
    "numbers first": (lambda x: 1 - 2 / (3 + x.abs()) ** 2, ROWS),
    "types": (lambda x: torch.where(x > 0, x, 0.0).float().to(torch.float64), ROWS),
    "norm of a head": (lambda x: functional.layer_norm(x, (2,)), HEADS),
    "in place": (lambda x: functional.relu(x.clone(), inplace=True).mul_(2), ROWS),
    "moved": (lambda x: x.movedim(0, 1).mT, ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_part_of_the_whole_result(name):
    function, (shape, cuts) = CASES[name]
    x = numbers(*shape)
    expected = leaves(function(x.clone()))
    split = 0
    for context in contexts():
        given = SplitTensor(cut_up(context, x, cuts).clone(), x.shape, cuts, context)
        found = leaves(function(given))
        assert len(found) == len(expected)
        for whole, mine in zip(expected, found, strict=True):
            assert mine.shape == whole.shape
            split += isinstance(mine, SplitTensor)
            local = mine.local if isinstance(mine, SplitTensor) else mine
            assert torch.allclose(local, cut_up(context, whole, cuts_of(mine)), rtol=1e-12)
        assert context.grid.count == 0
    assert split


REFUSED = {
    "a head's width": (lambda x: x.view(4, 5, 4, 9), ROWS, "cannot be cut into 3 parts"),
    "one entry": (lambda x: x[0], ROWS, "one entry of a cut dimension"),
    "a piece": (lambda x: x[..., :10], ROWS, "a piece of a cut dimension"),
    "steps": (lambda x: x[..., ::2], ROWS, "every so many"),
    "picked": (lambda x: x[torch.tensor([0, 1])], ROWS, "picks by a tensor"),
    "joined": (lambda x: torch.cat((x, x), -1), ROWS, "along a cut dimension"),
    "flat": (lambda x: x.flatten(), ROWS, "joins two cut dimensions"),
    "blocks and none": (lambda x: x[..., :36] + x[..., :18].repeat_interleave(2, -1), FUSED, "cut"),
    "largest": (lambda x: x.max(-1), ROWS, "works along a cut dimension"),
    "positions": (
        lambda x: functional.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3),
        HEADS,
        "attention is cut along positions",
    ),
    "unknown": (lambda x: torch.cumsum(x, 1), ROWS, "there is no rule"),
    "a custom drop": (lambda x: torch.bernoulli(x.sigmoid()), ROWS, "there is no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_other_ranks_is_refused(name):
    function, (shape, cuts), said = REFUSED[name]
    function(numbers(*shape))  # the whole tensor allows it
    context = next(contexts())
    x = cut_up(context, numbers(*shape), cuts).requires_grad_()
    with pytest.raises(PlanError, match=said):
        function(SplitTensor(x, torch.Size(shape), cuts, context))


def test_it_says_what_it_is():
    context = next(contexts())
    x = SplitTensor(
        torch.zeros(2, 5, 12), torch.Size((4, 5, 36)), (BY_I, WHOLE_DIMENSION, THREE), context
    )
    assert (x.size(), x.dim(), len(x), x.numel()) == (torch.Size((4, 5, 36)), 3, 4, 720)
    assert x.dtype == torch.float32
    assert "cut {0: over i, 2: over j in 3 blocks}" in repr(x)
    with pytest.raises(AttributeError, match=r"a split tensor has no attribute .colour"):
        x.colour  # noqa: B018
