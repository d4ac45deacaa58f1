"""Steps to a target loss: Adasum against averaging, both at their best rate of a grid; 8 ranks.

    python benchmarks/adasum_effect.py [digits|bytes] [--seeds 3] [--batch N] [--momentum M]

The gradients of all ranks are computed in one process, each from its own samples, and combined by
the tree that `Adasum` computes over real ranks (tests/ranks/test_adasum.py holds them equal; the
first step here is held against `adasum_tree`). Each rate of the grid is run with every seed; the
best rate of a method is the one that needs the fewest steps in the median.

digits: an MLP on scikit-learn's handwritten digits (needs that package's files; no download).
bytes:  a next-byte MLP on the source code of Python's standard library.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headway.comm.algorithms.adasum import TINY, adasum_tree
from headway.comm.algorithms.method import GradientSlice

RANKS = 8
GOAL = 0.8


@dataclass(frozen=True)
class Task:
    """Data, model and target.

    Attributes:
        inputs: Training samples, float[N, features] or, of `bytes`, int64[N, 8].
        targets: Class numbers, int64[N].
        widths: Of the MLP, from input to output.
        embedded: Inputs are bytes, each with an embedding of 16.
        batch: Samples per rank and step.
        target: Loss over 2048 fixed training samples that has to be reached.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    widths: tuple[int, ...]
    embedded: bool
    batch: int
    target: float
    momentum: float = 0.0


def digits() -> Task:
    found = importlib.util.find_spec("sklearn")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
    with gzip.open(path) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    inputs, targets = torch.from_numpy(table[:, :-1]) / 16, torch.from_numpy(table[:, -1]).long()
    return Task("digits", inputs, targets, (64, 64, 10), False, 32, 0.1)


def text() -> Task:
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    codes = torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))
    windows = codes.unfold(0, 9, 1)
    return Task("bytes", windows[:, :8], windows[:, 8], (128, 128, 256), True, 64, 2.4)


TASKS = {"digits": digits, "bytes": text}


class Ranks:
    """The model, and the gradients of all ranks in one pass."""

    def __init__(self, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        self._task = task
        self._draw = torch.Generator().manual_seed(seed)
        self._check = torch.randperm(len(task.targets), generator=self._draw)[:2048]
        layers = [nn.Embedding(256, 16).weight] if task.embedded else []
        for before, after in zip(task.widths, task.widths[1:], strict=False):
            layer = nn.Linear(before, after)
            layers += [layer.weight, layer.bias]
        self.start = torch.cat([p.detach().flatten() for p in layers])
        self.pieces, begin = [], 0
        for number, parameter in enumerate(layers):
            end = begin + parameter.numel()
            self.pieces.append(GradientSlice(str(number), begin, end, tuple(parameter.shape)))
            begin = end

    def _loss(self, flat: Tensor, index: Tensor) -> Tensor:
        """Mean loss of each rank: weights float[R, D], samples int64[R, B]."""
        count = flat.shape[0]
        weights = [flat[:, p.start : p.stop].view(count, *p.shape) for p in self.pieces]
        values = self._task.inputs[index]
        if self._task.embedded:
            table, shift = weights.pop(0), 256 * torch.arange(count).view(-1, 1, 1)
            values = nn.functional.embedding(values + shift, table.reshape(-1, 16)).flatten(2)
        while weights:
            weight, bias = weights.pop(0), weights.pop(0)
            values = torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))
            values = values.tanh() if weights else values
        targets = self._task.targets[index].flatten()
        losses = nn.functional.cross_entropy(values.flatten(0, 1), targets, reduction="none")
        return losses.view(count, -1).mean(1)

    def gradients(self, flat: Tensor) -> Tensor:
        """One row for each rank: the mean gradient of its own samples."""
        shape = (RANKS, self._task.batch)
        index = torch.randint(len(self._task.targets), shape, generator=self._draw)
        copies = flat.expand(RANKS, -1).clone().requires_grad_()
        (found,) = torch.autograd.grad(self._loss(copies, index).sum(), copies)
        return found

    def loss(self, flat: Tensor) -> float:
        with torch.no_grad():
            return self._loss(flat.unsqueeze(0), self._check.unsqueeze(0)).item()


