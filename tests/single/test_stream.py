"""single: a stream gives its samples in the order in which one process reads it."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.data import Cursor, Loader, StreamSource, as_examples
from headway.errors import DataError
from headway.plans import BatchSplit

BEGIN = Cursor(seed=1)


class Counting:
    """As a streaming data set of Hugging Face: neither a length nor numbered samples."""

    def __init__(self, length=23):
        self.length, self.given = length, 0

    def __iter__(self):
        for number in range(self.length):
            self.given += 1
            yield {"number": number}


class Drawing(Counting):
    def __iter__(self):
        yield from ({"number": random.random()} for _ in range(self.length))


class Torch(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(23))

    def __len__(self):
        return 23


def batches(source, ranks, cursor=BEGIN, epochs=2):
    found: list[list[int]] = []
    for rank in range(ranks):
        split = BatchSplit(samples=5, microbatch=2)
        options = {"rank": rank, "ranks": ranks, "cursor": cursor, "epochs": epochs}
        with Loader(source, split, **options) as loader:
            for number, batch in enumerate(loader):
                found += [[]] * (number == len(found))
                micros = [micro.data["number"] for micro in batch.micros]
                found[number] = found[number] + [int(n) for micro in micros for n in micro]
    return found


def test_batch_k_is_the_samples_from_kb_on_for_any_ranks_and_after_resuming():
    wanted = [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)] * 2
    for ranks in (1, 3):
        assert batches(StreamSource(Counting(), 23), ranks) == wanted
        later = Cursor(seed=1, epoch=0, position=10)
        assert batches(StreamSource(Counting(), 23), ranks, later) == wanted[2:]


def test_an_epoch_reads_each_sample_once():
    stream = Counting()
    batches(StreamSource(stream, 23), 1)
    assert stream.given == 2 * 23


def test_a_loader_of_a_stream():
    source = as_examples(DataLoader(Torch(), batch_size=5))
    with Loader(
        source, BatchSplit(samples=5), rank=0, ranks=1, cursor=Cursor(seed=1), epochs=1
    ) as loader:
        found = [batch.micros[0].data.tolist() for batch in loader]
    assert found == [batch.tolist() for batch in DataLoader(Torch(), batch_size=5)]


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda: as_examples(Counting()), "has no length"),
        (lambda: as_examples(iter([1, 2])), "only once"),
        (lambda: StreamSource(Counting(), 30).read([25]), "ends after 23 of 30"),
        (lambda: StreamSource(Drawing(), 23).read([0]), "draws from the global"),
        (
            lambda: Loader(
                as_examples(Torch()),
                BatchSplit(samples=5),
                rank=0,
                ranks=1,
                cursor=Cursor(seed=1),
                workers=2,
            ),
            "not by 2 workers",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(read, says):
    with pytest.raises(DataError, match=says) as caught:
        read()
    assert caught.value.fix
