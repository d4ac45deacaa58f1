"""Tensors that lie on different ranks, sent from one rank to another on the default group.

Called by all ranks, from the main thread only: the side group belongs to a checkpoint that may be
written meanwhile. Bytes are sent, so that every element type travels alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headway.run.world import World


@dataclass(frozen=True)
class _Form:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    @staticmethod
    def of(tensor: Tensor) -> _Form:
        return _Form(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def gather(own: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """All tensors on rank 0, one after the other; nothing on the other ranks.

    Args:
        own: Name -> tensor, dense; a name is given by one rank only.
        world: The processes.
    """
    forms: list[dict[str, _Form]] = [{}] * world.ranks
    dist.all_gather_object(forms, {name: _Form.of(tensor) for name, tensor in own.items()})
    found = dict(own) if world.rank == 0 else {}
    for rank in range(1, world.ranks):
        for name, form in forms[rank].items():
            if world.rank == rank:
                dist.send(_packed([own[name]], world.device), dst=0)
            elif world.rank == 0:
                received = form.empty(world.device)
                _receive([received], rank, world.device)
                found[name] = received.cpu() if form.on_host else received
    return found


def copy_over(
    pairs: Mapping[tuple[int, int], Sequence[str]], tensors: Mapping[str, Tensor], world: World
) -> None:
    """Give holders the owners' numbers.

    Args:
        pairs: (owner, holder) -> names, in an order that is the same on all ranks.
        tensors: By name; those of the holder are changed.
        world: The processes.
    """
    for (source, target), names in pairs.items():
        chosen = [tensors[name].detach() for name in names]
        if world.rank == source:
            dist.send(_packed(chosen, world.device), dst=target)
        elif world.rank == target:
            _receive(chosen, source, world.device)


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)


def _receive(targets: Sequence[Tensor], source: int, device: torch.device) -> None:
    sizes = [target.numel() * target.element_size() for target in targets]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.recv(flat, src=source)
    for target, part in zip(targets, flat.split(sizes), strict=True):
        target.copy_(part.clone().view(target.dtype).view(target.shape))
