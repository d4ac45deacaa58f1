"""Recipes whose data are a torch `DataLoader`, with data sets, samplers and collate functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from headway import Recipe, criterion
from support.recipes import adamw
from support.tiny_models import Mlp, Points

WORDS, WIDTH = 11, 4


class Sentences(Dataset[dict[str, Tensor]]):
    """Dicts of token lists of unequal length, with a label."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (1 + index % 7,), generator=draw)
        return {"tokens": tokens, "label": tokens.sum() % 3}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([one["tokens"] for one in samples], batch_first=True)
    return {"tokens": tokens, "label": torch.stack([one["label"] for one in samples])}


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = (tokens != 0).unsqueeze(-1)
        summed: Tensor = (self.words(tokens) * kept).sum(1)
        found: Tensor = self.out(summed)
        return found


def of_label(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])


class ByLength(Sampler[list[int]]):
    """Batches of sentences of like length, shuffled anew in each epoch; the last may be small."""

    def __init__(self, length: int, batch: int, seed: int = 1) -> None:
        self.length, self.batch = length, batch
        self.draw = random.Random(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(self.length), key=lambda i: (i % 7, self.draw.random()))
        cut = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        self.draw.shuffle(cut)
        yield from cut

    def __len__(self) -> int:
        return -(-self.length // self.batch)


def plain(data: Any, **fields: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "name": "loader",
        "model": Mlp,
        "data": data,
        "loss": criterion(nn.CrossEntropyLoss()),
        "optimizer": adamw,
        "stop": 8,
        "microbatch": 4,
        "seed": 5,
        "checkpoint_every": 3,
    }
    if "validation" in fields:
        defaults["validate_every"] = 4
    return Recipe(**(defaults | fields))


def words(data: Any, **fields: Any) -> Recipe:
    return plain(data, model=BagOfWords, loss=of_label, **fields)


def shuffled() -> Recipe:
    return plain(DataLoader(Points(), batch_size=12, shuffle=True), validation=Points(16))


def in_order() -> Recipe:
    loader = DataLoader(Points(), batch_size=12, drop_last=True, num_workers=1)
    return plain(loader, validation=DataLoader(Points(16), batch_size=5, drop_last=True))


def weighted() -> Recipe:
    sampler = WeightedRandomSampler([1.0 + i % 5 for i in range(40)], 30)
    validation = WeightedRandomSampler([1.0] * 16, 9)
    return plain(
        DataLoader(Points(), batch_size=12, sampler=sampler),
        validation=DataLoader(Points(16), batch_size=4, sampler=validation),
    )


def seeded() -> Recipe:
    draw = torch.Generator().manual_seed(7)
    return plain(DataLoader(Points(), batch_size=12, shuffle=True, generator=draw))


def by_length() -> Recipe:
    loader = DataLoader(Sentences(), batch_sampler=ByLength(40, 12), collate_fn=padded)
    return words(loader, stop="2 epochs")


def collated() -> Recipe:
    return words(Sentences, batch=12, collate=padded, validation=lambda: Sentences(16))


class Shards(IterableDataset[Any]):
    """The points of `Points`, shard by shard, as a stream."""

    def __iter__(self) -> Iterator[Any]:
        points = Points()
        for shard in (2, 0, 1):
            yield from (points[i] for i in range(shard, 40, 3))

    def __len__(self) -> int:
        return 40


class SplitByRank(Shards):
    """A stream that takes its samples apart itself, as one made for DDP."""

    def __iter__(self) -> Iterator[Any]:
        yield from islice(super().__iter__(), dist.get_rank(), None, dist.get_world_size())


def streamed() -> Recipe:
    return plain(Shards(), batch=12, validation=DataLoader(Shards(), batch_size=4))


def streamed_loader() -> Recipe:
    return plain(DataLoader(Shards(), batch_size=12, drop_last=True))


class Unbounded(IterableDataset[Any]):
    """Points in another order in each epoch, that do not say how many they are; it remembers where
    it is, as a stream of Hugging Face."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.epoch, self.place = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        points, order = Points(self.length), list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        while self.place < self.length:
            self.place += 1
            yield points[order[self.place - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points()
        yield from (points[i % 40] for i in count())


def unbounded() -> Recipe:
    return plain(Unbounded(), batch=12, validation=Unbounded(16))


def unbounded_dropping() -> Recipe:
    return plain(DataLoader(Unbounded(), batch_size=12, drop_last=True))


def endless() -> Recipe:
    return plain(Endless(), batch=12, stop="90 samples", validation=Shards())


def unbounded_samples() -> Recipe:
    """With ragged batches: 12, 12, 12, 4 and again, which are 8 steps."""
    return plain(Unbounded(), batch=12, stop="77 samples", checkpoint_every=5)


class OtherEnds(Unbounded):
    """A stream of which one rank lacks the last sample."""

    def __iter__(self) -> Iterator[Any]:
        yield from islice(super().__iter__(), 36 - dist.get_rank())


def other_ends() -> Recipe:
    return plain(OtherEnds(), batch=12)


def split_by_rank() -> Recipe:
    return plain(SplitByRank(), batch=12)


class FromTheClock(Sampler[int]):
    """Draws otherwise in every process."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(40), 40))

    def __len__(self) -> int:
        return 40


def unseeded() -> Recipe:
    return plain(DataLoader(Points(), batch_size=12, sampler=FromTheClock()))


def with_replacement() -> Recipe:
    sampler = RandomSampler(Points(), replacement=True, num_samples=31)
    return replace(plain(DataLoader(Points(), batch_size=12, sampler=sampler)), drop_last=True)
