"""single: the data cache: what comes out is what the source gives, whatever happens below."""

from __future__ import annotations

import copy
import os
import pickle
import random
import resource
import shutil
import struct
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import headway
from headway.data import (
    CacheWarning,
    Cursor,
    DatasetSource,
    Loader,
    MemmapSource,
    SeededSource,
    Source,
    as_source,
    cached,
)
from headway.data.cache import levels
from headway.data.cache.blob_store import HEADER, RECORD
from headway.data.cache.serialization import Decoder, encode
from headway.errors import DataError
from headway.plans import BatchSplit
from support.cache_counts import hit_rate, since

LENGTH = 40


class Pictures(Dataset):
    """Sample i is (picture, number, facts), made of i; counts its reads."""

    def __init__(self, length=LENGTH, factor=1.0):
        self.length, self.factor = length, factor
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads.append(index)
        generator = torch.Generator().manual_seed(index)
        picture = self.factor * torch.rand(5, 4, 3, generator=generator).permute(2, 0, 1)
        return picture, index, {"weight": np.float32(index / 7), "name": f"picture {index}"}


class Noisy(Pictures):
    """A picture with noise on it."""

    def __getitem__(self, index):
        return noise(super().__getitem__(index))


def noise(sample):
    """Draws from all three generators, in place."""
    picture, *rest = sample
    picture += torch.rand_like(picture) + np.random.rand() + random.random()
    return (picture, *rest)


def halved(sample):
    return (sample[0] / 2, *sample[1:])


def batches(examples, *, epochs=2, workers=0, seed=5, **options):
    """The data of all micro-batches of some epochs, of one rank of two."""
    split = BatchSplit(samples=16, microbatch=3)
    options = {"rank": 1, "ranks": 2, "cursor": Cursor(seed), "epochs": epochs} | options
    with Loader(as_source(examples), split, workers=workers, **options) as loader:
        return [copy.deepcopy(micro.data) for batch in loader for micro in batch.micros]


def whole(examples, epochs=2, **options):
    return batches(examples, epochs=epochs, rank=0, ranks=1, **options)


def same(one, other):
    """Types, bits and strides of two nestings are equal."""
    return encode(one).to_bytes() == encode(other).to_bytes()


def both(tmp_path, **options):
    return {"memory": "4 MiB", "disk": tmp_path / "cache", "disk_limit": "4 MiB"} | options


LEVELS = [
    {"memory": "4 MiB"},
    {"disk": "cache"},
    {"memory": "8 KiB", "disk": "cache"},
    {"memory": "8 KiB"},
    {"memory": "4 KiB", "disk": "cache", "disk_limit": "8 KiB"},
]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


# -- equality -----------------------------------------------------------------------------------


