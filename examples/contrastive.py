"""A contrastive loss over the global batch: features of all ranks, exact gradients.

python examples/contrastive.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import headway


class AllGather(torch.autograd.Function):
    """The features of all ranks; each rank gets back the gradient of its own, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    """Of each first view which second view of the whole batch is its own (InfoNCE)."""
    one, other = (nn.functional.normalize(model(view), dim=-1) for view in batch)
    first = 0
    if dist.is_initialized():
        other, first = AllGather.apply(other), dist.get_rank() * len(one)
    own = torch.arange(len(one)) + first
    return nn.functional.cross_entropy(one @ other.T / 0.1, own)


def views() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    things = torch.randn(64, 8, generator=draw)
    noise = 0.1 * torch.randn(2, 64, 8, generator=draw)
    return list(zip(things + noise[0], things + noise[1], strict=True))


recipe = headway.Recipe(
    name="contrastive",
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)),
    data=views(), loss=loss, optimizer=torch.optim.Adam, batch="16 samples", stop="5 epochs",
)  # fmt: skip

if __name__ == "__main__":
    headway.verify(recipe, processes=2).check()
    print(headway.train(recipe, processes=2))
