"""A stream whose users are new every day: a table that grows and forgets, in a loop of one's own.

torchrun --nproc-per-node 2 examples/growing_table.py       # or: python examples/growing_table.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from headway.nn import DynamicEmbeddingBag, field_keys, split_dynamic_tables

DAYS, STEPS, BATCH, USERS, ITEMS = 6, 60, 256, 2000, 500

torch.manual_seed(0)
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
rank, ranks = dist.get_rank(), dist.get_world_size()


def clicks(day: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [batch, 2] of users and items, and whether they were clicked; the next day's users are
    half new. Tastes follow from the numbers of user and item."""
    draw = torch.Generator().manual_seed(1000 * day + step)
    users = torch.randint(0, USERS, (BATCH,), generator=draw) + day * USERS // 2
    items = torch.randint(0, ITEMS, (BATCH,), generator=draw)
    clicked = (users % 7 + items % 5 > 5) ^ (torch.rand(BATCH, generator=draw) < 0.05)
    return torch.stack([field_keys(users, 0), field_keys(items, 1)], 1), clicked.float()


# Each key is forgotten when it has not been seen for a day and a half.
bag = DynamicEmbeddingBag(8, evict_after=STEPS * 3 // 2, dtype=torch.float64)
model = nn.Sequential(bag, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0)).double()
tower = [p for p in model.parameters() if p is not bag.table.weight]
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
split_dynamic_tables(model)

for day in range(DAYS):
    losses = torch.zeros(1)
    for step in range(STEPS):
        keys, clicked = (whole[rank::ranks] for whole in clicks(day, step))
        optimizer.zero_grad()
        total = nn.functional.binary_cross_entropy_with_logits(
            model(keys), clicked.double(), reduction="sum"
        )
        (total / BATCH).backward()  # gradients of all ranks add up: rows by themselves,
        for parameter in tower:  # the tower here
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses += total.detach().float() / BATCH / STEPS
    facts = torch.tensor([float(losses), len(bag.table)])
    dist.all_reduce(facts)
    if rank == 0:
        print(f"day {day}: loss {facts[0]:.4f}, {int(facts[1])} rows")
Path("table").mkdir(exist_ok=True)
torch.save([*bag.table.pieces(optimizer)], f"table/{rank}.pt")  # for any number of ranks
dist.destroy_process_group()
