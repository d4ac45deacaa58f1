"""Measuring what each stage costs on this machine: time, activations and messages.

The executor itself is the stop-watch: all stages run on one rank, and each forward, input
gradient and weight gradient is an action of its own. Gradients, buffers and random numbers are
left as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headway.parallel.pipeline.partition.cut import cut, list_units
from headway.parallel.pipeline.partition.tracing import preserve_model_state
from headway.parallel.pipeline.runtime.executor import PipelineCallbacks, PipelineRanks, RankActions
from headway.parallel.pipeline.runtime.stage_execution import BackwardScalar, Phase
from headway.parallel.stages import LossFunction, ModelStages
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe

PrecisionContext = Callable[[], AbstractContextManager[Any]]
_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage and one micro-batch.

    Attributes:
        forward: Seconds.
        input_grad: Seconds of the gradient of what enters (0: nothing with a gradient enters).
        weight_grad: Seconds of the gradients of the weights.
        activation: Bytes that are kept from forward to backward.
        message: Bytes that the stage gives to others.
        weight: Bytes of the parameters.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation: int
    message: int
    weight: int

    @property
    def seconds(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


def measure_stage_costs(
    stages: ModelStages,
    loss: LossFunction,
    data: Any,
    *,
    share: BackwardScalar = lambda value, _: value,
    arithmetic: PrecisionContext = nullcontext,
    repeats: int = 5,
) -> tuple[StageCost, ...]:
    """The cost of each stage: medians of some repetitions, after one that does not count.

    Args:
        stages: Of a model; all of it is on this rank.
        arithmetic: The context of a forward pass (autocast).
    """
    device = next((p.device for p in stages.model.parameters()), torch.device("cpu"))
    saved = _Saved(stages.model, device, arithmetic)
    calls = PipelineCallbacks(loss=loss, share=share, around=saved.around)
    row = RankActions(
        stages, _one_rank(len(stages)), PipelineRanks(rank=0, ranks=(0,), device=device), calls
    )
    times: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    with _gradients_kept(stages.model), preserve_model_state(stages.model):
        for repeat in range(repeats + 1):
            saved.counts = repeat == 0  # the hooks take time
            row.run([data])
            for action, start, end in row.spans if repeat else ():
                times[action.kind, action.stage].append(end - start)
    seconds = {key: median(found) for key, found in times.items()}
    sent = row.bytes_given()
    return tuple(
        StageCost(
            forward=seconds[ActionKind.FORWARD, n],
            input_grad=seconds[ActionKind.INPUT_GRAD, n] if n else 0.0,
            weight_grad=seconds[ActionKind.WEIGHT_GRAD, n],
            activation=saved.bytes[n],
            message=sent[n],
            weight=sum(p.nbytes for p in stages[n].parameters.values()),
        )
        for n in range(len(stages))
    )


def measure_unit_seconds(
    model: nn.Module,
    loss: LossFunction,
    data: Any,
    stages: int,
    *,
    arithmetic: PrecisionContext = nullcontext,
) -> dict[str, float]:
    """Measured seconds of the units between which a cut into so many stages chooses.

    Args:
        stages: How many stages there will be.

    Raises:
        PlanError: As `cut`; also where the model cannot be cut at every unit.
    """
    with arithmetic():
        units = list_units(model, loss, data, stages)
        # A stage for each unit, so that each is timed by itself.
        parts = cut(model, loss, data, stages=len(units))
    costs = measure_stage_costs(parts, loss, data, arithmetic=arithmetic)
    return {name: cost.seconds for name, cost in zip(units, costs, strict=True)}


def _one_rank(stages: int) -> PipelineSchedule:
    forth = [Action(ActionKind.FORWARD, "d0", n, 0) for n in range(stages)]
    back = [Action(kind, "d0", n, 0) for n in reversed(range(stages)) for kind in _KINDS[1:]]
    # A value may go from any stage to any later one.
    skips = tuple((a, b) for a in range(stages) for b in range(a + 2, stages))
    pipe = SchedulePipe("d0", (0,) * stages, (0,))
    return PipelineSchedule(name="measure", pipes=(pipe,), order=((*forth, *back),), skips=skips)


class _Saved:
    """Counts what autograd keeps of each stage, and waits for a device until an action is done.

    Attributes:
        bytes: By stage, of the last forward that counted.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, arithmetic: PrecisionContext
    ) -> None:
        self._device = device
        self._arithmetic = arithmetic
        # Autograd saves weights as well, which take no additional memory.
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes: dict[int, int] = {}
        self.counts = True

    @contextmanager
    def around(self, stage: int, microbatch: int, phase: Phase) -> Iterator[None]:
        forward = phase == "forward"
        counting = self._counting(stage) if forward and self.counts else nullcontext()
        with self._arithmetic() if forward else nullcontext(), counting:
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _counting(self, stage: int) -> AbstractContextManager[Any]:
        seen = set(self._weights)
        self.bytes[stage] = 0

        def pack(tensor: Tensor) -> Tensor:
            # By storage: several views of one tensor keep its memory once.
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.bytes[stage] += storage.nbytes()
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    before = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
