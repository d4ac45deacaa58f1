"""`ElasticSampler`: the samples of a rank, without those that were processed before a change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from headway.horovod import basics


class ElasticSampler(Sampler[int]):
    """Divides what is left of an epoch among the ranks; goes on with other ranks after a change.

    Like torch's `DistributedSampler`, the indices are filled up from their beginning so that all
    ranks have equally many. Call `set_epoch` at the end of an epoch, and `record_batch` after each
    batch, which all ranks count alike: what is left is a suffix of the epoch's order.

    Args:
        dataset: Only its length counts.
        shuffle: In an order that `seed` and the epoch give.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.rank, self.num_replicas = 0, 1
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has processed a batch of so many samples.

        Args:
            batch_idx: Of no meaning: batches are processed in their order.
        """
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the progress of `state_dict`."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how much of it was processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Divide what is left among the ranks that there are now."""
        known = basics.is_initialized()
        self.num_replicas = basics.size() if known else 1
        self.rank = basics.rank() if known else 0
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        rest = self.remaining_indices
        filled = rest * -(-self.total_size // max(len(rest), 1))
        return iter(filled[: self.total_size][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
