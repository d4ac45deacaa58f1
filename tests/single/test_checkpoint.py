"""single: saving in the background, restoring bit for bit, and every kind of damage; one rank."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from headway.checkpoint import directory as disk
from headway.checkpoint import storage
from headway.checkpoint.directory import partial_path, read_manifest, step_path
from headway.checkpoint.staging import StagingBuffer
from headway.checkpoint.store import CheckpointStore, CheckpointWarning
from headway.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from support.commands import environment, warm_variables
from support.patience import patient

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
FILE = "rank-00000.safetensors"


def _store(path: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(path, rank=0, ranks=1, group=None, keep=keep)


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(30, 20, generator=generator),
        "model.bias": torch.randn(20, generator=generator, dtype=torch.float64),
        "optimizer.step": torch.tensor(float(seed)),
    }


def _save(store: CheckpointStore, step: int) -> None:
    """A checkpoint whose content tells its step."""
    store.save(step, _tensors(step), {"step": step})
    store.wait()


def test_a_late_save_is_begun_after_a_later_step_and_holds_what_was_there(tmp_path):
    store = CheckpointStore(tmp_path, rank=0, ranks=1, group=None, late=True)
    tensors = _tensors(1)
    store.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()  # as the next step would
    store.check()
    assert store.steps() == []
    store.check()
    store.wait()
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    assert store.restore(lambda _: found).step == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in _tensors(1).items())


def _restored(store: CheckpointStore) -> tuple[int, dict[str, torch.Tensor]] | None:
    tensors = {name: torch.full_like(t, 7) for name, t in _tensors().items()}
    manifest = store.restore(lambda _: tensors)
    return None if manifest is None else (manifest.step, tensors)


def _assert_restores(store: CheckpointStore, step: int) -> None:
    found = _restored(store)
    assert found is not None
    assert found[0] == step
    _assert_same(found[1], _tensors(step))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert _bits(found[name]) == _bits(tensor), name


# ---- what goes in comes out -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    def noise(*shape: int) -> torch.Tensor:  # any bits: NaNs with payloads, denormals, -0.0
        size = torch.empty(0, dtype=dtype).element_size()
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    tensors = {"matrix": noise(13, 7), "scalar": noise(1)[0], "empty": noise(0, 3), "row": noise(1)}
    with_store = _store(tmp_path)
    with_store.save(1, tensors, {})
    with_store.wait()
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    manifest = with_store.restore(lambda _: found)
    assert manifest is not None
    assert manifest.tensors["matrix"].dtype == str(dtype).removeprefix("torch.")
    _assert_same(found, tensors)


def test_strides_views_and_parameters_are_saved_by_value(tmp_path: Path):
    base = torch.arange(24.0).reshape(4, 6)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "shifted": base.reshape(-1)[5:11],
        "parameter": nn.Parameter(torch.randn(3)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "image": image,
    }
    store = _store(tmp_path)
    store.save(1, tensors, {})
    store.wait()
    found = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    store.restore(lambda _: found)
    _assert_same(found, {n: t.detach().resolve_conj() for n, t in tensors.items()})


def test_destinations_may_be_views_and_parameters(tmp_path: Path):
    matrix, row, scalar = torch.randn(6, 5), torch.randn(5), torch.tensor(2.5)
    store = _store(tmp_path)
    store.save(1, {"matrix": matrix, "row": row, "scalar": scalar}, {})
    store.wait()
    base, parameter = torch.zeros(5, 6), nn.Parameter(torch.zeros(5))
    wide = torch.zeros(3)
    store.restore(lambda _: {"matrix": base.t(), "row": parameter, "scalar": wide[1]})
    assert torch.equal(base, matrix.t())
    assert torch.equal(parameter, row)
    assert wide.tolist() == [0, 2.5, 0]


def test_some_of_the_tensors_may_be_asked_for(tmp_path: Path):
    store = _store(tmp_path)
    _save(store, 1)
    bias = torch.zeros(20, dtype=torch.float64)
    store.restore(lambda _: {"model.bias": bias})
    assert torch.equal(bias, _tensors(1)["model.bias"])


def test_facts_come_back(tmp_path: Path):
    facts = {"milestones": Counter({3: 1}), "betas": (0.9, 0.99), "cursor": {"epoch": 2}}
    store = _store(tmp_path)
    store.save(1, _tensors(), facts)
    facts["betas"] = "changed while the save was running"
    store.wait()
    manifest = store.restore(lambda _: {})
    assert manifest is not None
    assert manifest.facts == {
        "milestones": Counter({3: 1}), "betas": (0.9, 0.99), "cursor": {"epoch": 2}
    }  # fmt: skip
    assert type(manifest.facts["milestones"]) is Counter


def test_the_data_file_is_read_by_the_safetensors_package(tmp_path: Path):
    store = _store(tmp_path)
    _save(store, 4)
    _assert_same(safetensors.torch.load_file(step_path(tmp_path, 4) / FILE), _tensors(4))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = _store(tmp_path)
    _save(store, 1)

    def forbidden(*arguments: object, **named: object) -> None:
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, forbidden)
    _assert_restores(store, 1)
    _save(store, 2)
    _assert_restores(store, 2)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"model.weight": torch.zeros(30, 21)}, "saved float32 [30, 20], here float32 [30, 21]"),
        ({"model.bias": torch.zeros(20)}, "saved float64 [20], here float32 [20]"),
        ({"model.other": torch.zeros(())}, "missing in the checkpoint: model.other"),
    ],
)
def test_another_model_is_a_mismatch_and_nothing_is_filled(tmp_path: Path, wanted, text: str):
    store = _store(tmp_path)
    _save(store, 1)
    fine = torch.zeros(())
    with pytest.raises(CheckpointMismatch, match="another model") as caught:
        store.restore(lambda _: {"optimizer.step": fine, **wanted})
    assert text in caught.value.why
    assert fine.item() == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)],
    ids=["coo", "c128"],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, tensor: torch.Tensor):
    store = _store(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor model\.odd: cannot be stored"):
        store.save(1, {"model.odd": tensor}, {})
    with pytest.raises(CheckpointError, match=r"facts\.hook: cannot be stored"):
        store.save(1, {}, {"hook": print})
    assert store.steps() == []


# ---- in the background ----------------------------------------------------------------------


@contextmanager
def _held(monkeypatch: pytest.MonkeyPatch):
    """Writing waits until the event is set."""
    gate = threading.Event()
    real = disk.write_file

    def slow(path: Path, blocks):
        assert gate.wait(30)
        return real(path, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_file", slow)
        try:
            yield gate
        finally:
            gate.set()


def test_training_may_go_on_and_change_the_tensors(tmp_path: Path, monkeypatch):
    store = _store(tmp_path)
    tensors = _tensors(1)
    with _held(monkeypatch) as gate:
        receipt = store.save(1, tensors, {})
        for tensor in tensors.values():
            tensor.zero_()
        store.check()  # still running: says nothing and does not wait
        assert store.steps() == []
        gate.set()
        store.wait()
    assert receipt.step == 1
    assert receipt.bytes == 30 * 20 * 4 + 20 * 8 + 4
    assert 0 < receipt.held_seconds < 5
    _assert_restores(store, 1)


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch):
    store = _store(tmp_path)
    with _held(monkeypatch) as gate:
        store.save(1, _tensors(1), {})
        threading.Timer(0.3, gate.set).start()
        receipt = store.save(2, _tensors(2), {})
        assert store.steps() == [1]
        store.wait()
    assert receipt.held_seconds > 0.2
    assert store.steps() == [1, 2]


def test_no_thread_is_left_and_close_waits(tmp_path: Path):
    store = _store(tmp_path)
    store.save(1, _tensors(1), {})
    store.close()
    assert store.steps() == [1]
    assert [t.name for t in threading.enumerate() if "headway" in t.name] == []


def test_the_staging_memory_is_used_again(tmp_path: Path):
    staging = StagingBuffer()
    store = _store(tmp_path)
    store._staging = staging
    tensors = _tensors(1)
    store.reserve(tensors)
    store.wait()
    place = staging._buffer.data_ptr()
    assert staging._buffer.numel() == sum(t.nbytes for t in tensors.values())
    for step in (1, 2, 3):
        _save(store, step)
        assert staging._buffer.data_ptr() == place
    _assert_restores(store, 3)
    store.close()
    assert staging._buffer.numel() == 0


@pytest.mark.slow
def test_torch_checkpoint_is_imported_on_the_background_thread(tmp_path: Path):
    code = f"""
