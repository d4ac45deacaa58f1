"""A stream of shards in a folder, stopped in the middle of an epoch and resumed on one process.

python examples/stream_of_shards.py
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import headway
from headway.data import StreamSource

FOLDER, SHARDS, IN_SHARD = Path("shards").resolve(), 6, 40


def write_shards() -> None:
    """Samples (point [8], class) in six files, as a preprocessing step leaves them."""
    FOLDER.mkdir(exist_ok=True)
    for number in range(SHARDS):
        draw = torch.Generator().manual_seed(number)
        points = torch.randn(IN_SHARD, 8, generator=draw)
        torch.save((points, points[:, :3].argmax(dim=1)), FOLDER / f"shard-{number:03}.pt")


class Shards(IterableDataset):
    """The samples of one shard after another; one shard at a time is in memory."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for path in sorted(FOLDER.glob("shard-*.pt")):
            points, classes = torch.load(path)
            yield from zip(points, classes, strict=True)


def recipe(stop: str = "4 epochs") -> headway.Recipe:
    return headway.Recipe(
        name="stream",
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)),
        data=StreamSource(Shards(), length=SHARDS * IN_SHARD),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch="16 samples",
        stop=stop,
    )


if __name__ == "__main__":
    write_shards()
    headway.verify(recipe(), processes=2).check()
    whole = headway.train(recipe(), processes=2)
    half = headway.train(recipe(stop="22 steps"), processes=2)  # 7 steps into the second epoch
    rest = headway.train(recipe(), processes=1, directory=half.directory, resume=True)
    print(f"loss after {whole.steps} steps: {whole.loss:.6f}; resumed at 22: {rest.loss:.6f}")
