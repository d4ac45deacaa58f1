"""single: decisions by masks that a forward makes itself are taken; those by data are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.capture import aten_trace, block_stacks, capture
from headway.errors import PlanError

WIDTH, LONG = 16, 12


def causal(long=LONG):
    return nn.Transformer.generate_square_subsequent_mask(long)


class Layers(nn.Module):
    """torch's own encoder, whose mask the forward makes."""

    def __init__(self, mask, layers=2, hint=None):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.mask, self.hint = mask, hint

    def forward(self, x):
        return self.inner(x, mask=self.mask(), is_causal=self.hint)


def kinds(graph):
    """Of the layers; the question whether a mask is causal takes operators of its own."""
    return [(o.kind, o.module) for o in graph.operators if ".layers." in o.module]


def attention(graph):
    found = [o for o in graph.operators if o.kind == "scaled_dot_product_attention"]
    return {(o.attributes.get("is_causal", False), len(o.inputs)) for o in found}


@pytest.mark.parametrize("by", ["torch.export", "torch.fx"])
def test_the_causal_mask_of_torchs_layers_is_seen_as_one(by, monkeypatch):
    def refuses(*_):
        raise RuntimeError("not today")

    if by == "torch.fx":
        monkeypatch.setattr(aten_trace, "_exported", refuses)
    x = torch.zeros(2, LONG, WIDTH)
    found = capture(Layers(causal), x)
    assert kinds(found) == kinds(capture(Layers(causal, hint=True), x))
    banded = capture(Layers(lambda: causal().triu(-3).tril(0)), x)
    assert kinds(banded) == kinds(capture(Layers(lambda: causal().triu(-3), hint=False), x))
    assert attention(found) != attention(banded)


def test_an_encoder_and_a_decoder():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(WIDTH, 2, 1, 2, 32, 0.0, batch_first=True)

        def forward(self, source, target):
            return self.inner(source, target, tgt_mask=causal(target.shape[1]))

    shapes = torch.zeros(2, LONG, WIDTH), torch.zeros(2, 5, WIDTH)
    graph = capture(Both(), shapes)
    products = [o for o in graph.operators if o.kind == "scaled_dot_product_attention"]
    assert len(products) == 1 + 2 * 2


def test_a_stack_of_masked_layers_is_captured_with_four_of_them(monkeypatch):
    whole = []
    monkeypatch.setattr(
        block_stacks,
        "extend_blocks",
        lambda *a, of=block_stacks.extend_blocks: whole.append(of(*a)) or whole[-1],
    )
    graph = capture(Layers(causal, layers=9), torch.zeros(2, LONG, WIDTH))
    assert whole == [graph]
    assert len([o for o in graph.operators if o.kind == "scaled_dot_product_attention"]) == 9


class Asks(nn.Module):
    """Takes one way or the other by a number."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("held", torch.ones(4))

    def forward(self, x):
        return (x.exp() if self.number(self, x) > 0 else x.sin()) * self.weight


def in_place(_, x):
    mask = torch.zeros(x.shape)
    mask[0] += 1
    rows = mask.view(-1)  # the same memory
    rows.sub_(1)
    return mask.sum().item()


def later_written(_, x):
    numbers = torch.ones(4)
    part = numbers[:2]
    part.copy_(x[0, :2])
    return int(numbers.sum())


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (lambda m, x: torch.arange(3).sum().item(), "exp"),
        (lambda m, x: -torch.full((2,), float(x.shape[1])).max().item(), "sin"),
        (in_place, "sin"),
        (lambda m, x: float(torch.tensor([1, 2])[1]), "exp"),
        (lambda m, x: torch.linspace(0, 1, 3).tolist()[0], "sin"),
        (lambda m, x: torch.equal(torch.eye(2), torch.ones(2, 2).tril().triu()), "exp"),
    ],
)
def test_numbers_that_need_no_data_decide(number, way):
    graph = capture(Asks(number), torch.zeros(2, 4))
    assert [o.kind for o in graph.operators if o.kind in ("exp", "sin")] == [way]


@pytest.mark.parametrize(
    "number",
    [
        lambda m, x: x.sum().item(),
        lambda m, x: m.weight.sum().item(),
        lambda m, x: m.held.sum().item(),
        lambda m, x: (torch.ones(4) * x).sum().item(),
        lambda m, x: torch.rand(()).item(),
        lambda m, x: torch.ones(4).uniform_().sum().item(),
        later_written,
    ],
)
def test_numbers_of_data_parameters_and_chance_are_refused(number):
    with pytest.raises(PlanError, match="Asks cannot be captured"):
        capture(Asks(number), torch.zeros(2, 4))
