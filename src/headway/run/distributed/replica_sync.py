"""Keeps replicas equal: initial parameters, buffers before an evaluation, checksums.

Ranks that start from different parameters would train different models without any error. A
checksum of every tensor is compared once; what differs is taken from rank 0 and reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.channel.facts import gather_facts
from headway.checkpoint.staging import local_box, local_data
from headway.errors import RunError

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sync_initial_state(model: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0 where they differ, and say so.

    Raises:
        RunError: The ranks have models with different tensors.
    """
    if world.alone:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # First: collectives over different tensors would hang, or mix numbers of different parameters.
    _same_shape(tensors, world)
    sums = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64)
    # `copy`, because on a CPU both would else be the same tensor.
    low, high = sums.to(world.device), sums.to(world.device, copy=True)
    with world.explained("comparing the initial parameters"):
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
    different = [n for n, bad in zip(tensors, (low != high).tolist(), strict=True) if bad]
    if not different:
        return
    if world.rank == 0:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        warnings.warn(
            f"the ranks start from different numbers in {different[0]}{more}: all now have those "
            "of rank 0; seed torch before the model is built to avoid this",
            stacklevel=3,
        )
    with torch.no_grad(), world.explained("sending the initial parameters"):
        for name in different:
            dist.broadcast(tensors[name].data, src=0)


def broadcast_buffers(
    model: nn.Module, world: World, group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank the buffers of the first one; running statistics differ between shares.

    Args:
        group: Its ranks; None: all.
    """
    if world.alone:
        return
    with world.explained("sharing the model's buffers"):
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)


def _same_shape(tensors: Mapping[str, Tensor], world: World) -> None:
    text = "\n".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items())
    with world.explained("comparing the models"):
        everywhere = gather_facts(text)
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            lines = set(other.splitlines()) ^ set(everywhere[0].splitlines())
            raise RunError(
                f"rank {rank} has another model than rank 0",
                why=f"They differ in: {'; '.join(sorted(lines)[:4])}.",
                fix="Build the same model on every rank.",
            )


def checksums(parameters: Mapping[str, Tensor], away: Collection[Tensor]) -> dict[str, int]:
    """Checksums of the parameters on this rank, by "name" or, of parts, "name at (0, 4)"."""
    found = {}
    for name, parameter in parameters.items():
        if parameter not in away:
            box = local_box(parameter)
            key = name if box is None else f"{name} at {box.offsets}"
            found[key] = checksum(local_data(parameter.detach()))
    return found


def checksum(tensor: Tensor) -> int:
    """A sum over the bits of a tensor."""
    # The first half weighs more, so that elements which change halves change the sum.
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype.is_complex or flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    half = len(words) // 2
    return int((words.sum() + 31 * words[:half].sum()) & ((1 << 62) - 1))
