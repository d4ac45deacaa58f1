"""Models as `transformers` builds them: `model(**batch)` returns loss and logits of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from headway import Recipe

VOCABULARY, WIDTH, LENGTH = 13, 8, 6


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor
    aux_loss: Tensor | None = None


class Labelled(nn.Module):
    """Embedding, two blocks, head: a causal model, or one that predicts each token itself."""

    def __init__(self, *, causal: bool = True, dropout: float = 0.2, routed: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="labelled",
            output_router_logits=bool(routed),
            router_aux_loss_coef=routed,
        )
        self.causal = causal
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        logits = self.head(x)
        loss, router = None, None
        if labels is not None:
            # As `transformers` does: the same length, with the last token ignored.
            wanted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if self.causal else labels
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))
            if self.config.output_router_logits:
                chosen = x.softmax(-1).mean((0, 1))
                router = (chosen * chosen).sum()
                loss = loss + self.config.router_aux_loss_coef * router
        return Output(loss, logits, router)


class Sentences(Dataset[dict[str, Tensor]]):
    """Of different lengths; what is behind the end is ignored. Sample 3 has no label at all."""

    def __init__(self, samples: int = 26, *, ignore: bool = True) -> None:
        words = torch.randint(
            VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(3)
        )
        self.words, self.ignore = words, ignore

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.words[index].clone()
        if self.ignore:
            labels[LENGTH - (5 * index + 3) % LENGTH :] = -100
            if index == 3:
                labels[:] = -100
        return {"input_ids": self.words[index], "labels": labels}


def own_mean(model: nn.Module, batch: Any) -> Tensor:
    """The usual line: exact only where every sample has as many labels."""
    loss: Tensor = model(**batch).loss
    return loss


def labelled(loss: Any = "tokens", *, causal: bool = True) -> Recipe:
    return Recipe(
        name="labelled",
        model=lambda: Labelled(causal=causal),
        data=Sentences,
        loss=own_mean if loss == "mean" else loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        batch=8,
        stop="4 steps",
        seed=2,
    )


def masked() -> Recipe:
    return labelled(causal=False)


def mean_of_labels() -> Recipe:
    return labelled("mean")
