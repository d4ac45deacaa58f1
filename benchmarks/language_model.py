"""The model that all benchmarks train, and its recipe: 10 M parameters, 8 x 128 tokens, AdamW."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway import Recipe

VOCABULARY, WINDOW, BATCH = 4096, 128, 8


class LanguageModel(nn.Module):
    """A plain transformer; `layers` and `width` scale it (6 and 320: 10.1 M; 16 and 704: 100 M)."""

    def __init__(self, layers: int = 6, width: int = 320) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        hidden = self.embed(words) + self.places(places)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


class Words(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Made-up words: the benchmarks measure time, not learning."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(VOCABULARY, (WINDOW + 1,), generator=draw)
        return words[:-1], words[1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, targets = batch
    return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def recipe(*, steps: int = 30, layers: int = 6, width: int = 320, every: int = 0) -> Recipe:
    return Recipe(
        name="language-model",
        model=lambda: LanguageModel(layers, width),
        data=Words,
        loss=loss,
        optimizer=adamw,
        batch=BATCH,
        stop=steps,
        checkpoint_every=every,
    )