class TestEquality:
    @pytest.mark.parametrize("levels", LEVELS, ids=str)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_are_those_of_the_source(self, levels, workers):
        plain = batches(Pictures(), epochs=3)
        source = cached(Pictures(), "pictures", **levels)
        assert same(batches(source, epochs=3, workers=workers), plain)
        assert same(batches(source, epochs=3, workers=workers), plain)
        found = source.statistics()
        assert found.samples == 2 * sum(len(batch[1]) for batch in plain)
        assert hit_rate(found) > 0.1
        assert found.damaged == 0
        source.close()
        assert same(batches(source, epochs=1), batches(Pictures(), epochs=1))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_training_is_bit_for_bit_the_same(self, workers):
        data = TensorDataset(torch.randn(30, 4), torch.randn(30, 2))
        results = []
        for examples in (data, cached(data, "numbers", memory="20 KiB", disk="cache")):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loss = headway.criterion(nn.MSELoss())
            with headway.Executor(model, optimizer, loss=loss, batch=8, seed=3) as run:
                losses = [run.step(b) for b in run.batches(examples, epochs=4, workers=workers)]
            results.append((losses, [p.detach() for p in model.parameters()]))
        assert same(*results)

    def test_random_augmentation_belongs_to_the_sample_as_without_the_cache(self):
        plain = whole(Noisy(), epochs=3)
        for workers in (0, 2):
            source = cached(Pictures(), "pictures", memory="4 MiB", augment=noise)
            assert isinstance(source, SeededSource)
            assert same(whole(source, epochs=3, workers=workers), plain)
            source.close()
        assert not same(plain[0], plain[14]), "every epoch draws anew"
        state = torch.get_rng_state(), random.getstate()
        cached(Pictures(), "pictures", memory="4 MiB", augment=noise).read_seeded([1, 2], [3, 4])
        assert torch.equal(torch.get_rng_state(), state[0])
        assert random.getstate() == state[1]

    def test_what_a_user_does_to_a_sample_stays_with_him(self):
        source = cached(Pictures(), "pictures", memory="4 MiB")
        expected = Pictures()[3]
        for _ in range(3):
            sample = source[3]
            assert same(sample, expected)
            sample[0].zero_()
            sample[2]["name"] = "mine"

    def test_prepared_samples_are_kept(self):
        class Halved(Pictures):
            def __getitem__(self, index):
                return halved(super().__getitem__(index))

        calls = []

        def prepare(sample):
            calls.append(sample[1])
            return halved(sample)

        source = cached(Pictures(), "pictures", memory="4 MiB", prepare=prepare)
        assert same(whole(source, epochs=3), whole(Halved(), epochs=3))
        assert sorted(calls) == list(range(LENGTH))

    def test_own_collate_that_pads(self):
        class Ragged(Pictures):
            def __getitem__(self, index):
                return torch.arange(index % 7)

        def padded(samples):
            return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

        source = DatasetSource(Ragged(), collate=padded)
        plain = batches(source)
        assert same(batches(cached(source, "ragged", memory="1 MiB")), plain)
        assert same(batches(cached(Ragged(), "ragged", disk="c", collate=padded)), plain)

    def test_mapped_tokens_and_other_sources_with_rows(self, tmp_path):
        np.random.default_rng(0).integers(0, 99, 1000).astype("<u2").tofile(tmp_path / "tokens")
        tokens = MemmapSource(tmp_path / "tokens", window=9, dtype="uint16")
        source = cached(tokens, "tokens", memory="1 MiB", disk="cache")
        assert isinstance(source, Source)
        plain = batches(tokens, epochs=3)
        assert type(plain[0]) is tuple
        assert same(batches(source, epochs=3), plain)
        assert hit_rate(source.statistics()) == pytest.approx(0.5, abs=0.2)

        class Pictured:
            def __len__(self):
                return LENGTH

            def read(self, indices):
                rows = torch.stack([Pictures()[i][0] for i in indices])
                return {"picture": rows, "numbers": [torch.tensor(indices), np.array(indices)]}

        source = cached(Pictured(), "rows", memory="1 MiB")
        assert same(batches(source, epochs=3), batches(Pictured(), epochs=3))

    def test_a_torch_loader_takes_it_as_a_data_set(self):
        source = cached(Pictures(), "pictures", memory="1 MiB")
        for _ in range(2):
            plain, behind = (list(DataLoader(d, batch_size=7)) for d in (Pictures(), source))
            assert same(plain, behind)
        assert hit_rate(source.statistics()) == 0.5


# -- the format ---------------------------------------------------------------------------------

NUMBERS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=False)
    | st.none()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex128"]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    count = int(np.prod(shape, dtype=int))
    base = torch.arange(count).remainder(2 if draw(st.booleans()) else 100)
    kind = getattr(torch, draw(st.sampled_from(DTYPES)))
    tensor = base.to(kind).view([shape[i] for i in order])
    return tensor.permute([order.index(i) for i in range(len(shape))])


