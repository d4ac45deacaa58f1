"""How long an asynchronous checkpoint of 100 M parameters with AdamW state holds training up.

Two ranks train; two figures against `torch.save` of the same state by one of them: the time that
`save` takes from the training loop (the slower rank), and that plus all that the steps during the
background write are slower than others. torch.save is timed without fsync, which favours it.

    python benchmarks/checkpoint_stall.py [saves]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from headway.channel.process_memory import keep_freed_memory
from headway.checkpoint.store import CheckpointStore
from headway.run.strategy.training_state import TrainingState
from language_model import LanguageModel, Words, adamw, loss
from pairs import torchrun

STEPS = 5


def torch_save(trained: TrainingState, path: Path) -> float:
    start = time.perf_counter()
    torch.save({**trained.tensors()}, path)
    return time.perf_counter() - start


def measure(folder: Path, count: int) -> None:
    """The body of each rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    model = LanguageModel(layers=16, width=704)
    trained = TrainingState(model, adamw(model), None)
    data = Words()
    batch = torch.utils.data.default_collate([data[i] for i in range(2)])

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        trained.optimizer.zero_grad()
        loss(model, batch).backward()
        trained.optimizer.step()
        dist.barrier()
        return time.perf_counter() - start

    step()
    rank = dist.get_rank()
    store = CheckpointStore(
        folder / "checkpoints", rank=rank, ranks=2, group=dist.new_group(backend="gloo")
    )
    store.reserve(trained.tensors())
    size = sum(t.numel() * t.element_size() for t in trained.tensors().values())
    rows = []
    for number in range(count):
        dist.barrier()
        peer = torch_save(trained, folder / "peer.pt") if rank == 0 else 0.0
        dist.barrier()
        ordinary = statistics.median(step() for _ in range(STEPS))
        start = time.perf_counter()
        store.save(number, trained.tensors(), trained.facts())
        dist.barrier()
        held = time.perf_counter() - start
        slower = sum(step() - ordinary for _ in range(STEPS))
        store.wait()
        rows.append((peer, held, held + slower, ordinary))
    store.close()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps({"bytes": size, "rows": rows}))
    dist.destroy_process_group()


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torchrun("checkpoint_stall.py", "--measure", folder, str(count))
        facts = json.loads((Path(folder) / "rows.json").read_text())
    print(
        f"asynchronous checkpoint, 101 M parameters, {facts['bytes'] / 1e9:.2f} GB, 2 processes, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    held, total = [], []
    for peer, stop, everything, ordinary in facts["rows"]:
        held.append(stop / peer)
        total.append(everything / peer)
        print(
            f"  torch.save {peer:.2f} s; held {stop:.2f} s = {held[-1]:.2f}; with slower steps "
            f"{everything:.2f} s = {total[-1]:.2f}   (step {ordinary:.2f} s)"
        )
    print(
        f"  median held {statistics.median(held):.3f} (target under 0.25), with slower steps "
        f"{statistics.median(total):.3f}   load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
