"""single: a stream gives its samples in the order in which one process reads it."""

from __future__ import annotations

import copy
import json
import os
import random
from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.checkpoint.format import decode_facts, encode_facts
from headway.data import Cursor, Loader, StreamSource, as_examples
from headway.data.stream import _packed, _unpacked, fingerprint
from headway.errors import DataError, RecipeError
from headway.plans import BatchSplit
from headway.run.recipe.batch_units import steps_left, stop_steps
from headway.run.recipe.training_data import recipe_epoch_length, training_data
from support import loader_recipes

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


class Shuffled(Counting):
    """Another order in each epoch, as behind the `shuffle` of Hugging Face."""

    def __init__(self, length=23):
        super().__init__(length)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(self.length))
        random.Random(self.epoch).shuffle(numbers)
        yield from ({"number": number} for number in numbers)


class Log(list):
    """What a stream has read, and all copies of it."""

    def __deepcopy__(self, _):
        return self


class Stateful(Counting):
    """Goes on where `load_state_dict` says; begun again it would go on where it was, too."""

    late = 0

    def __init__(self, length=40):
        super().__init__(length)
        self.at = 0
        self.read = Log()

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            self.read.append(self.at - 1)
            yield {"number": self.at - 1}

    def state_dict(self):
        return {"at": self.at + self.late}

    def load_state_dict(self, state):
        self.at = state["at"]


class Buffering(Stateful):
    """Its state lacks what it has in its buffer, as that of a shuffled stream of Hugging Face."""

    def __iter__(self):
        order = list(range(self.at, self.length))
        random.Random(3).shuffle(order)
        for number in order:
            self.at += 1
            self.read.append(number)
            yield {"number": number}


def batches(source, ranks, cursor=BEGIN, epochs=2, drop_last=False):
    found: list[list[int]] = []
    for rank in range(ranks):
        split = BatchSplit(samples=5, microbatch=2)
        options = {"rank": rank, "ranks": ranks, "cursor": cursor, "epochs": epochs}
        options["drop_last"] = drop_last
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


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [20, 21, 23])
def test_without_a_length_an_epoch_ends_where_the_stream_ends(length, drop_last):
    wanted = batches(StreamSource(Counting(length), length), 1, drop_last=drop_last)
    for ranks in (1, 3):
        assert batches(StreamSource(Counting(length)), ranks, drop_last=drop_last) == wanted
        later = Cursor(seed=1, epoch=0, position=10)
        assert (
            batches(StreamSource(Counting(length)), ranks, later, drop_last=drop_last)
            == (wanted[2:])
        )


def cursors(source, cursor=BEGIN, drop_last=False):
    split = BatchSplit(samples=5)
    options = {"rank": 0, "ranks": 2, "cursor": cursor, "epochs": 2, "drop_last": drop_last}
    with Loader(source, split, **options) as loader:
        return [batch.after for batch in loader]


@pytest.mark.parametrize("drop_last", [False, True])
def test_places_of_a_stream_are_the_same_with_and_without_a_length(drop_last):
    for length in (20, 21):
        known = cursors(StreamSource(Counting(length), length), drop_last=drop_last)
        assert cursors(StreamSource(Counting(length)), drop_last=drop_last) == known


def test_a_stream_without_an_end():
    class Endless:
        def __iter__(self):
            yield from ({"number": n} for n in count())

    with Loader(
        StreamSource(Endless()), BatchSplit(samples=5), rank=0, ranks=1, cursor=BEGIN
    ) as loader:
        found = [batch.micros[0].data["number"].tolist() for batch in islice(loader, 3)]
    assert found == [list(range(n, n + 5)) for n in (0, 5, 10)]


def test_set_epoch_is_called_at_the_beginning_of_each_epoch():
    wanted = []
    for epoch in range(2):
        numbers = list(range(23))
        random.Random(epoch).shuffle(numbers)
        wanted += [numbers[at : at + 5] for at in range(0, 23, 5)]
    for length in (None, 23):
        assert batches(StreamSource(Shuffled(), length), 2) == wanted
        later = Cursor(seed=1, epoch=1, position=10)
        assert batches(StreamSource(Shuffled(), length), 2, later) == wanted[7:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [None, 40])
def test_a_stream_with_a_state_goes_on_without_reading_what_was_used(length, drop_last):
    wanted = batches(StreamSource(Counting(40), 40), 1)
    assert batches(StreamSource(Stateful(), length), 3, drop_last=drop_last) == wanted
    for step, after in enumerate(cursors(StreamSource(Stateful(), length)), 1):
        cursor = Cursor.from_dict(json.loads(json.dumps(after.to_dict())))
        within = cursor.epoch == 0 and cursor.position > 20
        assert (cursor.stream is not None) or not within
        stream = Stateful()
        found = batches(StreamSource(stream, length), 1, cursor, drop_last=drop_last)
        assert found == wanted[step:]
        if within:
            # Twice 16 samples, to compare.
            assert stream.read[0] == cursor.stream["place"] >= cursor.position - 36
            assert len(stream.read) == 40 - stream.read[0] + 40


def test_where_a_stream_ends_is_compared_in_the_step_that_uses_the_batch():
    said: list[str] = []
    options = {"rank": 0, "ranks": 2, "cursor": BEGIN, "epochs": 1}
    for in_step in (True, False):
        said.clear()
        with Loader(
            StreamSource(Counting(12)), BatchSplit(samples=5),
            agree=lambda what, _: said.append(what),
            in_step=in_step, **options,
        ) as loader:  # fmt: skip
            facts = [batch.fact for batch in loader]
        ends = ["end of Counting"] * 3
        assert said == ["first sample of Counting", *([] if in_step else ends)]
        assert [fact.numbers for fact in facts if fact] == [(5, 0), (5, 0), (2, 1)] * in_step