import sys, threading, time, torch
from pathlib import Path
from headway.checkpoint.store import CheckpointStore
name = "torch.distributed.checkpoint"
class Spy:
    thread = None
    def find_spec(self, module, path, target=None):
        if module == name:
            Spy.thread = threading.current_thread().name
sys.meta_path.insert(0, Spy())
store = CheckpointStore(Path({str(tmp_path)!r}), rank=0, ranks=1, group=None)
receipt = store.save(1, {{"w": torch.ones(9)}}, {{}})
store.close()
assert Spy.thread == "headway-checkpoint", Spy.thread
assert store.steps() == [1]
print(receipt.held_seconds)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_interpreter_is_free_while_a_large_file_is_written(tmp_path: Path):
    block = memoryview(bytearray(256 * 2**20))
    gaps = []
    thread = threading.Thread(target=disk.write_file, args=(tmp_path / "x", [block]))
    thread.start()
    last = time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    thread.join()
    total = sum(gaps)
    assert len(gaps) > 6, total  # holding the GIL for the whole write would give two or three
    assert sorted(gaps)[len(gaps) // 2] < total / 4


# ---- damage ---------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 0x10
    path.write_bytes(content)


DAMAGES = {
    "truncated": (lambda p: os.truncate(p / FILE, 100), "has the wrong size"),
    "longer": (
        lambda p: (p / FILE).write_bytes((p / FILE).read_bytes() + b"x"),
        "has the wrong size",
    ),
    "flipped": (lambda p: _flip(p / FILE), "has the wrong checksum"),
    "no file": (lambda p: (p / FILE).unlink(), "cannot be read"),
    "garbage": (lambda p: (p / "manifest.json").write_bytes(b"\xff\x00{"), "cannot be read"),
    "not json": (lambda p: (p / "manifest.json").write_text("{"), "is not JSON"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "edited": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace('"step": 2', '"step": 3')
        ),
        "its own checksum",
    ),
    "format": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace('"format": 1', '"format": 9')
        ),
        "format 9 is unknown",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, kind: str):
    damage, reason = DAMAGES[kind]
    store = _store(tmp_path)
    _save(store, 1)
    _save(store, 2)
    damage(step_path(tmp_path, 2))
    with pytest.warns(CheckpointWarning, match="checkpoint of step 2 is not used") as caught:
        _assert_restores(store, 1)
    assert reason in str(caught[0].message)
    ((step, told),) = store.skipped.items()
    assert step == 2
    assert reason in told
    assert str(step_path(tmp_path, 2)) in told


