"""Storage for torch.distributed.checkpoint: safetensors files beside a JSON manifest.

Importing this module imports torch.distributed.checkpoint (0.7 to 1.5 s), so `store` does it on the
background thread of the first save. Torch's planners decide what is read and written; the
subclasses here only turn pieces of tensors into bytes of files. Nothing is pickled, also not among
ranks: torch's own `save` and `load` would do that, so their order of calls stands here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from headway.channel.facts import gather_facts
from headway.channel.mapped_memory import drop, row_chunks
from headway.checkpoint.directory import (
    begin,
    commit,
    partial_path,
    read_exactly,
    retain,
    sync_directory,
    write_file,
)
from headway.checkpoint.format import FileEntry, Manifest, StoredChunk, TensorEntry, build_header
from headway.checkpoint.save_plan import SavePiece
from headway.errors import CheckpointError

T = TypeVar("T")
Explain = Callable[[BaseException], CheckpointError]
"""Makes the error of this rank one that can go to the others."""


def save(
    directory: Path,
    manifest: Manifest,
    pieces: Sequence[Sequence[SavePiece]],
    staged: Mapping[str, Tensor],
    *,
    rank: int,
    group: ProcessGroup | None,
    explain: Explain,
    keep: int,
    damaged: Sequence[int],
    pinned: Collection[int] = (),
) -> None:
    """Write this rank's pieces; the last step of the collective commits the checkpoint.

    Args:
        manifest: Step and facts; tensors and files are filled in here.
        pieces: Of all ranks.
        staged: Logical name -> host copy of this rank's piece.
        group: The ranks that write together; None: this process alone.

    Raises:
        CheckpointError: What went wrong on the first rank that failed; on all ranks.
    """
    planner = PiecePlanner(pieces[rank], staged)
    writer = SafetensorsWriter(
        directory, manifest, rank=rank, keep=keep, damaged=damaged, pinned=pinned
    )
    first = rank == 0

    def begin_all() -> None:
        planner.set_up_planner({}, writer.storage_meta(), is_coordinator=first)
        writer.set_up_storage_writer(first)

    _together(begin_all, group, explain)
    plans, metadata = planner.create_global_plan([_save_plan(each) for each in pieces])
    plan = writer.prepare_global_plan(plans)[rank]
    written = _together(
        lambda: writer.write_data(planner.finish_plan(plan), planner).wait(), group, explain
    )
    results = [written] if group is None else gather_facts(written, group, only=0)
    _together(lambda: writer.finish(metadata, results) if first else None, group, explain)


def load(
    checkpoint: Path,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    *,
    group: ProcessGroup | None,
    explain: Explain,
) -> None:
    """Fill tensors in place from a checkpoint that has been checked.

    Args:
        group: The ranks that read together; None: this process alone.

    Raises:
        CheckpointError: What went wrong on the first rank that failed; on all ranks.
    """

    def read() -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = SafetensorsReader(checkpoint, manifest)
        planner.set_up_planner(dict(tensors), reader.read_metadata(), is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()

    # Each rank reads what it holds; they only agree on how that ended.
    _together(read, group, explain)


def _together(work: Callable[[], T], group: ProcessGroup | None, explain: Explain) -> T:
    """What the work of this rank gave, once that of all ranks has succeeded.

    Raises:
        CheckpointError: The failure of the first rank that has one; on all ranks.
    """
    failure: CheckpointError | None = None
    try:
        found = work()
    except Exception as error:
        failure = explain(error)
        if group is None:
            raise failure from error
    failures = [failure] if group is None else gather_facts(failure, group)
    for each in failures:
        if each is not None:
            raise each
    return found


def _save_plan(pieces: Sequence[SavePiece]) -> SavePlan:
    return SavePlan([_write_item(piece) for piece in pieces])


class PiecePlanner(DefaultSavePlanner):
    """Plans the writing of pieces that have been cut and staged before."""

    def __init__(self, pieces: Sequence[SavePiece], staged: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._staged = staged

    def create_local_plan(self) -> SavePlan:
        """One shard per piece, so that several ranks may hold parts of one tensor."""
        self.plan = _save_plan(self._pieces)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The staged copy; a rank has at most one piece of a tensor."""
        return self._staged[index.fqn]


def _write_item(piece: SavePiece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    return WriteItem(
        index=MetadataIndex(piece.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.shape)),
            properties=TensorProperties(dtype=getattr(torch, piece.spec.dtype)),
            size=torch.Size(piece.spec.shape),
        ),
    )


