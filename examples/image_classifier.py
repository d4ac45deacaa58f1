"""An image classifier with augmentation and batch normalisation, exact on any number of processes.

python examples/image_classifier.py
headway verify image_classifier:recipe --processes 1,2     # in this folder
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import headway


class Shapes(Dataset):
    """Bright squares (0) and bars (1) at random places; a training set is flipped at random."""

    def __init__(self, samples: int, *, seed: int, augment: bool) -> None:
        self.samples, self.seed, self.augment = samples, seed, augment

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(self.seed * self.samples + index)
        image = 0.3 * torch.randn(1, 16, 16, generator=draw)
        top, left = torch.randint(0, 8, (2,), generator=draw).tolist()
        kind = index % 2
        image[0, top : top + (4 if kind == 0 else 8), left : left + (4 if kind == 0 else 2)] += 1
        if self.augment and torch.rand((), generator=draw) < 0.5:
            image = image.flip(-1)
        return image, kind


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict:
    images, kinds = batch
    return {"accuracy": (model(images).argmax(dim=1) == kinds).float().mean()}


def recipe() -> headway.Recipe:
    return headway.Recipe(
        name="shapes",
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2),
        ),
        data=lambda: Shapes(512, seed=0, augment=True),
        validation=lambda: Shapes(128, seed=1, augment=False),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch="32 samples", stop="4 epochs", norm="global",
        metrics=accuracy, monitor="accuracy", monitor_mode="max", validate_every=16, keep_best=True,
    )  # fmt: skip


if __name__ == "__main__":
    print(headway.train(recipe(), processes=2))
