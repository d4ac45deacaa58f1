"""A loop of one's own: accumulation, clipping, a schedule, an average of the weights (EMA).

torchrun --nproc-per-node 2 examples/own_loop.py       # or: python examples/own_loop.py
"""

import os

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import headway

torch.manual_seed(0)
inputs = torch.randn(256, 10)
dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = CosineAnnealingLR(optimizer, T_max=32)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

run = headway.Executor(
    model,
    optimizer,
    loss=nn.CrossEntropyLoss(),
    # 64 samples a step, 8 in each forward pass: gradients of the rest are added up.
    plan=headway.data_parallel(64, processes=int(os.environ.get("WORLD_SIZE", 1)), microbatch=8),
    scheduler=scheduler,
    clip=1.0,
)
for epoch in range(4):
    for batch in run.batches(dataset):
        loss = run.step(batch)
        average.update_parameters(model)
    validation = run.validate(dataset)["loss"]
    if run.world.rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, validation {validation:.4f}")
run.close()
