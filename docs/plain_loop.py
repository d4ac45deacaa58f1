"""Three classes of points, learned by a small network."""

import torch
from torch import nn
from torch.utils import data

torch.manual_seed(0)
points = torch.randn(1000, 20)
dataset = data.TensorDataset(points, points[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(5):
    for inputs, target in data.DataLoader(dataset, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")
