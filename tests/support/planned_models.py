"""Small models of the kinds that people plan, one recipe each, by name in `RECIPES`.

Shape suffixes as in `support.tiny_models`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from headway import Recipe
from support.tiny_models import (
    CLASSES,
    FEATURES,
    LENGTH,
    WORDS,
    HalfFrozen,
    Images,
    Points,
    Residual,
    Sentences,
    Tied,
    WithUnused,
    cross_entropy,
    ignoring_a_word,
)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                         nn.Linear(2 * width, width))  # fmt: skip


class OddMlp(nn.Sequential):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 11),
            nn.Tanh(), nn.Linear(11, CLASSES),
        )  # fmt: skip


class NormedConv(nn.Sequential):
    """Convolutions with batch statistics: image_BCHW -> logits_BC."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES),
        )  # fmt: skip


class SmallTransformer(nn.Module):
    """Torch's own encoder layers: words_BT -> logits_BTV."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTF = self.embed(words_BT) + self.places
        for layer in self.layers:
            x_BTF = layer(x_BTF)
        logits: Tensor = self.head(x_BTF)
        return logits


class Tables(nn.Module):
    """Embedding bags beside a perceptron, as DLRM: (x_BF, ids_BN) -> logits_BC."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, width, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, width))
        self.top = nn.Sequential(nn.Linear(4 * width, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x_BF: Tensor, ids_BN: Tensor) -> Tensor:
        found = [bag(ids_BN[:, n : n + 1]) for n, bag in enumerate(self.bags)]
        logits: Tensor = self.top(torch.cat([self.bottom(x_BF), *found], 1))
        return logits


class Recurrent(nn.Module):
    """Two recurrent layers, one called after the other: words_BT -> logits_BTV."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTF, _ = self.first(self.embed(words_BT))
        x_BTF, _ = self.second(x_BTF)
        logits: Tensor = self.head(x_BTF)
        return logits


class Body(nn.Module):
    """A chain whose output is packed by `pack`, a function of (logits, hidden)."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any], blocks: int = 4) -> None:
        super().__init__()
        self.pack = pack
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(block(8) for _ in range(blocks))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_BF: Tensor) -> Any:
        hidden = self.enter(x_BF)
        for one in self.blocks:
            hidden = hidden + one(hidden)
        return self.pack(self.head(hidden), hidden)


class NamedOutput(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class DataOutput:
    logits: Tensor
    hidden: Tensor | None = None
    kind: str = "classes"


class DictOutput(OrderedDict[str, Any]):
    """As the outputs of `transformers`: keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dictionary and a dataclass at once, filled by `__post_init__`; without what is None."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    extra: Tensor | None = None

    def __post_init__(self) -> None:
        for key in ("logits", "hidden", "extra"):
            value = getattr(self, key)
            if value is not None:
                self[key] = value


class PlainOutput:
    """An object of no known kind."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def as_tuple(logits: Tensor, hidden: Tensor) -> Any:
    return logits, hidden


def as_dict(logits: Tensor, hidden: Tensor) -> Any:
    return {"logits": logits, "hidden": hidden}


def as_named(logits: Tensor, hidden: Tensor) -> Any:
    return NamedOutput(logits, hidden)


def as_data(logits: Tensor, hidden: Tensor) -> Any:
    return DataOutput(logits, hidden)


def as_ordered(logits: Tensor, hidden: Tensor) -> Any:
    return DictOutput(logits=logits, hidden=hidden)


def as_model_output(logits: Tensor, hidden: Tensor) -> Any:
    return ModelOutput(logits=logits, hidden=hidden)


def as_object(logits: Tensor, hidden: Tensor) -> Any:
    return PlainOutput(logits)


def as_default(logits: Tensor, hidden: Tensor) -> Any:
    return defaultdict(list, logits=logits, hidden=hidden)


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple output": as_tuple,
    "dict output": as_dict,
    "named output": as_named,
    "dataclass output": as_data,
    "ordered output": as_ordered,
    "model output": as_model_output,
    "object output": as_object,
    "default output": as_default,
}


class Branching(nn.Module):
    """Its forward looks at the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(block(8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        hidden = self.enter(x_BF)
        for one in self.blocks:
            if hidden.abs().sum() > 0:
                hidden = hidden + one(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class InPlace(Branching):
    """Changes a view of a value; the value itself is used again behind a block."""

    def forward(self, x_BF: Tensor) -> Tensor:
        first = self.enter(x_BF) * 1
        view = first[:, :4]
        hidden = self.blocks[0](first.clone())
        view.mul_(2)
        for one in self.blocks[1:]:
            hidden = hidden + one(hidden)
        logits: Tensor = self.head(hidden + first)
        return logits


class Counted(Branching):
    """Counts its calls in an attribute, and keeps a running mean in a buffer of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x_BF: Tensor) -> Tensor:
        hidden = self.enter(x_BF)
        for one in self.blocks:
            hidden = hidden + one(hidden)
            if self.training:
                self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        logits: Tensor = self.head(hidden)
        return logits


