"""pure: the manifest, the facts, the cut into shares, the files, the conversion; without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint import convert as conversion
from headway.checkpoint.convert import from_safetensors, to_safetensors
from headway.checkpoint.directory import (
    begin,
    check_file,
    commit,
    committed_steps,
    newest,
    partial_path,
    read_manifest,
    retain,
    step_path,
    write_file,
)
from headway.checkpoint.format import (
    DTYPES,
    FileEntry,
    Manifest,
    StoredChunk,
    TensorEntry,
    build_header,
    decode_facts,
    encode_facts,
    read_header,
)
from headway.checkpoint.save_plan import WHOLE_BELOW, HeldTensorSpec, Holdings, partition_writes
from headway.cli.checkpoint import convert, show
from headway.errors import CheckpointDamaged, CheckpointError, UsageError
from support.patience import patient

FILE = "rank-00000.safetensors"


def test_the_modules_without_torch_import_no_torch():
    code = (
        "import sys, headway.checkpoint.convert, headway.checkpoint.save_plan;"
        "import headway.cli.checkpoint;"
        "sys.exit('torch' in sys.modules or 'pickle' in vars(headway.checkpoint.convert))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(60)).returncode == 0


# ---- facts ----------------------------------------------------------------------------------

FACTS = [
    {"epoch": 3, "lr": 0.1, "done": False, "none": None, "name": "ümlaut\n"},
    {"betas": (0.9, 0.999), "nested": ((1, [2, (3,)]), {})},
    {"milestones": Counter({30: 1, 80: 2}), "by_step": {1: "a", (2, 3): "b", None: "c"}},
    {"order": OrderedDict([("b", 1), ("a", 2)])},
    {"state": b"\x00\xff", "large": 2**200, "small": 5e-324, "negative zero": -0.0},
    {"$tuple": [1], "inner": {"$float": "nan"}, "$": 1},
    {"inf": math.inf, "minus": -math.inf, "deep": [math.inf, (math.inf,)]},
]


def _types(value):
    """Value with every type spelt out: `(1,) == (1,)` but `True == 1` and `Counter() == {}` too."""
    if isinstance(value, dict):
        return (type(value), [(_types(k), _types(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [_types(item) for item in value])
    return (type(value), repr(value))


@pytest.mark.parametrize("facts", FACTS)
def test_facts_survive_json_with_their_types(facts):
    text = json.dumps(encode_facts(facts), allow_nan=False)
    assert _types(decode_facts(json.loads(text))) == _types(facts)


def test_nan_survives():
    assert math.isnan(
        decode_facts(json.loads(json.dumps(encode_facts({"loss": math.nan}))))["loss"]
    )


def test_a_float_of_numpy_becomes_a_float():
    assert _types(decode_facts(encode_facts([np.float64(0.1)]))) == _types([0.1])


_leaves = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats()
_keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$x", "a"]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(_values)
def test_any_nesting_of_plain_values_survives(value):
    assert _types(
        decode_facts(json.loads(json.dumps(encode_facts(value), allow_nan=False)))
    ) == _types(value)


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({"scheduler": {"lambdas": [1, len]}}, "facts.scheduler.lambdas[1]"),
        ({"x": {2: {1, 2}}}, "facts.x[2]"),
        ({"x": np.int64(3)}, "facts.x"),
        ({"x": (1, np.zeros(2))}, "facts.x[1]"),
        ({"x": {frozenset(): 1}}, "facts.x key frozenset()"),
    ],
)
def test_other_values_are_refused_with_their_path(facts, path):
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        encode_facts(facts)
    assert caught.value.where == path


@pytest.mark.parametrize("broken", [{"$tuple": 3}, {"$pickle": "gASV"}, {"$counter": [[1]]}])
def test_malformed_tags_are_damage(broken):
    with pytest.raises(CheckpointDamaged):
        decode_facts(broken)


# ---- manifest -------------------------------------------------------------------------------


def _chunk(offsets=(0, 0), shape=(2, 3), start=8, length=24, file=FILE) -> StoredChunk:
    return StoredChunk(offsets=offsets, shape=shape, file=file, start=start, bytes=length)


def _manifest(**changes) -> Manifest:
    entry = TensorEntry(dtype="float32", shape=(2, 3), chunks=(_chunk(),))
    plain = Manifest(
        step=50,
        facts={"seed": 1, "betas": (0.9, 0.99)},
        tensors={"model.w": entry},
        files={FILE: FileEntry(bytes=32, crc32=7)},
    )
    return dataclasses.replace(plain, **changes)


def _with_chunks(*chunks: StoredChunk, dtype="float32") -> Manifest:
    entry = TensorEntry(dtype=dtype, shape=(2, 3), chunks=chunks)
    return _manifest(tensors={"model.w": entry})


def test_a_manifest_survives_json():
    manifest = _manifest()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.bytes == 24


def test_no_changed_character_goes_unnoticed():
    manifest = _manifest()
    text = manifest.to_json()
    for position, character in enumerate(text):
        for other in ("0", "9", "x", '"', " "):
            if other == character:
                continue
            try:
                found = Manifest.from_json(text[:position] + other + text[position + 1 :])
            except CheckpointError:
                continue
            assert found == manifest, (position, other)  # white space, or 1.0 for 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\x00\x01", '{"format": 1}'])
def test_garbage_is_damage(text):
    with pytest.raises(CheckpointDamaged):
        Manifest.from_json(text)


def test_an_unknown_format_is_not_called_damage():
    text = _manifest().to_json().replace('"format": 1', '"format": 2')
    with pytest.raises(CheckpointError, match="format 2 is unknown") as caught:
        Manifest.from_json(text)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert "reads format 1" in caught.value.why


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (_with_chunks(_chunk(file="other")), "not listed"),
        (_with_chunks(_chunk(start=9)), "not inside"),
        (_with_chunks(_chunk(start=-1)), "not inside"),
        (_with_chunks(_chunk(length=20)), "does not fit"),
        (_with_chunks(_chunk(offsets=(1, 0))), "does not fit"),
        (_with_chunks(_chunk(offsets=(-1, 0))), "does not fit"),
        (_with_chunks(_chunk(offsets=(0,), shape=(6,))), "does not fit"),
        (_with_chunks(_chunk(shape=(1, 3), length=12)), "3 of 6 elements"),
        (_with_chunks(), "0 of 6 elements"),
        (_with_chunks(_chunk(shape=(1, 3), length=12), _chunk(shape=(1, 3), length=12)), "same"),
        (_with_chunks(_chunk(), dtype="float12"), "unknown element type float12"),
        (_manifest(tensors={}, files={"../x": FileEntry(bytes=1, crc32=0)}), "plain file name"),
        (_manifest(tensors={}, files={"": FileEntry(bytes=1, crc32=0)}), "plain file name"),
    ],
)
def test_contradictions_are_named(manifest, problem):
    with pytest.raises(CheckpointDamaged, match="contradicts itself") as caught:
        Manifest.from_json(manifest.to_json())
    assert problem in caught.value.why


def test_at_most_ten_contradictions_are_listed():
    entry = TensorEntry(dtype="float32", shape=(2, 3), chunks=())
    with pytest.raises(CheckpointDamaged) as caught:
        _manifest(tensors={f"t{i}": entry for i in range(15)}).check()
    assert caught.value.why.count("elements") == 10
    assert "... and 5 more" in caught.value.why


# ---- shares ---------------------------------------------------------------------------------

_specs = st.dictionaries(
    st.text(max_size=3),
    st.builds(
        HeldTensorSpec,
        st.sampled_from(["float32", "float64", "bool", "bfloat16"]),
        st.lists(st.integers(0, 900), max_size=3).map(tuple),
    ),
    max_size=12,
)


@given(_specs, st.integers(1, 7))
def test_shares_cover_everything_once_and_are_balanced(specs, ranks):
    shares = partition_writes(Holdings.everywhere(specs, ranks), ranks)
    assert len(shares) == ranks
    for name, spec in specs.items():
        pieces = sorted(
            (p for share in shares for p in share if p.name == name), key=lambda p: p.first
        )
        rows = spec.shape[0] if spec.shape else 1
        assert pieces[0].first == 0
        assert pieces[-1].stop == rows
        assert [p.stop for p in pieces[:-1]] == [p.first for p in pieces[1:]]
        assert sum(p.bytes for p in pieces) == spec.bytes
    for share in shares:
        assert len({p.name for p in share}) == len(share)
        sizes = [DTYPES[p.spec.dtype][1] for p in share]
        assert sizes == sorted(sizes, reverse=True)
    total = sum(spec.bytes for spec in specs.values())
    rows = [s.bytes // s.shape[0] for s in specs.values() if s.shape and s.shape[0]]
    slack = max([WHOLE_BELOW, *rows])  # half of it at either end of a share
    for share in shares:
        assert abs(sum(p.bytes for p in share) - total / ranks) <= slack + ranks


def test_one_large_tensor_is_cut_by_rows():
    specs = {"w": HeldTensorSpec("float32", (1001, 1000)), "b": HeldTensorSpec("float32", ())}
    shares = partition_writes(Holdings.everywhere(specs, 2), 2)
    parts = {p.offsets: p.shape for share in shares for p in share if p.name == "w"}
    assert parts == {(0, 0): (500, 1000), (500, 0): (501, 1000)}


def test_the_cut_does_not_depend_on_the_order_of_the_names():
    specs = {f"t{i}": HeldTensorSpec("float32", (300, 300 + i)) for i in range(9)}
    backwards = dict(reversed(specs.items()))
    assert partition_writes(Holdings.everywhere(specs, 4), 4) == partition_writes(
        Holdings.everywhere(backwards, 4), 4
    )


@given(_specs, st.integers(1, 5), st.randoms(use_true_random=False))
def test_shares_are_of_what_a_rank_holds(specs, ranks, random):
    found = [{} for _ in range(ranks)]
    for name, spec in specs.items():
        for rank in random.sample(range(ranks), random.randint(1, ranks)):
            found[rank][name] = spec
    holdings = Holdings.of(found)
    assert holdings.specs == specs
    shares = partition_writes(holdings, ranks)
    assert all(piece.name in found[rank] for rank in range(ranks) for piece in shares[rank])
    for name, spec in specs.items():
        pieces = [p for share in shares for p in share if p.name == name]
        rows = [row for p in pieces for row in range(p.first, p.stop)]
        assert sorted(rows) == list(range(spec.shape[0] if spec.shape else 1))


def test_holders_of_much_write_less_of_what_all_have():
    """8, 4, 0 and 4 MB of their own and 12 MB that three have: 8 MB for each but the last."""
    row = HeldTensorSpec("float32", (1, 250_000))
    large, half = HeldTensorSpec("float32", (8, 250_000)), HeldTensorSpec("float32", (4, 250_000))
    common = {f"all.{n:02}": row for n in range(12)}
    found = [{"a": large, **common}, {"b": half, **common}, common, {"d": half}]
    shares = partition_writes(Holdings.of(found), 4)
    assert [sum(p.bytes for p in share) for share in shares] == [8e6, 8e6, 8e6, 4e6]


def test_ranks_must_have_the_same_tensor_under_a_name():
    found = [{"w": HeldTensorSpec("float32", (3,))}, {}, {"w": HeldTensorSpec("float32", (4,))}]
    with pytest.raises(CheckpointError, match=r"tensor w[\s\S]*on rank 0[\s\S]*on 2"):
        Holdings.of(found)


# ---- header ---------------------------------------------------------------------------------


def test_a_header_is_one_that_the_safetensors_package_reads(tmp_path: Path):
    arrays = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array(True)}
    rows = [(k, str(v.dtype), v.shape) for k, v in arrays.items()]
    head, stored = build_header(rows, {"format": "pt"})
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + b"".join(v.tobytes() for v in arrays.values()))
    loaded = safetensors.numpy.load_file(path)
    assert {k: (v.dtype, v.tolist()) for k, v in loaded.items()} == {
        k: (v.dtype, v.tolist()) for k, v in arrays.items()
    }
    assert len(head) % 8 == 0
    assert read_header(path) == (stored, {"format": "pt"})


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="two tensors are named 'a'"):
        build_header([("a", "bool", ()), ("a", "bool", ())], {})


@pytest.mark.parametrize("cut_to", [0, 5, 8, 40, -1])
def test_a_cut_safetensors_file_is_damage(tmp_path: Path, cut_to: int):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(9), "b": np.ones(2)}, path)
    path.write_bytes(path.read_bytes()[:cut_to])
    with pytest.raises(CheckpointDamaged):
        read_header(path)


# ---- directory ------------------------------------------------------------------------------


def _commit(directory: Path, step: int, content: bytes = b"0123456789abcdef" * 2) -> Path:
    entry = write_file(begin(directory, step) / FILE, [memoryview(content)])
    return commit(directory, _manifest(step=step, files={FILE: entry}))


def test_only_committed_directories_count(tmp_path: Path):
    assert committed_steps(tmp_path / "none") == []
    _commit(tmp_path, 50)
    _commit(tmp_path, 7)
    begin(tmp_path, 60)
    (tmp_path / "step-00000070.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert committed_steps(tmp_path) == [7, 50]
    assert newest(tmp_path) == step_path(tmp_path, 50)


def test_left_overs_go_and_nothing_else_does(tmp_path: Path):
    _commit(tmp_path, 5)
    for name in ("step-00000009.partial", "step-00000003.removed.partial", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    begin(tmp_path, 10)
    assert sorted(os.listdir(tmp_path)) == [
        "mine.partial",
        "step-00000005",
        "step-00000010.partial",
    ]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path):
    _commit(tmp_path, 5, bytes(32))
    _commit(tmp_path, 5)
    path = step_path(tmp_path, 5)
    check_file(path / FILE, read_manifest(path).files[FILE])
    assert (path / FILE).read_bytes() != bytes(32)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_retention_counts_sound_ones_up_to_the_step_just_written(tmp_path: Path):
    for step in (10, 20, 30, 40, 50):
        _commit(tmp_path, step)
    retain(tmp_path, 40, keep=2, damaged=[30, 50])
    assert committed_steps(tmp_path) == [20, 40]
    retain(tmp_path, 40, keep=1, damaged=[40])  # what was just written is sound
    assert committed_steps(tmp_path) == [40]


def test_a_newer_sound_checkpoint_is_never_deleted(tmp_path: Path):
    for step in (10, 20, 30):
        _commit(tmp_path, step)
    retain(tmp_path, 20, keep=1)
    assert committed_steps(tmp_path) == [20, 30]


def test_damage_to_a_file_is_named_with_numbers(tmp_path: Path):
    path = _commit(tmp_path, 1) / FILE
    entry = read_manifest(path.parent).files[FILE]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointDamaged, match="31 bytes; the manifest says 32"):
        check_file(path, entry)
    path.write_bytes(content[:9] + b"X" + content[10:])
    with pytest.raises(CheckpointDamaged, match="wrong checksum"):
        check_file(path, entry)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        check_file(path, entry)


# ---- conversion and the commands ------------------------------------------------------------


def _boxes(array: np.ndarray, borders: list[list[int]]):
    """All boxes between the borders of each dimension, with their offsets."""
    import itertools

    spans = [list(itertools.pairwise(edges)) for edges in borders]
    for box in itertools.product(*spans):
        yield tuple(a for a, _ in box), array[tuple(slice(a, b) for a, b in box)]


def _write(directory: Path, arrays: dict[str, tuple[np.ndarray, list[list[int]]]]) -> None:
    """A checkpoint whose tensors are cut into boxes that lie in two files."""
    partial = begin(directory, 3)
    content: dict[str, bytes] = {"a.bin": b"", "b.bin": b"pad"}
    tensors = {}
    for name, (array, borders) in arrays.items():
        chunks = []
        for number, (offsets, box) in enumerate(_boxes(array, borders)):
            file = "ab"[number % 2] + ".bin"
            data = box.tobytes()
            chunks.append(_chunk(offsets, box.shape, len(content[file]), len(data), file))
            content[file] += data
        tensors[name] = TensorEntry(dtype=str(array.dtype), shape=array.shape, chunks=tuple(chunks))
    files = {n: write_file(partial / n, [memoryview(data)]) for n, data in content.items()}
    commit(directory, Manifest(step=3, facts={"epoch": 1}, tensors=tensors, files=files))


def _sharded(directory: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    cube = generator.integers(0, 1000, (4, 5, 6), dtype=np.int16)
    table = generator.normal(size=(7, 3))
    _write(
        directory,
        {
            "model.cube": (cube, [[0, 1, 4], [0, 5], [0, 2, 6]]),
            "model.table": (table, [[0, 3, 7], [0, 3]]),
            "model.flag": (np.array(True), []),
            "model.empty": (np.zeros((0, 3), dtype=np.float32), [[0, 0], [0, 3]]),
            "optimizer.table.exp_avg": (table, [[0, 7], [0, 3]]),
        },
    )
    return {"cube": cube, "table": table, "flag": np.array(True), "empty": np.zeros((0, 3), "f4")}


def test_boxes_in_several_files_become_whole_tensors(tmp_path: Path):
    arrays = _sharded(tmp_path / "run" / "checkpoints")
    done = to_safetensors(tmp_path / "run", tmp_path / "m.safetensors")
    loaded = safetensors.numpy.load_file(done.path)
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    assert (done.tensors, done.bytes) == (4, sum(a.nbytes for a in arrays.values()))
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "run"]


def test_a_destination_in_a_missing_directory_is_said(tmp_path: Path):
    _sharded(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="its directory does not exist"):
        to_safetensors(tmp_path / "run", tmp_path / "none" / "m.safetensors")


def test_rows_that_lie_together_are_written_together(tmp_path: Path, monkeypatch):
    column, square = np.arange(6000.0).reshape(3000, 2, 1), np.ones((10, 10))
    _write(
        tmp_path,
        {
            "model.column": (column, [[0, 1000, 3000], [0, 2], [0, 1]]),
            "model.square": (square, [[0, 10], [0, 5, 10]]),
        },
    )
    writes = []
    real = conversion._write_at
    monkeypatch.setattr(
        conversion, "_write_at", lambda *place: (writes.append(len(place[1])), real(*place))
    )
    done = to_safetensors(tmp_path, tmp_path / "m.safetensors")
    assert writes == [16000, 32000] + [40] * 20
    assert np.array_equal(safetensors.numpy.load_file(done.path)["column"], column)


def test_safetensors_in_and_out_again_is_the_same_content(tmp_path: Path):
    arrays = {"w": np.arange(12.0).reshape(3, 4), "n.b": np.array([], np.int8), "s": np.int64(4)}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "in.safetensors")
    from_safetensors(tmp_path / "in.safetensors", tmp_path / "checkpoints")
    manifest = read_manifest(newest(tmp_path / "checkpoints"))
    assert sorted(manifest.tensors) == ["model.n.b", "model.s", "model.w"]
    assert manifest.step == 0
    to_safetensors(tmp_path / "checkpoints", tmp_path / "out.safetensors")
    loaded = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in loaded.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in arrays.items()
    }


def test_conversion_takes_constant_memory(tmp_path: Path):
    array = np.arange(8 * 2**20, dtype=np.float64).reshape(-1, 2**10)  # 64 MiB
    safetensors.numpy.save_file({"w": array}, tmp_path / "in.safetensors")
    want = array[-1].tobytes()
    del array
    tracemalloc.start()
    try:
        from_safetensors(tmp_path / "in.safetensors", tmp_path / "c")
        to_safetensors(tmp_path / "c", tmp_path / "out.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    assert (tmp_path / "out.safetensors").read_bytes().endswith(want)


def test_nothing_is_converted_from_a_damaged_checkpoint(tmp_path: Path):
    _sharded(tmp_path)
    path = newest(tmp_path) / "a.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="wrong checksum"):
        to_safetensors(tmp_path, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_conversion_overwrites_nothing(tmp_path: Path):
    _sharded(tmp_path / "c")
    (tmp_path / "m.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        to_safetensors(tmp_path / "c", tmp_path / "m.safetensors")
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="exists already"):
        from_safetensors(tmp_path / "in.safetensors", tmp_path / "c")
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_a_checkpoint_without_a_model_is_not_converted(tmp_path: Path):
    _write(tmp_path, {"optimizer.x": (np.ones(2), [[0, 2]])})
    with pytest.raises(CheckpointError, match="no tensor whose name begins with"):
        to_safetensors(tmp_path, tmp_path / "m.safetensors")


def test_show_lists_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _sharded(tmp_path / "checkpoints")
    assert show(tmp_path) == 0
    text = capsys.readouterr().out
    assert "step-00000003  sound  " in text
    assert "5 tensors in 2 files" in text
    assert "step-00000003: epoch" in text
    assert "model.cube               int16[4, 5, 6]  240 B  a.bin, b.bin" in text
    assert show(newest(tmp_path), verify=False, json=True) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["tensors"]["model.cube"] == {"dtype": "int16", "shape": [4, 5, 6]}


def test_show_names_damage_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _commit(tmp_path, 1)
    path = _commit(tmp_path, 2) / "manifest.json"
    path.write_text(path.read_text()[:-10])
    assert show(tmp_path) == 3
    text = capsys.readouterr().out
    assert "step-00000001  sound" in text
    assert "step-00000002  DAMAGED" in text
    assert "the manifest is not JSON" in text


def test_show_and_convert_explain_a_wrong_path(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        show(tmp_path)
    with pytest.raises(UsageError, match="must be a safetensors file"):
        convert(tmp_path, tmp_path / "m.pt")


def test_convert_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _sharded(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "d")
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"{tmp_path / 'm.safetensors'}: 4 tensors, 409 B",
        f"{step_path(tmp_path / 'd', 0)}: 4 tensors, 409 B",
    ]
    assert not partial_path(tmp_path / "d", 0).exists()
