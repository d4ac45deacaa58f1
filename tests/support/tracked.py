"""What torch's MemTracker counts; the only file that touches `torch.distributed._tools`.

Private in torch: `test_memory_peaks.py` says what is used of it, and notices a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed._tools.mem_tracker import MemTracker

from headway import Executor
from headway.capture.fake_tensors import FakeContext
from headway.parallel.pipeline.runtime.stage_execution import _DetachedInputs, _StageEntry
from headway.parallel.stages import ModelStages
from headway.plans import Plan
from headway.run.distributed.world import World
from support.fake_world import fake_world
from support.memory_models import CASES
from support.ranks import run_ranks

CPU = torch.device("cpu")
NAMES = {
    "Parameter": "parameters", "Buffer": "buffers", "Gradient": "gradients",
    "Optstate": "optimiser", "Activation": "activations", "Temp": "temporaries", "Other": "batch",
}  # fmt: skip
"""Categories of the tracker, and of headway."""


def tracker_of(*known: object) -> MemTracker:
    """A tracker that counts these modules, optimisers and tensors."""
    tracker = MemTracker()
    tracker.track_external(*known)
    return tracker


def found(tracker: MemTracker, when: str = "peak") -> tuple[int, dict[str, int]]:
    """Bytes in all, and by category."""
    snapshot = tracker.get_tracker_snapshot(when)[CPU]
    by_category = {NAMES[kind.value]: n for kind, n in snapshot.items() if kind != "Total" and n}
    return snapshot["Total"], by_category


def peak_of_steps(
    make: Callable[[], nn.Module],
    example: list[torch.Tensor],
    loss: Callable[[nn.Module, object], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    microbatches: int = 1,
    real: bool = False,
) -> tuple[int, dict[str, int]]:
    """The peak of two steps from gradients that are None, without memory for numbers.

    Args:
        make: The model.
        example: Data on the meta device.
        loss: `loss(model, data)`.
        optimizer: `optimizer(parameters)`.
        microbatches: Equal ones, one after another, whose gradients add up.
        real: With memory and numbers.
    """
    if real:
        model, mode = make(), nullcontext()
    else:
        pretence = FakeContext()
        with torch.device("meta"):
            made = make()
        model, mode = pretence.model(made), pretence.mode  # made in the mode, copies are not seen
    with mode:
        data = [torch.zeros(t.shape, dtype=t.dtype) for t in example]
        rule = optimizer(model.parameters())
        tracker = tracker_of(model, rule, *data)

        def step() -> None:
            rule.zero_grad()
            for _ in range(microbatches):
                loss(model, data).backward()
                tracker.reset_mod_stats()
            rule.step()

        with tracker:
            step()
            step()
        return found(tracker)


def peak_of_stage(
    stages: ModelStages,
    number: int,
    example: list[torch.Tensor],
    loss: Callable[[object, object], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    actions: Sequence[tuple[str, int]],
) -> tuple[int, dict[str, int]]:
    """The peak of two steps of one stage, alone, with memory and numbers.

    What would come from its neighbours is made here; of its results only their places in autograd's
    graph are kept, as in `parallel.stage_run`.

    Args:
        stages: Of a cut model.
        number: Of the stage.
        example: One micro-batch, on the meta device.
        loss: Of the recipe.
        optimizer: `optimizer(parameters)`.
        actions: ("F", 0): forward of micro-batch 0; ("B", 0): its backward.
    """
    stage, count = stages[number], len({n for _, n in actions})
    batches = [[torch.zeros(t.shape, dtype=t.dtype) for t in example] for _ in range(count)]
    entering = _entering(stages, number, batches[0])
    rule = optimizer(stage.parameters.values())
    tracker = tracker_of(stage.module, rule, *batches)
    waiting: dict[int, tuple[object, torch.Size, _DetachedInputs]] = {}
    anchor = torch.empty(0, requires_grad=True)

    def forward(microbatch: int) -> None:
        cut = _DetachedInputs(tuple(torch.empty_like(t) for t in entering if t.is_floating_point()))
        entered = iter(_StageEntry.apply(anchor, cut) if cut.tensors and number else ())
        cut.tensors = ()
        values = [
            batches[microbatch][entry.leaf] if entry.source < 0 else next(entered)
            for entry in stage.takes
        ]
        if number == len(stages) - 1:
            result = loss(lambda *_: stage.module(*values), batches[microbatch])
        else:
            (result,) = stage.module(*values)
        waiting[microbatch] = get_gradient_edge(result), result.shape, cut

    def backward(microbatch: int) -> None:
        edge, shape, _ = waiting.pop(microbatch)
        torch.autograd.backward([edge], [torch.ones(shape)])

    def step() -> None:
        rule.zero_grad()
        for kind, microbatch in actions:
            (forward if kind == "F" else backward)(microbatch)
        rule.step()

    with tracker:
        # Its hooks by module allow one forward at a time only, and keep what enters a stage.
        tracker._mod_tracker.__exit__(None, None, None)
        step()
        step()
    return found(tracker)


class _Samples(torch.utils.data.Dataset):
    """Equal ones, of ones."""

    def __init__(self, example: Sequence[torch.Tensor], length: int) -> None:
        self._sample = tuple(torch.ones(t.shape[1:], dtype=t.dtype) for t in example)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._sample


def peak_of_plan(
    make: Callable[[], nn.Module],
    example: list[torch.Tensor],
    loss: Callable[[nn.Module, Any], Any],
    optimizer: Callable[..., torch.optim.Optimizer],
    plan: Plan,
) -> int:
    """The peak of headway's executor in its second step, on the last rank of a fake world.

    With numbers; of all micro-batches of the step one is counted, as a device has them.

    Args:
        make: The model.
        example: A micro-batch on the meta device, samples first.
        loss: `loss(model, data)`.
        optimizer: `optimizer(parameters)`.
        plan: Without a pipeline.
    """
    with fake_world(plan.ranks, rank=plan.ranks - 1) as world:
        return _peak_of_run(make, example, loss, optimizer, plan, world, clip=None)[0]


def peaks_of_ranks(
    case: str, rule: Callable[..., torch.optim.Optimizer], plan: Plan, *, clip: float | None = 1.0
) -> list[tuple[int, dict[str, int]]]:
    """The peak of every rank of a plan in its second step, bytes in all and by category.

    Real ranks, which speak Gloo. With numbers; all micro-batches are counted where there is a
    pipeline, since its ranks have them together, and one otherwise.

    Args:
        case: A key of `memory_models.CASES`.
        rule: `rule(parameters)`.
        plan: Micro-batches are as large as the case's.
        clip: Largest global norm of the gradients.
    """
    return run_ranks(plan.ranks, _peak_here, case, rule, plan, clip, timeout=240)


def _peak_here(
    _: object,
    case: str,
    rule: Callable[..., torch.optim.Optimizer],
    plan: Plan,
    clip: float | None,
) -> tuple[int, dict[str, int]]:
    of = CASES[case]
    return _peak_of_run(of.make, of.data, of.loss, rule, plan, World.adopt(), clip=clip)


def _peak_of_run(
    make: Callable[[], nn.Module],
    example: list[torch.Tensor],
    loss: Callable[[nn.Module, Any], Any],
    optimizer: Callable[..., torch.optim.Optimizer],
    plan: Plan,
    world: World,
    *,
    clip: float | None,
) -> tuple[int, dict[str, int]]:
    torch.manual_seed(0)
    model = make()
    run = Executor(
        model, optimizer(model.parameters()), loss=loss, plan=plan, world=world, clip=clip
    )
    first, second = run.batches(_Samples(example, 2 * plan.batch.samples))
    run.step(first)
    data = [tensor for micro in second.micros for tensor in micro.data]
    tracker = tracker_of(*_held(run), *data)
    with tracker:
        # Its hooks by module do not know modules that gather their parameters.
        tracker._mod_tracker.__exit__(None, None, None)
        run.step(second)
    beyond = 0
    if plan.pipe_degree == 1:
        whole = sum(t.numel() * t.element_size() for t in data)
        beyond = round(whole * (1 - 1 / len(second.micros)))
    total, by_category = found(tracker)
    return total - beyond, by_category


def _held(run: Executor) -> list[torch.Tensor]:
    """What a rank holds between two steps, and what will have memory in them."""
    exchange = run.strategy.exchange
    held = [] if exchange is None else [b.fused.buffer for b in exchange.now.buckets]
    held += [*run.model.parameters(), *run.model.buffers()]
    held += [value for state in run.optimizer.state.values() for value in state.values()]
    stages = None if run.pipeline is None else run.pipeline.stages
    for stage in () if stages is None else stages:  # ZeRO: whole parameters, freed between steps
        held += stage.parameters.values()
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def _entering(stages: ModelStages, number: int, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """What enters a stage, from the stages before it."""
    given: list[tuple[torch.Tensor, ...]] = []
    with torch.no_grad():
        for stage in stages:
            values = [
                batch[e.leaf] if e.source < 0 else given[e.source][e.leaf] for e in stage.takes
            ]
            if stage.number == number:
                return values
            given.append(stage.module(*values))
    return []