def state_at(cursor_position=30, stream=Stateful):
    found = cursors(StreamSource(stream()))
    (cursor,) = (c for c in found if (c.epoch, c.position) == (0, cursor_position))
    assert cursor.stream is not None
    return cursor


def test_a_state_off_by_one_is_noticed_and_the_stream_read_again(monkeypatch):
    monkeypatch.setattr(Stateful, "late", 1)
    cursor = state_at()
    monkeypatch.setattr(Stateful, "late", 0)
    wanted = batches(StreamSource(Counting(40), 40), 1)
    with pytest.warns(UserWarning, match="read again from the beginning"):
        assert batches(StreamSource(Stateful()), 1, cursor) == wanted[6:]


class Seeded(Stateful):
    """Its state is that of a generator, a tensor, as a part of a larger one."""

    def __init__(self, length=40):
        super().__init__(length)
        self.numbers = torch.Generator().manual_seed(3)

    def __deepcopy__(self, _):
        return type(self)(self.length)

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield {"number": int(torch.randint(1000, (), generator=self.numbers))}

    def state_dict(self):
        padded = torch.cat([self.numbers.get_state(), torch.zeros(10**6, dtype=torch.uint8)])
        return {"at": self.at, "parts": [(padded[: -(10**6)], 1)]}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.numbers.set_state(state["parts"][0][0])


def test_a_state_with_tensors_goes_through_a_checkpoint(recwarn):
    wanted = batches(StreamSource(Seeded()), 1, epochs=1)
    found = cursors(StreamSource(Seeded()))
    (cursor,) = (c for c in found if (c.epoch, c.position) == (0, 30))
    text = json.dumps(encode_facts(cursor.to_dict()))
    assert len(text) < 40_000  # the part, not all that it is a part of
    again = Cursor.from_dict(decode_facts(json.loads(text)))
    source = StreamSource(Seeded())
    assert batches(source, 1, again, epochs=1) == wanted[6:]
    assert not recwarn.list

    class Other(Seeded):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.numbers.manual_seed(4)

    with pytest.warns(UserWarning, match="goes on with other samples"):
        assert batches(StreamSource(Other()), 1, again, epochs=1) == wanted[6:]


@pytest.mark.parametrize("state", [{"torch.save": b"x"}, {"torch.save": torch.ones(2)}, 3, None])
def test_a_state_comes_back_as_it_was(state):
    found = _unpacked(decode_facts(encode_facts(_packed(state))))
    assert str(found) == str(state)


def test_what_a_shuffle_buffer_held_is_not_lost():
    wanted = batches(StreamSource(Buffering()), 1)
    cursor = state_at(stream=Buffering)
    with pytest.warns(UserWarning, match="shuffle buffer"):
        assert batches(StreamSource(Buffering()), 2, cursor) == wanted[6:]


def test_another_stream_than_that_of_the_checkpoint_is_refused():
    class Other(Counting):
        def __iter__(self):
            yield from ({"number": -number} for number in range(40))

    with pytest.raises(DataError, match="another sample"):
        batches(StreamSource(Other(), 40), 1, state_at())


def test_a_state_that_cannot_be_restored():
    class Forgetful(Stateful):
        def load_state_dict(self, state):
            raise KeyError("shard")

    with pytest.raises(DataError, match=r"(?s)cannot be restored.*KeyError") as caught:
        batches(StreamSource(Forgetful()), 1, state_at())
    assert caught.value.fix


class KeptGenerator:
    """Makes its generator once."""

    def __init__(self):
        self.samples = ({"number": n} for n in range(10))

    def __iter__(self):
        return self.samples


class Once(KeptGenerator):
    def __iter__(self):
        yield from self.samples


def first_batches(stream, drop_last=False):
    return lambda: batches(as_examples(stream()), 1, drop_last=drop_last)


def test_fingerprints_are_those_of_the_numbers():
    sample = {"x": torch.arange(6.0).view(2, 3), "y": [1, "a", None], "z": np.arange(3)}
    changed = {**sample, "x": sample["x"].double()}
    assert fingerprint(sample) == fingerprint(copy.deepcopy(sample))
    assert fingerprint(sample) != fingerprint(changed)
    assert fingerprint({**sample, "z": np.arange(3) + 1}) != fingerprint(sample)
    assert fingerprint([lambda: 0]) == fingerprint([lambda: 1]), "not compared, and no error"


def test_the_environment_says_that_there_is_one_process(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")

    class ByEnvironment(Counting):
        def __iter__(self):
            ranks = int(os.environ["WORLD_SIZE"])
            yield from ({"number": n} for n in range(int(os.environ["RANK"]), 23, ranks))

    assert batches(StreamSource(ByEnvironment()), 1) == batches(StreamSource(Counting()), 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (first_batches(lambda: Counting(0)), "no samples in epoch 0"),
        (first_batches(lambda: Counting(4), drop_last=True), "4 samples in epoch 0, less than one"),
        (first_batches(KeptGenerator), "only once"),
        (first_batches(Once), "no samples in epoch 1"),
        (lambda: len(as_examples(Counting())), "has no length"),
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


def test_steps_of_a_stream_without_a_length():
    recipe = loader_recipes.unbounded_samples()  # 77 samples
    assert recipe_epoch_length(recipe, training_data(recipe)) is None
    assert stop_steps(recipe, None) == 7
    assert steps_left(recipe, 52) == 3, "not 2: 25 samples"
    assert stop_steps(replace(recipe, stop=9), None) == 9
    with pytest.raises(RecipeError, match="length of an epoch is not known") as caught:
        stop_steps(replace(recipe, stop="2 epochs"), None)
    assert "steps or samples" in caught.value.fix
