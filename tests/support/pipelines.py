"""Pipelines beside the serial loop that they must equal: models, micro-batches, both runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.parallel import (
    ModelStages,
    Pipeline,
    PipelineCallbacks,
    PipelineRanks,
    StageGradientSync,
    cut,
    record_call,
    run_stages,
)
from headway.parallel.pipeline.partition.tracing import preserve_model_state
from headway.parallel.pipeline.runtime.stage_execution import ComputeContext
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraws,
    probe_random_draws,
    seed_everything,
)
from headway.schedule.pipeline_schedule import PipelineSchedule
from support.tiny_models import CLASSES, FEATURES, LENGTH, WORDS

Data = Sequence[tuple[Tensor, Tensor]]


def chain(width: int = 12, depth: int = 6) -> nn.Module:
    """Linear layers in a row: x_BF -> logits_BC."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.Tanh()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def points(count: int, *, samples: int = 4, dtype: torch.dtype = torch.float32) -> Data:
    """Micro-batches of points with a class each."""
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64).to(dtype),
            torch.randint(CLASSES, (samples,), generator=draw),
        )
        for _ in range(count)
    ]


def sentences(count: int, *, samples: int = 2) -> Data:
    """Micro-batches of words with the next word as target."""
    draw = torch.Generator().manual_seed(6)
    words = torch.randint(WORDS, (count, samples, LENGTH + 1), generator=draw)
    return [(part[:, :-1], part[:, 1:]) for part in words]


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers by logical name."""
    found = {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {
        **{name: gradient.clone() for name, gradient in found.items()},
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def run_serially(
    model: nn.Module, loss: Callable[[Any, Any], Any], data: Data, order: Sequence[int] = ()
) -> dict[str, Tensor]:
    """One micro-batch after the other, in `order`; the losses and what `numbers_of` finds."""
    losses = {}
    for m in order or range(len(data)):
        share = loss(model, data[m]) / len(data)
        losses[f"loss {m}"] = share.detach()
        share.backward()
    return {**losses, **numbers_of(model)}


def team_of(world: Any) -> PipelineRanks:
    return PipelineRanks(rank=world.rank, ranks=tuple(range(world.size)), group=world.group)


def make_pipeline(
    world: Any,
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    data: Data,
    schedule: PipelineSchedule,
    *,
    stages: ModelStages | None = None,
    team: PipelineRanks | None = None,
    **calls: Any,
) -> Pipeline:
    """A pipeline whose shares of the loss are those of `run_serially`."""
    stages = stages or cut(model, loss, data[0], stages=schedule.stages)
    team = team or team_of(world)
    sync = StageGradientSync(stages, schedule, team)
    given = {"share": lambda value, _: value / len(data), "sync": sync, **calls}
    return Pipeline(stages, schedule, team, PipelineCallbacks(loss=loss, **given))


def run_pipelined(
    world: Any,
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    data: Data,
    schedule: PipelineSchedule,
    **options: Any,
) -> dict[str, Tensor]:
    """One step; what this rank holds afterwards of what `run_serially` returns."""
    pipeline = make_pipeline(world, model, loss, data, schedule, **options)
    losses = pipeline.run(data)
    held = {name for _, s in schedule.hosted(world.rank) for name in own_names(pipeline.stages, s)}
    found = {name: value for name, value in numbers_of(model).items() if name in held}
    return {**{f"loss {m}": value for m, value in losses.items()}, **found}


def own_names(stages: ModelStages, number: int) -> list[str]:
    stage = stages[number]
    return [f"gradient {n}" for n in stage.parameters] + [f"buffer {n}" for n in stage.buffers]


def assert_equal(
    expected: dict[str, Tensor], ranks: Sequence[dict[str, Tensor]], tolerance: float = 0.0
) -> None:
    """Every number of the serial run is on some rank, and equal on all that have it."""
    seen = {name for found in ranks for name in found}
    assert seen == set(expected), seen ^ set(expected)
    for found in ranks:
        for name, value in found.items():
            scale = max(float(expected[name].double().abs().max()), 1e-3)
            error = float((value.double() - expected[name].double()).abs().max()) / scale
            assert error <= tolerance, (name, error)


SEED = 11


def sites_of(model: nn.Module, loss: Callable[[Any, Any], Any], data: Any) -> RandomDraws:
    return probe_random_draws(model, loss, data, resize_batch)


@contextmanager
def keyed(
    sites: RandomDraws, microbatch: int, samples: int, first: int = 0
) -> Iterator[LogicalRandomness]:
    """Random numbers that belong to samples; `first` draws come before those inside."""
    seed_everything(SEED)
    for _ in range(first):
        torch.empty((), dtype=torch.int64).random_()
    positions = range(microbatch * samples, (microbatch + 1) * samples)
    rest = replace(sites, forward=sites.forward[first:])
    with LogicalRandomness(rest, positions, epoch=0) as mode:
        yield mode


def keyed_around(sites: RandomDraws, samples: int, first: Sequence[int]) -> ComputeContext:
    """`Calls.around`: a backward that computes blocks again meets the draws of their forward."""
    modes: dict[tuple[int, int], AbstractContextManager[Any]] = {}

    @contextmanager
    def forward(stage: int, microbatch: int) -> Iterator[None]:
        with keyed(sites, microbatch, samples, first[stage]) as mode:
            modes[stage, microbatch] = mode
            yield

    def around(stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        if phase == "backward":
            return modes[stage, microbatch]
        return forward(stage, microbatch)

    return around


def draws_before(stages: ModelStages, loss: Callable[[Any, Any], Any], data: Any) -> list[int]:
    """For each stage: how many draws of a forward come before it."""
    call = record_call(loss, stages.model, data)
    found: list[int] = []
    with torch.no_grad(), preserve_model_state(stages.model), _Counting() as counter:
        run_stages(stages, call, before=lambda _: found.append(counter.count))
    return found


class _Counting(TorchDispatchMode):
    """Counts the operators that take random numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