class ModeDependent(Branching):
    """In training it goes another way than in evaluation."""

    def forward(self, x_BF: Tensor) -> Tensor:
        hidden = self.enter(x_BF)
        for number, one in enumerate(self.blocks):
            if self.training or number:
                hidden = hidden + one(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Frozen(nn.Sequential):
    """The first half needs no gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), block(8), block(8), block(8),
                         nn.Linear(8, CLASSES))  # fmt: skip
        for one in (self[0], self[1]):
            one.requires_grad_(False)


class Rows(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Points with three ids each."""

    def __init__(self, length: int = 40) -> None:
        self.points = Points(length)
        draw = torch.Generator().manual_seed(10)
        self.ids = torch.randint(WORDS, (length, 3), generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x, y = self.points[index]
        return (x, self.ids[index]), y


def packed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_BF, y_B = batch
    found = model(x_BF)
    if isinstance(found, tuple):
        logits = found[0]
    elif type(found) in (dict, defaultdict):
        logits = found["logits"]
    else:
        logits = found.logits
    return nn.functional.cross_entropy(logits, y_B)


def table_loss(model: nn.Module, batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    (x_BF, ids_BN), y_B = batch
    return nn.functional.cross_entropy(model(x_BF, ids_BN), y_B)


def mean_of_known(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over labels that are not ignored: another number in each share of a batch."""
    words_BT, target_BT = batch
    logits = model(words_BT).flatten(0, 1)
    return nn.functional.cross_entropy(logits, target_BT.flatten(), ignore_index=3)


def decayed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Adds a penalty of all parameters, which a loss of stages cannot reach."""
    penalty = sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model, batch) + 1e-3 * penalty


def twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Calls the model twice."""
    x_BF, y_B = batch
    return nn.functional.cross_entropy(model(x_BF) + model(-x_BF), y_B)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.01)


class AllSparse(nn.Module):
    """Sparse gradients alone: words_BT -> logits_BTV."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(WORDS, 8, sparse=True)
        self.second = nn.Embedding(WORDS, 8, sparse=True)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTF = self.first(words_BT) * self.second(words_BT)
        return torch.nn.functional.pad(x_BTF, (0, WORDS - 8))


def _recipe(model: Any, data: Any = Points, loss: Any = cross_entropy, **more: Any) -> Recipe:
    fixed: dict[str, Any] = {"name": "planned", "optimizer": adamw, "batch": 12, "stop": 2}
    return Recipe(model=model, data=data, loss=loss, seed=5, **fixed | more)


@dataclass(frozen=True)
class Packed:
    """A model with an output of this kind; can be pickled."""

    kind: str

    def __call__(self) -> nn.Module:
        return Body(PACKS[self.kind])


RECIPES: dict[str, Recipe] = {
    "odd mlp": _recipe(OddMlp),
    "residual": _recipe(Residual, optimizer=sgd, clip=0.5),
    "conv": _recipe(NormedConv, Images),
    "transformer": _recipe(SmallTransformer, Sentences),
    "tied": _recipe(Tied, Sentences, clip=0.5),
    "tables": _recipe(Tables, Rows, table_loss),
    "recurrent": _recipe(Recurrent, Sentences),
    **{name: _recipe(Packed(name), loss=packed_loss) for name in PACKS},
    "counted": _recipe(Tied, Sentences, ignoring_a_word),
    "mean of known": _recipe(SmallTransformer, Sentences, mean_of_known),
    "frozen": _recipe(Frozen, optimizer=sgd),
    "half frozen": _recipe(HalfFrozen),
    "unused": _recipe(WithUnused),
    "branching": _recipe(Branching),
    "in place": _recipe(InPlace),
    "buffer of all": _recipe(Counted),
    "mode": _recipe(ModeDependent),
    "penalty": _recipe(Residual, loss=decayed_loss),
    "twice": _recipe(OddMlp, loss=twice),
    "sparse adam": _recipe(AllSparse, Sentences, optimizer=sparse_adam),
    "microbatch 2": replace(_recipe(OddMlp, clip=0.5), microbatch=2),
    "bfloat16": replace(_recipe(OddMlp), precision="bfloat16"),
    "own exchange": _recipe(OddMlp, exchange=None),
    "batch 10": replace(_recipe(Frozen), batch=10),
}
