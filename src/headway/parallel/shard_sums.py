"""The gradients of a stage's gathered parameters, summed into the shards: one reduce-scatter.

FSDP2 splits dimension d of a parameter over n ranks in chunks of ceil(size / n), the last ones
smaller or empty (`torch.chunk`). All chunks of one rank, filled up to equal sizes, are one row of
what is reduce-scattered; a flag for each parameter says whether anybody used it. Where several
ranks of a pipeline hold the stage, or where a mesh also replicates, equal shards are then summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.parallel.sharded import Place, local, wrapped


@dataclass(slots=True)
class _Bucket:
    """Parameters that go together.

    Attributes:
        places: Of one group and type.
        widths: Elements of each in a row.
        flat: This rank's row.
        work: What fills it.
    """

    places: Sequence[Place]
    widths: Sequence[int]
    flat: Tensor
    work: dist.Work


class ShardSum:
    """Carries out SYNC and WAIT for what FSDP2 shards of one stage.

    Args:
        module: The stage's.
        places: Its parameters whose equal shards are on the same ranks.
        equal: Ranks with equal shards; None: this one alone.
    """

    def __init__(
        self, module: nn.Module, places: Sequence[Place], equal: dist.ProcessGroup | None
    ) -> None:
        self._module = module
        self._places = places
        self._equal = equal
        self._buckets: list[_Bucket] = []

    def start(self) -> None:
        """Waits for the ranks of the shards, which stand at the same place of the same row."""
        for part in wrapped(self._module):
            part.unshard()  # nothing to do but for a block that no micro-batch came to
        together: dict[tuple[str, torch.dtype], list[Place]] = {}
        for place in self._places:
            if not place.sharded.requires_grad:
                continue
            group = _group(place)[0]
            together.setdefault((group.group_name, place.sharded.dtype), []).append(place)
        self._buckets = [_scattered(places) for places in together.values()]
        for bucket in self._buckets if self._equal is not None else ():
            bucket.work.wait()
            work = dist.all_reduce(bucket.flat, group=self._equal, async_op=True)
            assert work is not None
            bucket.work = work

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.work.wait()
            _spread(bucket)
        self._buckets = []


def _group(place: Place) -> tuple[dist.ProcessGroup, int, int]:
    """Over which the parameter is sharded; its size; the dimension of the tensor.

    It is the mesh's last dimension but those of tensor parallelism, which the gathered parameter
    has still.
    """
    now, mesh = place.now, place.sharded.device_mesh
    number = mesh.ndim - 1 - (now.device_mesh.ndim if isinstance(now, DTensor) else 0)
    return mesh.get_group(number), mesh.size(number), place.sharded.placements[number].dim  # type: ignore[attr-defined]


def _scattered(places: Sequence[Place]) -> _Bucket:
    """Start the sum; the gathered gradients are free afterwards."""
    group, size, _ = _group(places[0])
    rows, flags = [], []
    for place in places:
        now = place.now
        gradient, now.grad = now.grad, None
        flags.append(float(gradient is not None))
        full = local(torch.zeros_like(now) if gradient is None else gradient, now)
        rows.append(_row(full.detach(), size, _group(place)[2]))
    kind = places[0].sharded
    flag = torch.tensor(flags, device=rows[0].device).expand(size, -1)
    packed = torch.cat([*rows, flag], dim=1).to(kind.dtype)
    flat = packed.new_empty(packed.shape[1])
    work = dist.reduce_scatter(flat, list(packed.unbind()), group=group, async_op=True)
    assert work is not None
    return _Bucket(places, [row.shape[1] for row in rows], flat, work)


def _row(full: Tensor, size: int, dim: int) -> Tensor:
    """A parameter's chunks, one for each rank, each filled up to the first one's length."""
    chunks = torch.chunk(full, size, dim)
    found = full.new_zeros(size, chunks[0].numel())
    for row, chunk in zip(found, chunks, strict=False):
        row[: chunk.numel()] = chunk.reshape(-1)
    return found


def _spread(bucket: _Bucket) -> None:
    """Add this rank's row to `.grad` of the sharded parameters that anybody used."""
    used = bucket.flat[-len(bucket.places) :].tolist()
    start = 0
    for place, width, flag in zip(bucket.places, bucket.widths, used, strict=True):
        parameter = place.sharded
        if flag:
            gradient = torch.zeros_like(parameter)
            own = local(gradient, parameter)
            own.copy_(bucket.flat[start : start + own.numel()].view(own.shape))
            so_far = parameter.grad
            parameter.grad = gradient if so_far is None else so_far + gradient
        start += width
