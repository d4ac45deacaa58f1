"""Recipes whose data are those of Hugging Face `datasets` and of WebDataset, as these make them."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway import Recipe
from support.recipes import adamw

WIDTH, SHARDS = 6, 3


def numbers() -> Iterator[dict[str, Any]]:
    for number in range(90):
        draw = torch.Generator().manual_seed(number)
        yield {"x": torch.randn(WIDTH, generator=draw).tolist(), "label": number % 3}


def of_columns(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    # Without a format `default_collate` makes one tensor for each number of the list.
    columns = batch["x"]
    x = torch.stack(columns, 1) if isinstance(columns, list) else columns
    return nn.functional.cross_entropy(model(x.to(dtype_of(model))), batch["label"])


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    x, label = batch
    return nn.functional.cross_entropy(model(x.to(dtype_of(model))), label)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def of(data: Any, **fields: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "name": "library",
        "model": lambda: nn.Linear(WIDTH, 3),
        "data": data,
        "loss": of_columns,
        "optimizer": adamw,
        "batch": 20,
        "microbatch": 4,
        "stop": 8,
        "seed": 5,
        "checkpoint_every": 3,
    }
    return Recipe(**(defaults | fields))


def table() -> Any:
    return importlib.import_module("datasets").Dataset.from_list(list(numbers()))


def mapped() -> Recipe:
    return of(table())


def mapped_torch() -> Recipe:
    return of(table().with_format("torch"), stop="2 epochs")


def generated() -> Recipe:
    return of(importlib.import_module("datasets").IterableDataset.from_generator(numbers))


def in_shards() -> Recipe:
    return of(table().to_iterable_dataset(num_shards=4).with_format("torch"))


def buffered() -> Recipe:
    """What the buffer of a shuffled stream holds is not in its state."""
    return of(table().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=9))


def web() -> Recipe:
    shards = importlib.import_module("webdataset").WebDataset(
        [str(path) for path in archives()], shardshuffle=False
    )
    return of(shards.decode().to_tuple("x.npy", "cls"), loss=of_pair)


def archives() -> list[Path]:
    """Tar files of samples; the same for all processes of a test."""
    folder = Path(os.environ.get("LIBRARY_DATA") or tempfile.mkdtemp())
    return [_archive(folder / f"{number}.tar", number) for number in range(SHARDS)]


def _archive(path: Path, number: int) -> Path:
    if path.exists():
        return path
    draw = np.random.default_rng(number)
    with importlib.import_module("webdataset").TarWriter(str(path)) as writer:
        for place in range(30):
            x = draw.normal(size=WIDTH).astype("float32")
            writer.write({"__key__": f"{number}-{place:03}", "x.npy": x, "cls": place % 3})
    return path
