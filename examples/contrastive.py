"""A contrastive loss over the global batch: features of all ranks, exact gradients.

python examples/contrastive.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather

import headway


def gathered(features: torch.Tensor) -> torch.Tensor:
    """The features of all ranks; the gradient comes back to the rank that made them."""
    if not dist.is_initialized():
        return features
    return torch.cat(all_gather(features.contiguous()))


def loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    """Of each first view which second view of the whole batch is its own (InfoNCE)."""
    one, other = (nn.functional.normalize(model(view), dim=-1) for view in batch)
    everyone = gathered(other)
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = torch.arange(len(one)) + rank * len(one)
    return nn.functional.cross_entropy(one @ everyone.T / 0.1, own)


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
