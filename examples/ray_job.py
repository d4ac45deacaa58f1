"""A recipe as a job of a Ray cluster; here of one that starts on this machine.

python examples/ray_job.py            # needs the package ray: pip install 'headway[ray]'
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
import headway.ray

try:
    import ray
except ImportError:
    sys.exit("skipped: the package ray is not installed; pip install 'headway[ray]'")


def points() -> TensorDataset:
    inputs = torch.randn(512, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def recipe() -> headway.Recipe:
    return headway.Recipe(
        name="points",
        model=lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)),
        data=points,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch="32 samples",
        stop="4 epochs",
    )


if __name__ == "__main__":
    ray.init()  # joins the cluster on which this program was submitted, if there is one
    folder = Path("runs/ray").resolve()  # on a cluster: a folder that all machines share
    trainer = headway.ray.trainer(recipe(), processes=2, directory=folder)
    print(trainer.fit().metrics)
    ray.shutdown()
