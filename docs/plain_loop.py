"""A small convolutional network learns which way the stripes of an image run."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labels = torch.arange(1200) % 3  # stripes from top to bottom, from left to right, neither
stripes = torch.tensor([1.0, -1.0]).repeat(8).expand(16, 16)
patterns = torch.stack([stripes, stripes.T, stripes * stripes.T])
dataset = TensorDataset(patterns[labels, None] + 2 * torch.randn(1200, 1, 16, 16), labels)
loader = DataLoader(dataset, batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 3),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(5):
    for images, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")