@st.composite
def arrays(draw):
    tensor = draw(tensors())
    if tensor.dtype is torch.bfloat16 or tensor.is_complex():
        tensor = tensor.real.float() if tensor.is_complex() else tensor.float()
    return tensor.numpy().astype(draw(st.sampled_from([">f8", "<i4", "u1", "?", "<U3"])), "K")


SAMPLES = st.recursive(
    NUMBERS | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def alike(one, other):
    """Deep equality of types, values, bits and strides, without the format's own help."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (one, other)]
        facts = [(t.dtype, t.shape, t.stride()) for t in (one, other)]
        return facts[0] == facts[1] and torch.equal(*bits)
    if isinstance(one, np.ndarray):
        facts = [(a.dtype.str, a.shape, a.size and a.strides, a.tobytes()) for a in (one, other)]
        return facts[0] == facts[1]
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[k], other[k]) for k in one)
    return repr(one) == repr(other)


class TestFormat:
    @settings(max_examples=300)
    @given(SAMPLES)
    def test_what_goes_in_comes_out(self, sample):
        stored = bytearray(encode(sample).to_bytes())
        assert len(stored) == encode(sample).size
        decoder = Decoder()
        assert alike(decoder.decode(memoryview(stored)), sample)
        assert alike(decoder.decode(memoryview(bytearray(stored))), sample)

    @pytest.mark.parametrize(
        "value",
        [
            np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("word"),
            np.datetime64("2020-02-02"), torch.rand(3).to(torch.float8_e4m3fn), 2**100, -0.0,
            float("inf"), "\ud800",
            torch.rand(3, 1, 2).permute(1, 0, 2), torch.rand(1, 4, 4).permute(1, 2, 0),
        ],
    )  # fmt: skip
    def test_special_values(self, value):
        back = Decoder().decode(memoryview(bytearray(encode([value]).to_bytes())))
        assert alike(back, [value])

    def test_views_come_out_dense_with_dimensions_in_the_same_order(self):
        picture = torch.rand(8, 8, 3).permute(2, 0, 1)[:, ::2, ::2]
        back = Decoder().decode(memoryview(bytearray(encode(picture).to_bytes())))
        assert torch.equal(back, picture)
        assert back.stride() == (1, 12, 3)
        line = torch.tensor([1.0, 2.0]).expand(3, 2)
        assert torch.equal(Decoder().decode(memoryview(bytearray(encode(line).to_bytes()))), line)
        assert encode(torch.rand(1000)[10:12]).size < 200
        back = Decoder().decode(memoryview(bytearray(encode(np.arange(6)[::-2]).to_bytes())))
        assert back.tolist() == [5, 3, 1]
        conjugate = torch.rand(3, dtype=torch.complex64).conj()
        back = Decoder().decode(memoryview(bytearray(encode(conjugate).to_bytes())))
        assert torch.equal(back, conjugate)

    @pytest.mark.parametrize("levels", [120, 5000])
    def test_what_no_decoder_would_read_is_not_stored(self, levels):
        deep = 1
        for _ in range(levels):
            deep = [deep]
        with pytest.raises(DataError, match="something too deep"):
            encode(deep).to_bytes()
        with pytest.raises(ValueError, match="nested more than"):
            Decoder().decode(memoryview(struct.pack("<I", 4000) + b"[" * 4000))

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (object(), "builtins.object"),
            (namedtuple("Pair", "a b")(1, 2), "Pair"),
            (np.array([None]), "array of object"),
            (np.zeros(2, [("a", "i4")]), "array of"),
            (torch.zeros(2).to_sparse(), "torch.sparse_coo tensor"),
            (nn.Parameter(torch.zeros(2)), "Parameter"),
            (torch.zeros(2, requires_grad=True), "requires a gradient"),
            (torch.zeros(2, device="meta"), "on meta"),
            ({(1, 2): 3}, r"the key \(1, 2\) of type tuple"),
            ({1, 2}, "builtins.set"),
        ],
        ids=lambda part: part if isinstance(part, str) else "",
    )
    def test_what_cannot_be_stored_is_named(self, value, what):
        class Odd(Pictures):
            def __getitem__(self, index):
                return {"a": [1, value]} if index == 9 else {"a": [1, 2]}

        source = cached(Odd(), "odd", memory="1 MiB", collate=lambda samples: len(samples))
        assert source.read([1, 2]) == 2
        with pytest.raises(DataError, match=what) as caught:
            source.read([8, 9])
        assert caught.value.where == "sample 9['a'][1]"
        assert "prepare" in caught.value.fix


# -- levels and limits --------------------------------------------------------------------------


class TestLevels:
    def test_every_sample_is_read_once(self, tmp_path):
        data = Pictures()
        source = cached(data, "pictures", **both(tmp_path))
        whole(source, epochs=1)
        assert sorted(data.reads) == list(range(LENGTH))
        first = source.statistics()
        assert (first.remote_samples, first.memory_stored, first.disk_stored) == (LENGTH,) * 3
        assert hit_rate(first) == 0
        whole(source, epochs=3)
        later = since(source.statistics(), first)
        assert (later.memory_samples, later.disk_samples) == (3 * LENGTH, 0)
        assert hit_rate(later) == 1
        assert later.memory_bytes == 3 * first.remote_bytes
        assert len(data.reads) == LENGTH

    def test_a_later_process_finds_the_disk_and_fills_memory_from_it(self, tmp_path):
        whole(cached(Pictures(), "pictures", **both(tmp_path)), epochs=1)
        data = Pictures()
        source = cached(data, "pictures", **both(tmp_path, version=1))
        whole(source, epochs=2)
        assert len(data.reads) == 1, "one sample is compared with the source"
        found = source.statistics()
        assert (found.disk_samples, found.memory_samples) == (LENGTH, LENGTH)
        assert found.memory_stored == LENGTH

    @pytest.mark.parametrize("level", ["memory", "disk"])
    def test_what_came_first_stays_and_hits_in_every_epoch(self, level, tmp_path):
        """The best that any rule can do: the samples held when an epoch begins."""
        size = cached(Pictures(), "p", memory="1 MiB")
        whole(size, epochs=1)
        limit = LENGTH * RECORD.size + size.statistics().remote_bytes // 2 + 20 * HEADER.size
        options = {"memory": limit} if level == "memory" else {"disk": "d", "disk_limit": limit}
        source = cached(Pictures(), "half", **options)
        whole(source, epochs=1)
        before = source.statistics()
        held = getattr(before, f"{level}_stored")
        assert 0.45 * LENGTH <= held <= 0.55 * LENGTH
        for _ in range(4):
            whole(source, epochs=1, seed=random.randrange(1000))
            now = source.statistics()
            assert hit_rate(since(now, before)) == pytest.approx(held / LENGTH)
            before = now
        assert before.not_stored > 0
        assert source._levels[0].size <= limit

    def test_a_large_sample_does_not_close_the_cache(self):
        class Uneven(Pictures):
            def __getitem__(self, index):
                return torch.zeros(10_000 if index == 0 else 4)

        source = cached(Uneven(), "uneven", memory="20 KiB", collate=len)
        for index in range(LENGTH):
            source.read([index])
        found = source.statistics()
        assert (found.memory_stored, found.not_stored) == (LENGTH - 1, 1)

    def test_the_limit_holds_for_the_directory_and_unused_stores_make_room(self, tmp_path):
        options = {"disk": tmp_path / "cache", "disk_limit": 24_000}

        def fill(name):
            source = cached(Pictures(), name, **options)
            whole(source, epochs=1)
            return source

        def stores():
            return sorted(p.name[:3] for p in (tmp_path / "cache").iterdir() if p.is_dir())

        old, kept = fill("old"), fill("used")
        used = sum(level.size for source in (old, kept) for level in source._levels)
        assert used <= 24_000
        assert stores() == ["old", "use"]
        (tmp_path / "cache" / "mine-0123456789abcdef").mkdir()
        (tmp_path / "cache" / "notes.txt").write_text("mine")
        old.close()
        new = fill("new")
        assert stores() == ["min", "new", "use"], "what a process uses, and what is not ours, stays"
        assert new.statistics().disk_stored > 5
        files = [f for f in (tmp_path / "cache").rglob("*") if f.name in ("data", "index")]
        assert 12_000 < sum(f.stat().st_size for f in files) <= 24_000
        kept.close()
        new.close()

    def test_stores_of_other_names_versions_and_lengths_are_apart(self, tmp_path):
        options = {"disk": tmp_path / "cache"}
        cached(Pictures(), "a", **options)
        cached(Pictures(), "a", **options)
        cached(Pictures(), "a", version=2, **options)
        cached(Pictures(41), "a", **options)
        cached(Pictures(), "a", prepare=halved, **options)
        cached(Pictures(), "a/b c", **options)
        assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 5

    def test_memory_is_shared_with_whoever_caches_the_same(self):
        one = cached(Pictures(), "pictures", memory="1 MiB")
        whole(one, epochs=1)
        data = Pictures()
        other = cached(data, "pictures", memory="1 MiB")
        whole(other, epochs=1)
        assert other.statistics().memory_samples == LENGTH
        assert len(data.reads) == 1
        by_value = pickle.loads(pickle.dumps(one))
        whole(by_value, epochs=1)
        assert by_value.statistics().memory_samples == LENGTH

    def test_memory_goes_with_the_last_process(self, tmp_path):
        source = cached(Pictures(), "pictures", memory="1 MiB")
        whole(source, epochs=1)
        source.close()
        data = Pictures()
        whole(cached(data, "pictures", memory="1 MiB"), epochs=1)
        assert len(data.reads) == LENGTH

    def test_explained(self, tmp_path):
        source = cached(Pictures(), "pictures", **both(tmp_path))
        whole(source, epochs=2)
        line = source.explain()
        assert line.startswith("data cache 'pictures' (memory ")
        assert "40 from memory" in line
        assert "40 from the source" in line
        facts = source.statistics().to_dict()
        assert facts["remote_samples"] == LENGTH
        assert set(facts) > {"saved_seconds", "damaged", "disk_bytes"}

    def test_saved_seconds_are_what_the_source_took(self, tmp_path):
        """The cost of a sample is stored with it, so that a restarted job knows it, too."""
        whole(cached(Pictures(), "pictures", **both(tmp_path)), epochs=1)
        source = cached(Pictures(), "pictures", **both(tmp_path))
        index = (tmp_path / "cache").rglob("data")
        stored = bytearray(next(iter(index)).read_bytes())
        cost = HEADER.unpack_from(stored)[4]
        assert 0 < cost < 10**9
        whole(source, epochs=1)
        assert -1 < source.statistics().saved_seconds < 1


# -- damage -------------------------------------------------------------------------------------


def stored(tmp_path, name="data"):
    (path,) = (tmp_path / "cache").rglob(name)
    return path


class TestDamage:
    @pytest.mark.parametrize("file", ["data", "index"])
    def test_any_damaged_byte_is_noticed(self, tmp_path, file):
        """Every byte of the index and some of the data, one at a time."""
        plain = [Pictures(4)[i] for i in range(4)]
        cached(Pictures(4), "pictures", disk="cache").samples([0, 1, 2, 3])
        sound = {name: stored(tmp_path, name).read_bytes() for name in ("data", "index")}
        silent = 0
        for place in range(0, len(sound[file]), 13 if file == "data" else 1):
            for name, content in sound.items():
                stored(tmp_path, name).write_bytes(content)
            broken = bytearray(sound[file])
            broken[place] ^= 0x10
            stored(tmp_path, file).write_bytes(broken)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                source = cached(Pictures(4), "pictures", disk="cache")
                assert same(source.samples([0, 1, 2, 3]), plain), place
                assert same(source.samples([0, 1, 2, 3]), plain), place
            found = source.statistics()
            assert found.damaged <= 1
            assert [w.category for w in caught] == [CacheWarning] * found.damaged
            assert found.disk_samples == 8 - found.damaged
            silent += not found.damaged
            source.close()
        assert silent == 0

    def test_a_damaged_sample_is_read_again_and_kept_again(self, tmp_path):
        whole(cached(Pictures(), "pictures", disk="cache"), epochs=1)
        path = stored(tmp_path)
        content = bytearray(path.read_bytes())
        for place in range(100, len(content), 400):
            content[place] ^= 1
        path.write_bytes(content)

        def again():
            source = cached(Pictures(), "pictures", disk="cache")
            assert same(whole(source, epochs=1), whole(Pictures(), epochs=1))
            return source

        with pytest.warns(CacheWarning, match="damaged and is read again") as caught:
            source = again()
        assert len(caught) == 1
        found = source.statistics()
        assert 10 < found.damaged <= LENGTH
        assert found.disk_stored == found.remote_samples == found.damaged
        assert same(whole(source, epochs=1), whole(Pictures(), epochs=1))
        assert source.statistics().damaged == found.damaged

    @pytest.mark.parametrize("size", [0, 1, 1000])
    @pytest.mark.parametrize("file", ["data", "index"])
    def test_files_cut_short(self, tmp_path, file, size):
        source = cached(Pictures(), "pictures", disk="cache")
        whole(source, epochs=1)
        os.truncate(stored(tmp_path, file), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            assert same(whole(source, epochs=2), whole(Pictures(), epochs=2))

    @pytest.mark.parametrize("what", ["cache", "store", "data", "index"])
    def test_deleted_at_any_time(self, tmp_path, what):
        data = Pictures()
        source = cached(data, "pictures", disk="cache")
        whole(source, epochs=1)
        if what == "cache":
            shutil.rmtree("cache")
        elif what == "store":
            shutil.rmtree(stored(tmp_path).parent)
        else:
            stored(tmp_path, what).unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error" if what != "data" else "ignore", CacheWarning)
            assert same(whole(source, epochs=2), whole(Pictures(), epochs=2))
        assert len(data.reads) == 2 * LENGTH
        assert source.statistics().disk_samples == LENGTH

    def test_a_directory_that_cannot_come_back_is_given_up(self, tmp_path):
        source = cached(Pictures(), "pictures", **both(tmp_path))
        whole(source, epochs=1)
        shutil.rmtree("cache")
        (tmp_path / "cache").write_text("not a directory")
        source._levels.pop(0)
        with pytest.warns(CacheWarning, match="disk is no longer used"):
            assert same(whole(source, epochs=2), whole(Pictures(), epochs=2))

    def test_changed_data_under_the_same_name(self, tmp_path):
        other = cached(Pictures(), "pictures", **both(tmp_path))
        whole(other, epochs=1)
        changed = Pictures(factor=2.0)
        with pytest.warns(CacheWarning, match="not what the source gives now") as caught:
            source = cached(changed, "pictures", **both(tmp_path))
        assert len(caught) == 2, "one for each level"
        assert "`version`" in str(caught[0].message)
        assert same(whole(source), whole(Pictures(factor=2.0)))
        assert same(whole(other), whole(Pictures())), "who still has the old data keeps them"

    def test_a_full_disk(self, tmp_path):
        source = cached(Pictures(), "pictures", disk="cache")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
        try:
            with pytest.warns(CacheWarning, match="no more samples are stored in disk") as caught:
                assert same(whole(source, epochs=3), whole(Pictures(), epochs=3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(caught) == 1
        found = source.statistics()
        assert 5 < found.disk_stored < LENGTH
        assert found.disk_samples == 2 * found.disk_stored

    def test_a_full_disk_in_the_middle_of_a_blob(self, tmp_path, monkeypatch):
        source = cached(Pictures(), "pictures", disk="cache")
        write, calls = os.pwritev, []

        def short(file, buffers, begin):
            calls.append(begin)
            if len(calls) < 10:
                return write(file, buffers, begin)
            return write(file, [b"".join(buffers)[:100]], begin)

        monkeypatch.setattr(os, "pwritev", short)
        monkeypatch.setattr(os, "pwrite", lambda file, data, begin: 0)
        with pytest.warns(CacheWarning, match="No space left on device"):
            assert same(whole(source, epochs=1), whole(Pictures(), epochs=1))
        monkeypatch.undo()
        assert same(whole(source, epochs=2), whole(Pictures(), epochs=2))

    def test_a_lock_that_is_never_released_costs_seconds_and_no_more(self, tmp_path, monkeypatch):
        import fcntl

        source = cached(Pictures(), "pictures", disk="cache")
        monkeypatch.setattr("headway.data.cache.blob_store.WAIT", 0.05)
        with open(tmp_path / "cache" / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert same(whole(source, epochs=1), whole(Pictures(), epochs=1))
        found = source.statistics()
        assert (found.disk_stored, found.not_stored) == (0, LENGTH)


# -- what is refused ----------------------------------------------------------------------------


class TestErrors:
    def test_random_samples(self):
        source = cached(Noisy(), "noisy", memory="1 MiB")
        state = torch.get_rng_state()
        with pytest.raises(DataError, match="draw random numbers") as caught:
            source.read([1])
        assert "augment" in caught.value.fix
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(DataError, match="draw random numbers"):
            cached(Pictures(), "p", memory="1 MiB", prepare=noise).read([1])

    def test_sources_that_take_seeds(self):
        inner = cached(Pictures(), "p", memory="1 MiB")
        with pytest.raises(DataError, match="a CachedSource cannot be cached"):
            cached(inner, "q", memory="1 MiB")

    def test_batches_whose_rows_are_no_samples(self):
        class Padded:
            def __len__(self):
                return 10

            def read(self, indices):
                return torch.nn.utils.rnn.pad_sequence([torch.ones(i + 1) for i in indices], True)

        class Transposed(Padded):
            def read(self, indices):
                return torch.ones(3, len(indices)).T

        class Total(Padded):
            def read(self, indices):
                return {"sum": torch.tensor(sum(indices))}

        class Words(Padded):
            def read(self, indices):
                return [str(i) for i in indices]

        for source, why in [
            (Padded(), "read alone is not its row"),
            (Transposed(), "strides other than"),
            (Total(), "counts the samples"),
            (Words(), "Rows can only be taken"),
        ]:
            with pytest.raises(DataError) as caught:
                cached(source, "s", memory="1 MiB")
            assert why in str(caught.value)

    def test_samples_that_cannot_be_read_prepared_or_joined(self):
        class Broken(Pictures):
            def __getitem__(self, index):
                return {}[index]

        with pytest.raises(DataError, match="sample 3 cannot be read"):
            cached(Broken(), "b", memory="1 MiB").read([3, 4])
        with pytest.raises(DataError, match="sample 3 cannot be prepared") as caught:
            cached(Pictures(), "p", memory="1 MiB", prepare=lambda s: s[7]).read([3, 4])
        assert caught.value.why.startswith("IndexError")

        class Ragged(Pictures):
            def __getitem__(self, index):
                return torch.zeros(index)

        with pytest.raises(DataError, match="samples 3, 4 do not fit into one batch"):
            cached(Ragged(), "r", memory="1 MiB").read([3, 4])

        class Unlucky:
            def __len__(self):
                return 10

            def read(self, indices):
                if indices == [4]:
                    raise OSError("link down")
                return torch.tensor(indices)

        source = cached(Unlucky(), "u", memory="1 MiB", prepare=lambda s: s)
        with pytest.raises(DataError, match="1 samples from number 4"):
            source.read([4])

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({}, "nowhere to keep samples"),
            ({"memory": "2 pounds"}, "memory of the data cache: '2 pounds' is not a size"),
            ({"disk": "c", "disk_limit": "x"}, "disk_limit of the data cache: 'x' is not a size"),
            ({"memory": 600}, "too small for its index"),
            ({"disk": "c", "disk_limit": 600}, "too small for its index"),
            ({"memory": "900 TiB"}, "larger than the memory of this machine"),
            ({"disk": "/proc/cache"}, "directory of the data cache cannot be used"),
        ],
        ids=str,
    )
    def test_levels_that_cannot_be(self, options, what):
        with pytest.raises(DataError) as caught:
            cached(Pictures(), "pictures", **options)
        assert what in str(caught.value)
        assert caught.value.fix or "size" in what

    def test_without_files_in_memory_the_level_is_left_out(self, monkeypatch):
        monkeypatch.delattr(os, "memfd_create")
        with pytest.warns(CacheWarning, match="no samples are kept in memory: this system has no"):
            source = cached(Pictures(), "pictures", memory="1 MiB", disk="cache")
        assert same(whole(source), whole(Pictures()))

    def test_notes_that_others_can_write_are_not_trusted(self, tmp_path):
        (tmp_path / f"headway-cache-{os.getuid()}").mkdir(mode=0o777)
        os.chmod(tmp_path / f"headway-cache-{os.getuid()}", 0o777)
        with pytest.warns(CacheWarning, match="others can read or write it"):
            cached(Pictures(), "pictures", memory="1 MiB", disk="cache")

    def test_a_link_in_the_place_of_the_notes_is_not_followed(self, tmp_path):
        (tmp_path / "mine").mkdir(mode=0o700)
        (tmp_path / f"headway-cache-{os.getuid()}").symlink_to(tmp_path / "mine")
        with pytest.warns(CacheWarning, match="is a link"):
            cached(Pictures(), "pictures", memory="1 MiB", disk="cache")
        assert list((tmp_path / "mine").iterdir()) == []

    @pytest.mark.parametrize("how", ["owner", "mode", "link", "pipe"])
    def test_a_note_of_somebody_else_is_not_read(self, tmp_path, monkeypatch, how):
        """It could lead to files in memory of theirs, and with them to their samples."""
        note = tmp_path / "note"
        note.write_text('{"pid": 1, "token": "x", "fds": [0, 1]}')
        monkeypatch.setattr(levels, "attach_memfds", lambda pid, token, files: [3, 4])
        assert levels._noted(note) == ("x", [3, 4])
        if how == "owner":
            own = os.getuid()
            monkeypatch.setattr("os.getuid", lambda: own + 1)
        elif how == "mode":
            note.chmod(0o666)
        elif how == "link":
            note = tmp_path / "link"
            note.symlink_to(tmp_path / "note")
        else:
            note.unlink()
            os.mkfifo(note)
        assert levels._noted(note) is None

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "[" * 4000, '{"pid": 1, "token": "x", "fds": [0, 1]}']
    )
    def test_a_note_that_leads_nowhere(self, tmp_path, text):
        source = cached(Pictures(), "pictures", memory="1 MiB")
        source.close()
        (note,) = (p for p in tmp_path.glob("headway-cache-*/*") if p.suffix != ".lock")
        note.write_text(text)
        again = cached(Pictures(), "pictures", memory="1 MiB")
        whole(again, epochs=1)
        assert again.statistics().memory_stored == LENGTH

    def test_default_collate_is_the_sources(self):
        samples = [Pictures()[i] for i in range(3)]
        assert same(
            cached(Pictures(), "p", memory="1 MiB").read([0, 1, 2]), default_collate(samples)
        )
