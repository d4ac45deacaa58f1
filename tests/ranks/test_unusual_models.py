"""ranks: derivatives by a model's inputs, complex numbers, state kept as attributes, masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway
from headway.errors import HeadwayError, PlanError, RecipeError
from headway.plans import LayerSplit


def points() -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(24, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
                                    nn.Linear(8, 1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def residual(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a physics-informed network: the field's own derivative."""
    x, y = batch
    x = x.clone().requires_grad_()
    value = model(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return ((slope.sum(1, keepdim=True) - y) ** 2).mean()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=draw))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4))


class Remembering(nn.Module):
    """Keeps the state of its recurrence as an attribute, as cells of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.outer(torch.relu(self.inner(x)))
        self.state = x  # and the graph behind it, until the next pass is over
        return self.head(x).sum(1, keepdim=True)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.head = nn.Linear(8, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.unsqueeze(-1))
        return self.head(self.decoder(hidden, hidden, tgt_mask=self.mask)).sum((1, 2)).unsqueeze(1)


def recipe(model: Any, loss: Any = None, **options: Any) -> headway.Recipe:
    return headway.Recipe(
        name="unusual",
        model=model,
        data=points,
        loss=loss or nn.MSELoss(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        batch=8,
        stop="4 steps",
        **options,
    )


TENSOR = LayerSplit(tensor=(2,))


@pytest.mark.parametrize(
    ("model", "loss", "options"),
    [
        (Field, residual, {}),
        (Field, residual, {"zero": 2}),
        (Spectral, None, {}),
        (Remembering, None, {"split": TENSOR}),
        (Masked, None, {}),
        (Masked, None, {"split": TENSOR}),
        (Masked, None, {"zero": 3}),
    ],
)
def test_it_is_equal(model: Any, loss: Any, options: dict[str, Any]) -> None:
    headway.verify(recipe(model, loss, **options), processes=2).check()


@pytest.mark.parametrize(
    ("model", "loss", "options", "kind", "told"),
    [
        (Field, residual, {"zero": 3}, PlanError, "differentiated again"),
        (Field, residual, {"stages": 2}, RecipeError, "gradient of the model's inputs"),
        (Spectral, None, {"zero": 1}, PlanError, "weight is of torch.complex"),
        (Spectral, None, {"zero": 3}, PlanError, "weight is of torch.complex"),
    ],
)
def test_it_is_refused_by_name(
    model: Any, loss: Any, options: dict[str, Any], kind: type[HeadwayError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        headway.train(recipe(model, loss, **options), processes=2)
