"""A generative adversarial net: two models, two optimisers, an exchange for each in a usual loop.

torchrun --nproc-per-node 2 examples/gan.py       # or: python examples/gan.py
"""

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import headway

STEPS, BATCH, NOISE = 600, 128, 4

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
generator = nn.Sequential(
    nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
)
critic = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1)
)
makes = headway.Exchange(generator, torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.9)))
judges = headway.Exchange(critic, torch.optim.Adam(critic.parameters(), 4e-3, (0.5, 0.9)))
world = makes.world


def circle(angles: torch.Tensor) -> torch.Tensor:
    """What the generator learns: points [n, 2] on the circle of radius 1."""
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def verdict(scores: torch.Tensor, real: bool) -> torch.Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


for step in range(1, STEPS + 1):
    # All ranks draw the numbers of the whole batch, each uses its share: any number computes alike.
    draw = torch.Generator().manual_seed(step)
    real = circle(2 * math.pi * torch.rand(BATCH, generator=draw))[world.rank :: world.ranks]
    fake = generator(torch.randn(BATCH, NOISE, generator=draw)[world.rank :: world.ranks])

    judges.zero_grad()  # the generator's loss has left gradients in the critic
    verdict(critic(real), True).backward()
    verdict(critic(fake.detach()), False).backward()
    judges.step()

    makes.zero_grad()
    verdict(critic(fake), True).backward()
    makes.step()

    if step % 100 == 0 and world.rank == 0:
        with torch.no_grad():
            points = generator(torch.randn(1000, NOISE, generator=draw))
            loss, away = verdict(critic(points), True), (points.norm(dim=1) - 1).abs().mean()
        print(f"step {step}: generator loss {loss:.6f}, distance from the circle {away:.6f}")
makes.close()
judges.close()
