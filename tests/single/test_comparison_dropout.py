"""single: dropout is switched off wherever a model keeps its probability."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.comparison.adapter import turn_off_dropout


@dataclass(frozen=True)
class Frozen:
    dropout: float = 0.5


class DropPath(nn.Module):
    """As in timm: whole samples, with a probability called p."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 1 - self.p))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_dropout = 0.5
        self.backdrop = 2.0  # no probability
        self.config = SimpleNamespace(resid_pdrop=0.5, layers=1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.parts = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5))
        self.path = DropPath()
        self.inner = nn.Linear(8, 8)
        self.inner.config = Frozen()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, self.attn_dropout, self.training)
        x = functional.dropout(x, self.config.resid_pdrop, self.training)
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        return self.inner(self.path(self.parts(x)))


def drawn(model: nn.Module) -> bool:
    """Whether a pass depends on the generator."""
    x = torch.ones(4, 5, 8)
    before = torch.get_rng_state()
    values = []
    for seed in range(2):
        torch.manual_seed(seed)
        values.append(model(x))
    torch.set_rng_state(before)
    return not torch.equal(*values)


def test_all_probabilities_become_zero():
    torch.manual_seed(0)
    model = Model().train()
    assert drawn(model)
    turn_off_dropout(model)
    assert not drawn(model)
    assert model.training
    assert model.backdrop == 2.0
    assert model.inner.config.dropout == 0.5
