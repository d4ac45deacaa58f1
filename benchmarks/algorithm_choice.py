"""Minibatch and algorithm of each convolution under a memory bound, against an exhaustive sweep.

    OMP_NUM_THREADS=1 python benchmarks/algorithm_choice.py [--out table.json]

Every way of every layer is measured alone, and the choice is made of these times (Zou et al. 2017);
then all combinations of ways are carried out at all minibatches. What is chosen is compared with
the best of those that fit, for 20 bounds. With --out both go to a file, as the tests read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from platform import machine
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.capture.benchmark.layer_algorithms import (
    CONVOLUTION,
    measure_algorithms,
    peak_bytes,
    use_algorithms,
)
from headway.capture.benchmark.timer import DeviceTimer
from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.guidelines.layer_algorithms import choose_minibatch

BATCHES = (2, 4, 8, 16)
SAMPLES = 4096
BOUNDS = 20
SIDE = 16
ROUNDS = 6
LAYERS = ("stem", "point", "deep")


class Net(nn.Module):
    """Three convolutions of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 5, padding=2)
        self.point = nn.Conv2d(16, 64, 1)
        self.deep = nn.Conv2d(64, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.stem(image))
        x = F.relu(self.deep(F.relu(self.point(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def profile_to_plain(profile_: AlgorithmProfile) -> dict[str, Any]:
    """For the file."""
    return {
        "layers": {
            layer: [[way.name, way.seconds, way.bytes] for way in ways]
            for layer, ways in profile_.layers.items()
        },
        "rest": profile_.rest,
        "features": profile_.features,
        "parameters": profile_.parameters,
    }


def profile_from_plain(found: Mapping[str, Any]) -> AlgorithmProfile:
    """What `profile_to_plain` has made.

    Raises:
        ValueError: A number is none from 0 upwards.
    """
    profile_ = AlgorithmProfile(
        layers={
            layer: tuple(LayerAlgorithm(str(name), float(s), float(b)) for name, s, b in ways)
            for layer, ways in found["layers"].items()
        },
        rest=float(found["rest"]),
        features=float(found["features"]),
        parameters=float(found["parameters"]),
    )
    numbers = [n for ways in profile_.layers.values() for w in ways for n in (w.seconds, w.bytes)]
    if not all(math.isfinite(n) and n >= 0 for n in [*numbers, profile_.rest, profile_.features]):
        raise ValueError("times and sizes are numbers from 0 upwards")
    return profile_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = record()
    if out is not None:
        out.write_text(json.dumps(table) + "\n", encoding="utf-8")
    for line in judge(table):
        print(line)


def record() -> dict[str, Any]:
    """All measurements: layer by layer, and combination by combination, in turn."""
    model, clock = Net(), DeviceTimer(torch.device("cpu"), seconds=0.02)
    weights = 4 * sum(p.numel() for p in model.parameters())
    parameters = 4.0 * weights  # weights, gradients, Adam's two moments
    steps = {
        batch: passes(model, torch.randn(batch, 3, SIDE, SIDE), torch.randint(10, (batch,)))
        for batch in BATCHES
    }
    profiles = {
        str(batch): profile_to_plain(
            measure_algorithms(
                model, step, clock=clock, parameters=parameters, known={}, rounds=ROUNDS
            ).profile
        )
        for batch, (step, _) in steps.items()
    }
    ways = list(itertools.product(CONVOLUTION, repeat=len(LAYERS)))
    best = dict.fromkeys(itertools.product(BATCHES, ways), math.inf)
    for _ in range(ROUNDS):
        for batch, way in best:
            with use_algorithms(model, dict(zip(LAYERS, way, strict=True))):
                best[batch, way] = min(best[batch, way], clock.best(steps[batch][1]))
    sweep = []
    for (batch, way), seconds in best.items():
        model.zero_grad(set_to_none=True)
        with use_algorithms(model, dict(zip(LAYERS, way, strict=True))):
            peak = peak_bytes(steps[batch][1], clock)
        sweep.append([batch, way, seconds, peak - weights + parameters])
    facts = {"torch": torch.__version__, "machine": machine(), "samples": SAMPLES}
    return facts | {"profiles": profiles, "sweep": sweep}


def passes(
    model: nn.Module, image: Tensor, target: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """The forward pass, and both."""

    def step() -> Tensor:
        return F.cross_entropy(model(image), target)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        step().backward()

    return step, both


def judge(table: dict[str, Any]) -> Iterator[str]:
    """One line for each bound: what was chosen, and the best of the sweep."""
    measured = {(b, tuple(ways)): (s, held) for b, ways, s, held in table["sweep"]}
    sizes = sorted(held for _, held in measured.values())
    profiles = {int(batch): profile_from_plain(p) for batch, p in table["profiles"].items()}
    low = min(p.features + p.parameters for p in profiles.values()) * 1.02
    low = max(low, sizes[0])
    worst = 0.0
    for step in range(BOUNDS):
        bound = low * (sizes[-1] * 1.1 / low) ** (step / (BOUNDS - 1))
        ratio, line = _at(bound, table["samples"], profiles, measured)
        worst = max(worst, ratio)
        yield line
    yield f"at worst {worst:.3f} times the best of {len(measured)} combinations"


def _at(
    bound: float,
    samples: int,
    profiles: dict[int, AlgorithmProfile],
    measured: dict[tuple[int, tuple[str, ...]], tuple[float, float]],
) -> tuple[float, str]:
    try:
        found = choose_minibatch(profiles.__getitem__, profiles, memory=bound, samples=samples)
    except PlanError as error:
        return 0.0, f"{bound / 1e6:7.2f} MB: {error}".splitlines()[0]
    best = found.best
    assert best.chosen is not None
    ways = tuple(best.chosen.algorithms.values())
    seconds, held = measured[best.batch, ways]
    epoch = seconds * -(-samples // best.batch)
    fitting = {
        key: s * -(-samples // key[0]) for key, (s, size) in measured.items() if size <= bound
    }
    least = min(fitting, key=lambda key: fitting[key])
    ratio = epoch / fitting[least]
    return ratio, (
        f"{bound / 1e6:7.2f} MB: {best.batch:3} samples, {' '.join(ways):40} predicted "
        f"{best.epoch:6.2f} s, measured {epoch:6.2f} s in {held / 1e6:6.2f} MB; best "
        f"{least[0]:3} {' '.join(least[1]):40} {fitting[least]:6.2f} s; {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
