"""A training loop of one's own under torchrun, for `kills.py`: `kills_own_loop.py FOLDER STEPS`.

headway exchanges gradients; the program saves and restores by itself, every third step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import headway
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from support.recipes import adamw
from support.tiny_models import Mlp, Points


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(3)
    model = Mlp()
    optimizer = adamw(model)
    file = folder / "checkpoints" / "state.pt"
    with World.join(LaunchEnv.here()) as world:
        begun = 0
        if file.exists():
            begun, weights, state = torch.load(file)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        executor = headway.Executor(
            model,
            optimizer,
            loss=headway.criterion(torch.nn.CrossEntropyLoss()),
            batch=12,
            world=world,
        )
        for step, batch in enumerate(executor.batches(Points(), epochs=None), 1):
            if step > steps:
                break
            if step <= begun:
                continue
            executor.step(batch)
            if step % 3 == 0 and world.rank == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                aside = file.with_suffix(".partial")
                torch.save((step, model.state_dict(), optimizer.state_dict()), aside)
                os.replace(aside, file)
            world.barrier("a checkpoint")
        executor.close()


if __name__ == "__main__":
    main()
