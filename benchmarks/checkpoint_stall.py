"""How long an asynchronous checkpoint of 100 M parameters with AdamW state holds training up.

Two figures against `torch.save` (with fsync) of the same state: the time that `save` takes from
the training loop, and all that the steps during the background write are slower than others.

    python benchmarks/checkpoint_stall.py [saves]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from headway.checkpoint.store import CheckpointStore
from headway.run.training_state import Trained
from language_model import LanguageModel, Words, adamw, loss

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 3


def torch_save(trained: Trained, path: Path) -> float:
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save({**trained.tensors()}, file)
        os.fsync(file.fileno())
    return time.perf_counter() - start


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LanguageModel(layers=16, width=704)
    trained = Trained(model, adamw(model), None)
    data = Words()
    batch = torch.utils.data.default_collate([data[i] for i in range(2)])

    def step() -> float:
        start = time.perf_counter()
        trained.optimizer.zero_grad()
        loss(model, batch).backward()
        trained.optimizer.step()
        return time.perf_counter() - start

    ordinary = statistics.median(step() for _ in range(8))
    size = sum(t.numel() * t.element_size() for t in trained.tensors().values())
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, {size / 1e9:.2f} GB, step {ordinary:.2f} s, "
          f"{time.strftime('%Y-%m-%d')}, {torch.get_num_threads()} threads")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder) / "checkpoints", rank=0, ranks=1, group=None)
        held_ratios, slow_ratios = [], []
        for number in range(COUNT + 1):
            peer = torch_save(trained, Path(folder) / "peer.pt")
            ordinary = statistics.median(step() for _ in range(5))
            start = time.perf_counter()
            store.save(number, trained.tensors(), trained.facts())
            held = time.perf_counter() - start
            laps = [step() for _ in range(5)]
            slower = held + sum(lap - ordinary for lap in laps)
            store.wait()
            first = " (first: buffers are made)" if number == 0 else ""
            print(f"  torch.save {peer:.2f} s, held {held:.2f} s = {held / peer:.2f}, with slower "
                  f"steps {slower:.2f} s = {slower / peer:.2f}{first}", flush=True)  # fmt: skip
            if number:
                held_ratios.append(held / peer)
                slow_ratios.append(slower / peer)
        store.close()
    print(f"  median held {statistics.median(held_ratios):.3f} (target under 0.25), with slower "
          f"steps {statistics.median(slow_ratios):.3f}")  # fmt: skip
