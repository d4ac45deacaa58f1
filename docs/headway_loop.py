"""Three classes of points, learned by a small network."""

import torch
from torch import nn
from torch.utils import data

import headway

torch.manual_seed(0)
points = torch.randn(1000, 20)
dataset = data.TensorDataset(points, points[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = headway.Executor(model, optimizer, loss=headway.criterion(criterion), batch=64)

for epoch in range(5):
    for batch in run.batches(dataset):
        loss = run.step(batch)
    print(f"epoch {epoch}: loss {loss:.4f}")
run.close()