class SafetensorsWriter(StorageWriter):
    """Writes one safetensors file per rank; the coordinator adds the manifest and commits."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        rank: int,
        keep: int,
        damaged: Sequence[int],
        pinned: Collection[int] = (),
    ) -> None:
        self._pinned = pinned
        self._directory = directory
        self._manifest = manifest
        self._rank = rank
        self._keep = keep
        self._damaged = damaged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer serves one save; there is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The coordinator makes the directory before any rank is told to write into it."""
        if is_coordinator:
            begin(self._directory, self._manifest.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces to its file and wait until they are on the disk."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan.items, planner) if plan.items else [])
        return future

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"rank-{self._rank:05d}.safetensors"
        path = partial_path(self._directory, self._manifest.step) / name
        views = [_host(planner.resolve_data(item)) for item in items]
        rows = [
            (_key(item), str(view.dtype).removeprefix("torch."), tuple(view.shape))
            for item, view in zip(items, views, strict=True)
        ]
        head, stored = build_header(rows, {"format": "pt", "writer": "headway"})
        entry = write_file(path, _blocks(head, views))
        # The file's name must be on the disk, too, before rank 0 commits.
        sync_directory(path.parent)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=place.bytes,
                # Where the piece went, and the file as a whole: it travels to the coordinator.
                storage_data=(
                    StoredChunk(
                        offsets=tuple(item.index.offset or ()),
                        shape=place.shape,
                        file=name,
                        start=place.start,
                        bytes=place.bytes,
                    ),
                    entry,
                ),
            )
            for item, place in zip(items, stored, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, commit, and delete checkpoints that are no longer kept."""
        chunks: dict[str, list[StoredChunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, FileEntry] = {}
        for result in (one for rank in results for one in rank):
            chunk, files[chunk.file] = result.storage_data
            chunks[result.index.fqn].append(chunk)
        manifest = Manifest(
            step=self._manifest.step,
            facts=self._manifest.facts,
            tensors={
                name: _tensor_entry(metadata.state_dict_metadata[name], chunks[name])
                for name in sorted(chunks)
            },
            files=files,
        )
        # Before the rename: a manifest that contradicts itself must never become a checkpoint.
        manifest.check()
        commit(self._directory, manifest)
        # Only once the new one counts: until then an old one may be the only sound checkpoint.
        retain(self._directory, manifest.step, self._keep, self._damaged, self._pinned)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by torch on its own."""
        return False


class SafetensorsReader(StorageReader):
    """Reads boxes of tensors from the files that a manifest lists."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader serves one load; there is nothing to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
                    size=torch.Size(entry.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                        for chunk in entry.chunks
                    ],
                )
                for name, entry in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan, file by file in the order of their bytes."""
        work: dict[str, list[tuple[StoredChunk, ReadItem]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            work.setdefault(chunk.file, []).append((chunk, item))
        for name in sorted(work):
            # Unbuffered: `readinto` then fills the destination's own memory.
            with (self._checkpoint / name).open("rb", buffering=0) as file:
                # Forwards through the file: disks read ahead.
                for chunk, item in sorted(work[name], key=lambda pair: pair[0].start):
                    # torch refuses `numpy()`, and in-place copies, for a leaf that requires grad.
                    tensor = planner.resolve_tensor(item).detach()
                    _read_box(file, chunk, item, tensor)
                    planner.commit_tensor(item, tensor)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _chunk(self, index: MetadataIndex) -> StoredChunk:
        offsets = tuple(index.offset or ())
        chunks = self._manifest.tensors[index.fqn].chunks
        return next(chunk for chunk in chunks if chunk.offsets == offsets)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by torch on its own."""
        return False


def _key(item: WriteItem) -> str:
    """The name of a piece in its file: the logical name, with its range where it is a part."""
    data = item.tensor_data
    assert data is not None  # `resolve_data` has returned a tensor for this item
    if data.chunk.sizes == data.size:
        return item.index.fqn
    spans = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{', '.join(f'{first}:{first + extent}' for first, extent in spans)}]"


def _tensor_entry(properties: Any, chunks: list[StoredChunk]) -> TensorEntry:
    return TensorEntry(
        dtype=str(properties.properties.dtype).removeprefix("torch."),
        shape=tuple(properties.size),
        chunks=tuple(sorted(chunks, key=lambda chunk: chunk.offsets)),
    )


def _host(data: Any) -> Tensor:
    assert isinstance(data, Tensor)  # no planner of ours plans anything else
    return data.detach().cpu().contiguous()


def _blocks(head: bytes, views: Sequence[Tensor]) -> Iterator[memoryview]:
    """What is written; of tensors that lie in files only a few rows are in memory at a time."""
    yield memoryview(head)
    for view in views:
        for part in row_chunks(view) if view.dim() else [...]:
            yield _bytes_of(view[part])
            drop(view)


def _bytes_of(tensor: Tensor) -> memoryview:
    # Through uint8, because numpy has no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_box(file: FileIO, chunk: StoredChunk, item: ReadItem, destination: Tensor) -> None:
    """Read the box of `item` inside `chunk` into `destination` (any device, any strides).

    Only the rows that the box touches are read; where they are the box and the destination is
    contiguous host memory they go straight into it.
    """
    if destination.numel() == 0:
        return
    first, rows = (item.storage_offsets[0], item.lengths[0]) if chunk.shape else (0, 1)
    shape = (rows, *chunk.shape[1:]) if chunk.shape else ()
    row_bytes = chunk.bytes // (chunk.shape[0] if chunk.shape else 1)
    # Straight only where the file's bytes are those of the memory, which they are not where a
    # conjugation or negation is still pending.
    direct = (
        tuple(destination.shape) == shape
        and destination.device.type == "cpu"
        and destination.is_contiguous()
        and not (destination.is_conj() or destination.is_neg())
    )
    slab = destination if direct else torch.empty(shape, dtype=destination.dtype)
    file.seek(chunk.start + first * row_bytes)
    for part in row_chunks(slab) if slab.dim() else [...]:
        read_exactly(file, _bytes_of(slab[part]))
        drop(slab)
    if not direct:
        for dim in range(1, len(shape)):
            slab = slab.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        destination.copy_(slab)
