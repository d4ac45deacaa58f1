"""Small models and data sets, one for each property that has broken a distributed run before.

Shape suffixes: B samples, T positions, V words, F features, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES = 6
CLASSES = 4
WORDS = 11
LENGTH = 5


class Mlp(nn.Module):
    """Nothing special: x_BF -> logits_BC."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.second = nn.Linear(width, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x_BF)))


class WithDropout(nn.Module):
    """Two dropout layers: equal to the serial run only if masks are drawn per logical element."""

    def __init__(self, width: int = 8, p: float = 0.3) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.drop_first = nn.Dropout(p)
        self.second = nn.Linear(width, CLASSES)
        self.drop_second = nn.Dropout(p)

    def forward(self, x_BF: Tensor) -> Tensor:
        hidden = self.drop_first(torch.tanh(self.first(x_BF)))
        return self.drop_second(self.second(hidden))


class HalfFrozen(WithDropout):
    """As people freeze batch normalisation: one module never leaves eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def train(self, mode: bool = True) -> HalfFrozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x_BF: Tensor) -> Tensor:
        logits: Tensor = super().forward(self.norm(x_BF))
        return logits


class Tied(nn.Module):
    """One parameter under two names: words_BT -> logits_BTV by the embedding's transpose."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words_BT: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(words_BT))))


class WithUnused(nn.Module):
    """`spare` takes no part in the forward pass and never has a gradient; `frozen` needs none."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.spare = nn.Linear(3, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.second = nn.Linear(width, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.second(torch.tanh(self.frozen(self.first(x_BF))))


class SometimesUnused(nn.Module):
    """`extra` is used only where a sample asks for it, so on some ranks and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(FEATURES, CLASSES)
        self.extra = nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        wanted = x_BF[:, 0] > 1.2
        y_BC = self.main(x_BF)
        return y_BC if not wanted.any() else y_BC + self.extra(x_BF) * wanted[:, None]


class TinyConv(nn.Module):
    """A convolution with a normalisation that keeps running statistics: image_BCHW -> logits_BC."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(4) if batch_norm else nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(image_BCHW)))
        return self.head(hidden.mean((2, 3)))


class Attention(nn.Module):
    """Attention with biases and dropout over two positions: x_BF -> logits_BC."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(FEATURES // 2, 1, dropout=0.2, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BTF = x_BF.unflatten(1, (2, FEATURES // 2))
        return self.head(self.attend(x_BTF, x_BTF, x_BTF)[0].flatten(1))


class ComplexValued(nn.Module):
    """A complex parameter: x_BF -> logits_BC."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))

    def forward(self, x_BF: Tensor) -> Tensor:
        return (x_BF.to(self.wave.dtype) @ self.wave).abs()


class SparselyEmbedded(nn.Module):
    """An embedding with sparse gradients: words_BT -> logits_BTV."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, sparse=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words_BT: Tensor) -> Tensor:
        return self.head(self.embed(words_BT))


class Residual(nn.Module):
    """A chain with dropout, a skip from the first to the last block, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2),
                          nn.Linear(16, 8))
            for _ in range(6)
        )  # fmt: skip
        self.middle = nn.Linear(8, 8)
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        first = x = self.middle(self.enter(x_BF))
        for block in self.blocks:
            x = x + block(x)
        return self.leave(self.middle(x) + first)


class Chain(Residual):
    """The same without the layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        del self.middle

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        first = x = self.enter(x_BF)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x + first)


class Points(Dataset[tuple[Tensor, Tensor]]):
    """`length` points with a class each; a point depends on its index alone."""

    def __init__(self, length: int = 40, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, FEATURES, generator=draw, dtype=torch.float64).to(dtype)
        self.y = torch.randint(CLASSES, (length,), generator=draw)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self.y):
            raise IndexError(index)
        return self.x[index], self.y[index]


class Images(Points):
    """As `Points`, with images of 1 x 5 x 5."""

    def __init__(self, length: int = 40, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(length, dtype)
        draw = torch.Generator().manual_seed(8)
        self.x = torch.randn(length, 1, 5, 5, generator=draw, dtype=torch.float64).to(dtype)


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """`length` windows of words with the next word as target: int64[LENGTH] -> int64[LENGTH]."""

    def __init__(self, length: int = 40) -> None:
        draw = torch.Generator().manual_seed(9)
        self.words = torch.randint(WORDS, (length, LENGTH + 1), generator=draw)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self.words):
            raise IndexError(index)
        return self.words[index, :-1], self.words[index, 1:]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over all targets of the batch; every sample has as many targets as every other."""
    inputs, target = batch
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def ignoring_a_word(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss whose count is not the number of samples: targets equal to 3 do not count."""
    inputs, target = batch
    logits = model(inputs).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, target.flatten(), ignore_index=3, reduction="sum")
    return total, (target != 3).sum()


ALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[tuple[Tensor, Tensor]]]]] = {
    "mlp": (Mlp, Points),
    "dropout": (WithDropout, Points),
    "tied": (Tied, Sentences),
    "unused": (WithUnused, Points),
    "conv": (TinyConv, Images),
}
"""Name -> (model, data): for `@pytest.mark.parametrize("name", ALL)`."""
