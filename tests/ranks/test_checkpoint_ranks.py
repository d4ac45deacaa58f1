"""ranks: saved by three ranks, restored by two and by one; failures seen by all ranks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.checkpoint import directory as disk
from headway.checkpoint import storage
from headway.checkpoint.directory import partial_path, read_manifest, step_path
from headway.checkpoint.store import CheckpointStore
from headway.errors import CheckpointError, CheckpointMismatch
from support.ranks import World, ranks, run_ranks


def _tensors(step: int) -> dict[str, torch.Tensor]:
    """7 MB: two tensors that are cut between ranks, small ones that are not."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embedding": torch.randn(1000, 800, generator=generator),
        "model.head": torch.randn(999, 801, generator=generator).bfloat16().t(),
        "model.mask": torch.rand(50, 50, generator=generator) > 0.5,
        "model.scale": torch.tensor(float(step), dtype=torch.float64),
        "optimizer.step": torch.tensor(step),
        "optimizer.exp_avg": torch.randn(700, 800, generator=generator),
        "optimizer.none": torch.empty(0, 4),
    }


def _store(world: World, path: Path, keep: int = 2) -> CheckpointStore:
    group = dist.new_group(backend="gloo")
    return CheckpointStore(path, rank=world.rank, ranks=world.size, group=group, keep=keep)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _fill(store: CheckpointStore) -> int:
    """Restore; the step, once everything is compared bit for bit."""
    found = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in _tensors(0).items()}
    manifest = store.restore(lambda _: found)
    assert manifest is not None
    assert manifest.facts == {"step": manifest.step, "rank": 0}
    for name, tensor in _tensors(manifest.step).items():
        assert _bits(found[name]) == _bits(tensor), name
    return manifest.step


def _save(store: CheckpointStore, step: int) -> int:
    receipt = store.save(step, _tensors(step), {"step": step, "rank": store.rank})
    store.wait()
    return receipt.bytes


def save_two(world: World, path: Path) -> int:
    store = _store(world, path)
    _save(store, 1)
    size = _save(store, 2)
    store.close()
    return size


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by three ranks."""
    path = tmp_path_factory.mktemp("saved")
    sizes = run_ranks(3, save_two, path)
    assert sizes == [read_manifest(step_path(path, 2)).bytes] * 3
    return path


def test_three_ranks_write_equal_shares(saved: Path):
    manifest = read_manifest(step_path(saved, 2))
    assert sorted(manifest.files) == [f"rank-{n:05d}.safetensors" for n in range(3)]
    shares = [entry.bytes for entry in manifest.files.values()]
    assert max(shares) < 1.02 * min(shares)
    assert len(manifest.tensors["model.embedding"].chunks) > 1
    assert len(manifest.tensors["optimizer.step"].chunks) == 1


def restore_sound(world: World, path: Path) -> int:
    store = _store(world, path)
    with pytest.raises(CheckpointMismatch, match="another model"):
        store.restore(lambda _: {"model.scale": torch.zeros(3)})
    return _fill(store)


def test_saved_on_three_restored_on_two_and_one(saved: Path):
    assert run_ranks(2, restore_sound, saved) == [2, 2]
    assert _fill(CheckpointStore(saved, rank=0, ranks=1, group=None)) == 2


def restore_sharded(world: World, path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    wanted = _tensors(2)
    names = {"model.embedding": 0, "optimizer.exp_avg": 1, "model.head": 1}
    found = {
        name: distribute_tensor(torch.zeros_like(wanted[name]), mesh, [Shard(dim)])
        for name, dim in names.items()
    }
    _store(world, path).restore(lambda _: dict(found))
    for name, tensor in found.items():
        mine = wanted[name].chunk(world.size, dim=names[name])[world.rank]
        assert _bits(tensor.to_local()) == _bits(mine), name


def test_shards_are_filled_from_whatever_parts_there_are(saved: Path):
    run_ranks(2, restore_sharded, saved)


def restore_damaged(world: World, paths: list[Path]) -> list[tuple[int, str, int]]:
    found = []
    for path in paths:
        store = _store(world, path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = _fill(store)
        (reason,) = store.skipped.values()
        found.append((step, reason, len(caught)))
    return found


def test_damage_that_one_rank_sees_is_the_verdict_of_all(saved: Path, tmp_path: Path):
    files = []
    for number in range(3):
        path = shutil.copytree(saved, tmp_path / str(number))
        files.append(step_path(path, 2) / f"rank-{number:05d}.safetensors")
        content = bytearray(files[-1].read_bytes())
        content[-5000] ^= 1
        files[-1].write_bytes(content)
    paths = [file.parent.parent for file in files]
    for rank, results in enumerate(run_ranks(2, restore_damaged, paths)):
        for file, (step, reason, warned) in zip(files, results, strict=True):
            assert step == 1
            assert str(file) in reason
            assert "has the wrong checksum" in reason
            assert warned == (rank == 0)  # one voice is enough


def _say(results: list[tuple[str, list[int], bool]]) -> None:
    for text, steps, partial in results:
        assert "rank 1" in text
        assert "the disk is full" in text
        assert steps == [1]
        assert not partial


@ranks(2, check=_say)
def test_a_full_disk_on_one_rank_is_told_to_all(world: World):
    path = world.directory / "checkpoints"
    store = _store(world, path)
    _save(store, 1)

    def full(path: Path, blocks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if world.rank == 1:
        storage.write_file = full
    store.save(2, _tensors(2), {"step": 2, "rank": world.rank})
    with pytest.raises(CheckpointError, match="checkpointing failed") as caught:
        store.wait()
    dist.barrier()
    steps, partial = store.steps(), partial_path(path, 2).exists()
    assert _fill(store) == 1
    storage.write_file = disk.write_file
    _save(store, 3)
    assert _fill(store) == 3
    return str(caught.value), steps, partial


@ranks(2)
def test_no_rank_uses_the_group_of_training(world: World):
    """Collectives of training and of the checkpoint run at the same time, in different orders."""
    store = _store(world, world.directory, keep=1)
    one = torch.ones(1000)
    for step in range(1, 4):
        store.save(step, _tensors(step), {"step": step, "rank": world.rank})
        for _ in range(20):
            dist.all_reduce(one, group=world.group)
            one /= world.size
    store.close()
    assert one.sum().item() == 1000
    assert _fill(store) == 3


@ranks(2)
def test_ranks_that_disagree_about_the_tensors_fail(world: World):
    store = _store(world, world.directory)
    tensors = _tensors(1)
    if world.rank == 1:
        del tensors["model.embedding"]
    store.save(1, tensors, {})
    with pytest.raises(CheckpointError):
        store.wait()
    assert store.steps() == []


def die(world: World, path: Path) -> None:
    store = _store(world, path)
    _save(store, 1)
    if world.rank == 1:
        storage.write_file = lambda path, blocks: os.kill(os.getpid(), signal.SIGKILL)
    store.save(2, _tensors(2), {"step": 2, "rank": world.rank})
    with pytest.raises(CheckpointError):
        store.wait()
    store.close(wait=False)


def test_a_rank_killed_in_the_middle_of_a_save(tmp_path: Path):
    run_ranks(2, die, tmp_path, mortal=[1])
    store = CheckpointStore(tmp_path, rank=0, ranks=1, group=None)
    assert _fill(store) == 1
    assert store.skipped == {}
