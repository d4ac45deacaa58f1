"""What must hold of every answer of the search, and random requests to try it on.

    PYTHONPATH=src:tests python -m support.plan_sweep FIRST LAST

prints what does not hold for the requests with these seeds; `tests/single/test_plan_sweep.py` has
some of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from time import perf_counter

import numpy as np
import torch
from torch import nn

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import NothingFits
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import nearest_plans
from headway.planner.explain.infeasible import infeasible_error, least_memory
from headway.planner.search.branch_and_bound import ALIKE, PlanSearch, SearchResult
from headway.planner.search.neighbours import degree_steps
from headway.planner.search.plan_point import Point, describe_point
from headway.planner.search.request import DeviceGroup, PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import Dlrm, Encoder, ResNet50, ids, meta

SAMPLES = 8
ROUNDING = 1e-9


class Vision(nn.Module):
    """Dosovitskiy et al. 2021: patches, an encoder, a class token's head."""

    def __init__(self, width: int = 192, layers: int = 3, patch: int = 16, image: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros((image // patch) ** 2, width))
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.GELU(),
                    nn.Linear(4 * width, width),
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = x + layer(x)
        found: torch.Tensor = self.head(x.mean(1))
        return found


class Experts(nn.Module):
    """A mixture of experts in which every token visits all of them, weighted by its gate."""

    def __init__(self, width: int = 128, experts: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.up = nn.ParameterList(torch.empty(experts, width, 4 * width) for _ in range(layers))
        self.down = nn.ParameterList(torch.empty(experts, 4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            y = torch.relu(torch.einsum("btd,edf->btef", x, up))
            y = torch.einsum("btef,efd->bted", y, down)
            x = x + torch.einsum("bte,bted->btd", torch.softmax(gate(x), -1), y)
        found: torch.Tensor = self.head(x)
        return found


def gpt(*, layers: int, width: int, window: int, half: bool) -> nn.Module:
    config = TransformerConfig(
        vocabulary=1024, window=window, width=width, layers=layers, heads=8, tied=layers % 2 == 0
    )
    model = TransformerLM(config)
    return model.bfloat16() if half else model


def volumes() -> nn.Module:
    """Convolutions in three dimensions, then a perceptron."""
    blocks: list[nn.Module] = []
    for inner, outer in ((4, 16), (16, 32), (32, 64)):
        blocks += [nn.Conv3d(inner, outer, 3, padding=1), nn.LeakyReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 4**3, 128), nn.Linear(128, 4))


SHAPES = {
    "gpt tiny": {"layers": 2, "width": 256, "window": 64},
    "gpt narrow": {"layers": 5, "width": 512, "window": 256},
    "gpt deep": {"layers": 12, "width": 1024, "window": 256},
    "gpt wide": {"layers": 4, "width": 4096, "window": 512},
    "gpt huge": {"layers": 10, "width": 8192, "window": 1024},
}


@cache
def workload(name: str, half: bool = False) -> PlanningWorkload:
    """A model, captured."""
    s = SAMPLES
    with torch.device("meta"):
        if name in SHAPES:
            shape = SHAPES[name]
            model, inputs = gpt(**shape, half=half), [ids(s, shape["window"])]
        else:
            made: dict[str, tuple[Callable[[], nn.Module], list[torch.Tensor]]] = {
                "resnet": (ResNet50, [meta(s, 3, 64, 64)]),
                "dlrm": (Dlrm, [meta(s, 13), ids(4, s, 3)]),
                "bert": (Encoder, [ids(s, 32), meta(s, 32, dtype=torch.bool)]),
                "vision": (Vision, [meta(s, 3, 64, 64)]),
                "experts": (Experts, [ids(s, 32)]),
                "volumes": (volumes, [meta(s, 4, 32, 32, 32)]),
            }
            build, inputs = made[name]
            model = build()
        graph = fuse_light_operators(
            capture(model, inputs[0] if len(inputs) == 1 else tuple(inputs))
        )
    return PlanningWorkload(graph=graph, samples=s)


MODELS = (*SHAPES, "resnet", "dlrm", "bert", "vision", "experts", "volumes")
PRESETS = ("dgx-a100", "dgx-h100", "dgx-1", "p3.16xlarge", "p4d.24xlarge", "g4dn.metal", "8x-4090")


def request(seed: int, *, largest: int = 64, mixed: bool = False) -> tuple[str, PlanRequest]:
    """A random request, and what it is in words."""
    rng = np.random.default_rng(seed)
    name = str(rng.choice(MODELS))
    half = name in SHAPES and bool(rng.random() < 0.5)
    counts = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if n <= largest]
    devices = int(rng.choice(counts))
    preset = str(rng.choice(PRESETS))
    batch = int(devices * rng.choice([0.5, 1, 1.5, 2, 3, 5, 6, 8, 12, 16])) or 1
    objective = str(
        rng.choice(["frontier", "fastest", "fewest-devices", "cheapest"], p=[0.4, 0.4, 0.1, 0.1])
    )
    schedules = [
        ("1f1b",),
        ("1f1b",),
        ("all",),
        ("gpipe",),
        ("zb-h1",),
        ("1f1b", "chimera"),
        ("interleaved", "1f1b"),
    ]
    chosen = schedules[rng.integers(len(schedules))]
    zero = [(0, 1, 3), (0, 1, 3), (0,), (0, 1, 2, 3), (3,), (1,)][rng.integers(6)]
    several = (devices,) if rng.random() < 0.7 else tuple(sorted({1, 2, devices}))
    work = workload(name, half)
    machine = machine_of(of_preset(preset, nodes=-(-devices // 8)))
    question = PlanRequest(
        work=work,
        machine=machine,
        devices=several,
        batch=batch,
        objective=objective,
        schedules=chosen,
        zero=zero,
    )
    if rng.random() < 0.5:
        # Between what the state takes on all devices and on one.
        state = work.graph.parameter_bytes * 4.5
        low, high = state / devices, state * 2
        question = replace(question, memory=float(int(low * (high / low) ** rng.random())))
    if mixed:
        other = machine_of(of_preset("g4dn.metal", nodes=1))
        machine = machine_of(of_preset("p3.16xlarge", nodes=1))
        other = replace(other, network=machine.network)
        number = int(rng.choice([2, 4]))
        groups = tuple(
            DeviceGroup(kind=kind, machine=one, count=number)
            for kind, one in (("v100", machine), ("t4", other))
        )
        question = replace(
            question, machine=machine, groups=groups, devices=(), schedules=("1f1b",)
        )
    words = (
        f"{name}{' bf16' if half else ''}, {preset}, devices {several}, batch {batch}, "
        f"{objective}, "
        f"{','.join(chosen)}, zero {zero}, memory {question.memory}{', mixed' if mixed else ''}"
    )
    return words, question


def beats(one: Point, other: Point) -> bool:
    """As good in time, memory and devices, and better in one."""
    pairs = ((one.seconds, other.seconds), (one.bytes, other.bytes), (one.devices, other.devices))
    return all(a <= b * (1 + ROUNDING) for a, b in pairs) and any(
        a < b * (1 - ROUNDING) for a, b in pairs
    )


def worth(question: PlanRequest, point: Point) -> float:
    """What the objective is about."""
    if question.objective == "fewest-devices":
        return float(point.devices)
    if question.objective == "cheapest":
        return question.cost(point.devices, point.seconds, point.amounts)
    return point.seconds


def every_plan(search: PlanSearch) -> Iterator[Point]:
    """The fastest plan of every combination that the request allows: no bound, no order."""
    fresh = search.related(search.question)
    for combination in fresh.combinations():
        candidate = fresh.open(combination)
        if candidate.exists:
            point = candidate.fastest(fresh.question.cap)
            if point is not None:
                yield point


def around(search: PlanSearch, point: Point, changes: int) -> Iterator[Point]:
    """The fastest plans of degrees up to so many changes away."""
    question = search.question
    seen, edge = {point.degrees}, [point.degrees]
    legal = {one.degrees for one in search.combinations()}
    for _ in range(changes):
        found: list[Degrees] = []
        for old in edge:
            steps = degree_steps(question, old, units=len(search.row), most=question.most)
            found += [one.degrees for one in steps if one.degrees is not None]
            found += [replace(old, zero=zero) for zero in question.zero if old.data > 1]
            found += [replace(old, order=order) for order in question.orders]
        edge = [one for one in dict.fromkeys(found) if one in legal and one not in seen]
        seen |= {*edge}
        for degrees in edge:
            candidate = search.candidate(degrees)
            if candidate.exists and (plan := candidate.fastest(question.cap)) is not None:
                yield plan


def problems(question: PlanRequest, *, brute: int = 150) -> Iterator[str]:
    """What does not hold of the answer to a request.

    Args:
        brute: Combinations up to which all are priced; beyond, those two changes away.
    """
    search = PlanSearch(question)
    try:
        outcome = search.run()
    except NothingFits as error:
        yield from refusal_problems(question, error)
        return
    best = outcome.best
    few = sum(1 for _ in search.combinations()) <= brute
    others: Iterator[Point] = iter(())
    if few:
        others = every_plan(search)
    elif not question.groups:
        others = around(search, best, 2 if len(search.row) < 30 else 1)
    least, fewest = worth(question, best), best.devices
    for other in [*outcome.points, *others, *(one.point for one in nearest_plans(outcome))]:
        allowed = not question.devices or other.devices in question.devices
        if not allowed:
            yield f"alternative on {other.devices} devices"
            continue
        far = f"{other.seconds / best.seconds - 1:+.3%} {other.bytes / best.bytes - 1:+.3%}"
        if beats(other, best):
            yield f"dominated by {describe_point(other)} ({far}), not {describe_point(best)}"
        if worth(question, other) * ALIKE < least:
            yield f"{describe_point(other)} is better ({far}) than {describe_point(best)}"
        if few and worth(question, other) < outcome.bound * (1 - ROUNDING):
            yield f"{describe_point(other)} ({far}) is below the bound {outcome.bound}"
        if other.seconds < outcome.floor * (1 - ROUNDING) and other.devices == fewest:
            yield f"{describe_point(other)} is below the floor {outcome.floor}"
    yield from _monotone(question, outcome)


def _monotone(question: PlanRequest, outcome: SearchResult) -> Iterator[str]:
    """More memory, more devices, more schedules are never worse."""
    best, value = outcome.best, worth(question, outcome.best)
    changes = {"memory": replace(question, memory=question.cap * 1.3)}
    if "all" not in question.schedules and not question.groups:
        changes["schedules"] = replace(question, schedules=("all",))
    if question.devices and len(question.devices) == 1:
        fewer = sorted({*question.devices, *(d for d in (1, 2, 4) if d < question.most)})
        changes["devices"] = replace(question, devices=tuple(fewer))
    for name, more in changes.items():
        found = outcome.search.related(more).run().best
        if worth(question, found) > value * ALIKE:
            yield (
                f"more {name}: {describe_point(found)} ({found.seconds:.6g} s) for "
                f"{describe_point(best)} ({best.seconds:.6g} s)"
            )


def refusal_problems(question: PlanRequest, error: NothingFits) -> Iterator[str]:
    """What does not hold of a refusal."""
    need = least_memory(PlanSearch(replace(question, memory=np.inf)))
    said = infeasible_error(question)
    for text in (str(error), str(said)):
        for word in ("headway.planner", "_error", "Traceback", "0x"):
            if word in text:
                yield f"{word!r} in the refusal"
    if need is None:
        return
    if f"{need.bytes} B" not in str(said) and need.bytes <= question.machine.device.memory:
        yield f"the refusal does not name {need.bytes} B"
    fits = PlanSearch(replace(question, memory=float(need.bytes)))
    try:
        found = fits.run().best
        if found.bytes > need.bytes + 1:
            yield f"the plan needs {found.bytes}, {need.bytes} are allowed"
    except NothingFits:
        yield f"{need.bytes} B are too few"
    if need.proven:
        try:
            less = replace(question, memory=float(need.bytes - 1))
            yield f"with a byte less: {describe_point(PlanSearch(less).run().best)}"
        except NothingFits:
            pass


def main() -> None:
    first, last, *more = map(int, sys.argv[1:])
    for seed in range(first, last):
        words, question = request(seed, largest=more[0] if more else 64, mixed=seed % 10 == 9)
        begin = perf_counter()
        found = list(dict.fromkeys(problems(question)))
        print(f"{seed}: {words}: {perf_counter() - begin:.1f} s", flush=True)
        for one in found:
            print(f"    {one}", flush=True)


if __name__ == "__main__":
    main()