def test_when_all_are_damaged_nothing_is_invented(tmp_path: Path):
    store = _store(tmp_path)
    _save(store, 1)
    _save(store, 2)
    _flip(step_path(tmp_path, 1) / FILE)
    (step_path(tmp_path, 2) / "manifest.json").unlink()
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointDamaged, match="none of 2 checkpoints") as caught,
    ):
        _restored(store)
    assert "step 1:" in caught.value.why
    assert "step 2:" in caught.value.why


def test_after_damage_the_run_goes_on_and_the_damaged_one_goes(tmp_path: Path):
    store = _store(tmp_path, keep=1)
    store.keep = 3
    for step in (10, 20, 30):
        _save(store, step)
    _flip(step_path(tmp_path, 30) / FILE)
    with pytest.warns(CheckpointWarning):
        _assert_restores(store, 20)
    store.keep = 1
    _save(store, 25)  # older than the damaged one, and must not be pushed out by it
    assert store.steps() == [25]
    _assert_restores(store, 25)
    assert store.skipped == {}


def test_an_empty_or_missing_directory_restores_nothing(tmp_path: Path):
    assert _restored(_store(tmp_path)) is None
    assert _restored(_store(tmp_path / "none")) is None
    (tmp_path / "step-00000009.partial").mkdir()  # a save that never ended
    assert _restored(_store(tmp_path)) is None