def mean(gradients: Tensor, pieces: Sequence[GradientSlice]) -> Tensor:
    return gradients.mean(0)


def adasum(gradients: Tensor, pieces: Sequence[GradientSlice]) -> Tensor:
    """`adasum_tree`, all pairs of a level at once."""
    level = gradients.double()
    while len(level) > 1:
        left, right = level[::2].clone(), level[1::2]
        for piece in pieces:
            a, b = left[:, piece.start : piece.stop], right[:, piece.start : piece.stop]
            dot, first, second = (a * b).sum(1), (a * a).sum(1), (b * b).sum(1)
            one = torch.where(first < TINY, 1.0, 1 - dot / (2 * first))
            other = torch.where(second < TINY, 1.0, 1 - dot / (2 * second))
            a.mul_(one.unsqueeze(1)).add_(b * other.unsqueeze(1))
        level = left
    return level[0].to(gradients)


METHODS = {"averaging": mean, "adasum": adasum}


def steps(task: Task, combine: Callable[..., Tensor], rate: float, seed: int, most: int) -> int:
    """Steps until the target, looked at every other step; `most` if it is not reached by then."""
    ranks = Ranks(task, seed)
    flat, velocity = ranks.start, torch.zeros_like(ranks.start)
    for step in range(1, most):
        gradients = ranks.gradients(flat)
        combined = combine(gradients, ranks.pieces)
        if step == 1 and combine is adasum:
            reference = adasum_tree(list(gradients), ranks.pieces).to(combined)
            assert torch.allclose(combined, reference, rtol=1e-5, atol=1e-9)
        flat = flat - rate * velocity.mul_(task.momentum).add_(combined)
        if step % 2 == 0:
            loss = ranks.loss(flat)
            if loss <= task.target or not loss < 20:
                return step if loss <= task.target else most
    return most


def best_rate(
    task: Task, name: str, rates: Sequence[float], seeds: int, most: int
) -> tuple[float, list[int]]:
    """The rate with the fewest steps in the median, and the steps of each seed."""
    best, found = 0.0, [most] * seeds
    for rate in rates:
        # Twice the best is far enough to know that a rate is worse.
        limit = int(min(most, 2 * statistics.median(found)))
        counts = [steps(task, METHODS[name], rate, seed, limit) for seed in range(seeds)]
        shown = [count if count < limit else f">{limit}" for count in counts]
        print(f"  {name:9} rate {rate:6.3f}: {shown}   load {os.getloadavg()[0]:.1f}", flush=True)
        if statistics.median(counts) < statistics.median(found):
            best, found = rate, counts
    return best, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS, nargs="?", default="bytes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=1500)
    for key, kind in (("target", float), ("batch", int), ("momentum", float)):
        parser.add_argument(f"--{key}", type=kind)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    given = {key: getattr(chosen, key) for key in ("target", "batch", "momentum")}
    task = TASKS[chosen.task]()
    task = replace(task, **{key: value for key, value in given.items() if value is not None})
    print(
        f"{task.name}: {RANKS} ranks x {task.batch} samples, momentum {task.momentum}, "
        f"loss {task.target}, {time.strftime('%Y-%m-%d')}"
    )
    rates = [0.2 * 2 ** (step / 2) * (1 - task.momentum) for step in range(11)]
    results = {name: best_rate(task, name, rates, chosen.seeds, chosen.most) for name in METHODS}
    for name, (rate, counts) in results.items():
        print(f"  {name:9} best rate {rate:.3f}: {counts}, median {statistics.median(counts)}")
    medians = [statistics.median(counts) for _, counts in results.values()]
    print(f"  adasum / averaging {medians[1] / medians[0]:.3f} (goal at most {GOAL})")


if __name__ == "__main__":
    main()