def test_what_an_interrupted_deletion_has_left_goes_when_the_run_begins_again(tmp_path: Path):
    # The last save of all was interrupted after it counted: no other save follows.
    store = _store(tmp_path)
    _save(store, 4)
    for name in ("step-00000002.removed.partial", "step-00000004.replaced.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    _assert_restores(_store(tmp_path), 4)
    assert os.listdir(tmp_path) == ["step-00000004"]


def test_retention_keeps_the_newest(tmp_path: Path):
    store = _store(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        _save(store, step)
        assert len(store.steps()) <= 2
    assert store.steps() == [3, 4]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    store = _store(tmp_path)
    _save(store, 1)
    store.save(1, _tensors(1), {"again": True})
    store.wait()
    manifest = read_manifest(step_path(tmp_path, 1))
    assert manifest.facts == {"again": True}
    _assert_restores(store, 1)


# ---- saves that fail ------------------------------------------------------------------------


def _full(path: Path, blocks) -> None:
    with path.open("wb") as file:
        file.write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize("how", ["save", "wait", "check", "close"])
def test_a_full_disk_is_told_once_and_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch, how):
    store = _store(tmp_path)
    _save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_file", _full)
        store.save(2, _tensors(2), {})
        assert store._thread is not None
        store._thread.join()
    tell = {
        "save": lambda: store.save(3, _tensors(3), {}),
        "wait": store.wait,
        "check": store.check,
        "close": store.close,
    }[how]
    with pytest.raises(CheckpointError, match="checkpointing failed") as caught:
        tell()
    assert "the disk is full" in caught.value.why
    assert "free some space" in caught.value.fix
    assert str(tmp_path) in caught.value.where
    store.wait()  # told once
    assert store.steps() == [1]
    assert not partial_path(tmp_path, 2).exists()  # its space is free again
    _assert_restores(store, 1)
    _save(store, 3)  # a save on top of a failed one
    _assert_restores(store, 3)


@pytest.mark.parametrize("where", ["commit", "begin"])
def test_a_failure_before_or_after_writing_is_told_too(tmp_path: Path, monkeypatch, where: str):
    store = _store(tmp_path)
    _save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, where, lambda *_: (_ for _ in ()).throw(PermissionError("no")))
        store.save(2, _tensors(2), {})
        with pytest.raises(CheckpointError, match="PermissionError: no"):
            store.wait()
    _assert_restores(store, 1)


def test_a_disk_that_is_really_full(tmp_path: Path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True, text=True, timeout=patient(20),
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        store = _store(place, keep=1)
        large = {"model.weight": torch.ones(2**17)}  # 512 KiB: one fits, two do not
        store.save(1, large, {})
        store.wait()
        store.save(2, {"model.weight": torch.ones(2**18)}, {})
        with pytest.raises(CheckpointError) as caught:
            store.wait()
        assert "the disk is full" in caught.value.why
        assert store.steps() == [1]
        found = torch.zeros(2**17)
        store.restore(lambda _: {"model.weight": found})
        assert found.sum().item() == 2**17
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=patient(20))


_VICTIM = """
import sys, torch
from pathlib import Path
from headway.checkpoint import directory, storage
from headway.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), rank=0, ranks=1, group=None, keep=1)
store.save(1, {"w": torch.full((9,), 1.0)}, {})
store.wait()
def hang(*_, **__):
    print("here", flush=True)
    import time; time.sleep(60)
where = sys.argv[2]
if where == "data":
    real = directory.write_file
    storage.write_file = lambda path, blocks: (path.write_bytes(b"half"), hang())
elif where == "manifest":
    directory.sync_directory = hang
elif where == "rename":
    real = Path.rename
    Path.rename = hang
elif where == "retire":
    directory.shutil.rmtree = hang
store.save(2, {"w": torch.full((9,), 2.0)}, {})
store.wait()
"""


@pytest.mark.parametrize(
    ("where", "step"), [("data", 1), ("manifest", 1), ("rename", 1), ("retire", 2)]
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_sound_newest(tmp_path: Path, where: str, step):
    victim = subprocess.Popen(
        ["python", "-c", _VICTIM, str(tmp_path), where], stdout=subprocess.PIPE,
        env=environment(**warm_variables()),
    )  # fmt: skip
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"here\n"
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate(timeout=patient(20))
    assert any(name.endswith(".partial") for name in os.listdir(tmp_path))
    store = _store(tmp_path)
    found = torch.zeros(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manifest = store.restore(lambda _: {"w": found})
    assert manifest is not None
    assert manifest.step == step
    assert found.tolist() == [float(step)] * 9
    store.save(3, {"w": found}, {})
    store.wait()
    assert sorted(os.listdir(tmp_path)) == [f"step-{n:08d}" for n in (step, 3)]


def test_a_store_needs_a_group_and_keeps_at_least_one(tmp_path: Path):
    with pytest.raises(ValueError, match="need a group"):
        CheckpointStore(tmp_path, rank=0, ranks=2, group=None)
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, rank=0, ranks=1, group=None, keep=0)
