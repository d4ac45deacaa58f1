"""Reference of workers that meet in rounds: all of them in one process, one after the other.

Each worker has a model and an optimiser of its own, and computes the gradients of its share of
every batch as the serial loop does. What happens when they meet is written here once more, from the
papers and without `headway.synchrony`: local SGD (McDonald et al. 2010), slow momentum (Wang et al.
2020) and DiLoCo (Douillard et al. 2023) by torch's own SGD, synchronous EASGD (Zhang et al. 2015,
equations 2.3 and 2.4), D-PSGD (Lian et al. 2017, algorithm 1). A run must equal it to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite, isqrt
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from headway.data import RankBatch
from headway.errors import Diverged
from headway.plans import Plan, Synchrony
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import RandomDraws
from headway.run.step.setup import stepped_each_step
from headway.run.strategy.training_state import TrainingState
from headway.verification.recording import (
    Recorder,
    VerifyJob,
    build_training_state,
    initial_values,
    recipe_and_plan,
)
from headway.verification.reference.batches import reference_batches
from headway.verification.reference.draws import initial_model
from headway.verification.reference.epochs import reference_epochs
from headway.verification.serial_run import CopyBuffers, find_draws, gradients_of, perturb
from headway.verification.worker_exchange import MeetingLaw, by_worker

Model = dict[str, Tensor]


def workers_file(target: Path) -> Path:
    """What is beside a recording of workers that do not agree at every step."""
    return target.with_suffix(".workers")


def record_workers(_: LaunchEnv, job: VerifyJob, target: Path, *, ranks: int, split: Path) -> None:
    """Make the steps of all workers of a plan in float64; save the recording.

    Args:
        split: The recording of the run, with what its compressed meetings have made.
    """
    recipe, plan = recipe_and_plan(job, ranks)
    initial, states, steps = prepared(job, recipe, plan)
    recorder = Recorder(states[0])
    law = MeetingLaw(plan, recipe.seed, split) if plan.synchrony.compress != "none" else None
    workers = _Workers(recipe, plan, states, law)
    step = 0
    for step, batches in enumerate(steps, 1):
        loss = workers.step(step, batches)
        if not isfinite(loss):
            raise Diverged(
                f"the loss is {loss}",
                where=f"step {step} of the reference of all workers",
                fix="Lower the learning rate, or check this batch's data.",
            )
        recorder.take(step, loss, workers.numbers())
    workers.end(step)
    ends = workers.numbers()
    kinds = ("parameter", "share", "exchange", "residual")
    recorder.take(step + 1, 0.0, {kind: ends[kind] for kind in kinds if kind in ends})
    bounds = {} if law is None else law.bounds
    replace(recorder.recording(), initial=initial, bounds=bounds).save(target)


def prepared(
    job: VerifyJob, recipe: Recipe, plan: Plan
) -> tuple[dict[str, Tensor], list[TrainingState], Iterator[tuple[RankBatch, ...]]]:
    """The values that all begin with, a model with an optimiser for each worker, and the batches.

    A batch has a share for each copy of the model, in the order of the ranks.
    """
    model = to_float64(initial_model(recipe))
    if job.perturbed:
        perturb(model, job.perturbed)
    states = [
        build_training_state(recipe, deepcopy(model), reference=True) for _ in range(plan.workers)
    ]
    source = training_data(recipe)
    steps = reference_batches(
        source,
        plan.batch,
        plan.data_degree,
        job.start(recipe, reference_epochs(recipe, source).sizes_to_the_end),
        steps=job.count(recipe),
        drop_last=recipe.drop_last,
    )
    return initial_values(model), states, steps


class WorkerGradients:
    """The gradients of all workers, each of its own model, one worker after the other."""

    def __init__(self, recipe: Recipe, models: Sequence[nn.Module]) -> None:
        self._recipe, self._models = recipe, models
        self._buffers = [CopyBuffers() for _ in models]
        self._sites: RandomDraws | None = None

    def leave(self, worker: int, shares: Sequence[RankBatch]) -> tuple[float, float]:
        """Leave the gradient of a worker's mean loss in its model; its sum and count."""
        model = self._models[worker]
        if self._sites is None:
            self._sites = find_draws(self._recipe, model, shares)
        micros = self._buffers[worker].micros(model, shares)
        total, count = gradients_of(self._recipe, model, self._sites, micros, 1)
        for parameter in model.parameters():
            if parameter.grad is not None and count:
                parameter.grad.div_(count)
        if count and self._recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._recipe.clip)
        return total, count


class _Workers:
    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        states: Sequence[TrainingState],
        law: MeetingLaw | None,
    ) -> None:
        models = [state.model for state in states]
        self._states, self._gradients = states, WorkerGradients(recipe, models)
        self._law = law
        self._rule = _rule(plan.synchrony, models, law)

    def step(self, step: int, batches: Sequence[RankBatch]) -> float:
        """One step of every worker; returns the loss over all samples."""
        before = [_values(state.model) for state in self._states]
        results = []
        for worker in range(len(self._states)):
            copies = len(batches) // len(self._states)
            shares = batches[worker * copies : (worker + 1) * copies]
            results.append(self._gradients.leave(worker, shares))
        # Gradients are of the models before they met; optimisers step afterwards.
        self._rule.before_update(step, before, self._states)
        for state, (_, count) in zip(self._states, results, strict=True):
            if count:
                state.optimizer.step()
            scheduler = stepped_each_step(state.scheduler)
            if scheduler is not None:
                scheduler.step()
        self._rule.after_update(step, self._states)
        return sum(total for total, _ in results) / sum(count for _, count in results)

    def end(self, step: int) -> None:
        """What all workers end with."""
        self._rule.end(step, self._states)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        found = by_worker(
            {worker: state.tensors_by_kind() for worker, state in enumerate(self._states)}
        )
        return found if self._law is None else found | self._law.taken()


def _values(model: nn.Module) -> Model:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def _set(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def _average(models: Sequence[Mapping[str, Tensor]]) -> Model:
    return {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}


class _Rule(Protocol):
    """Where workers meet; `before` has the models of a step before it was made."""

    def before_update(
        self, step: int, before: Sequence[Model], states: Sequence[TrainingState]
    ) -> None:
        """What the models of all workers become before their optimisers step."""

    def after_update(self, step: int, states: Sequence[TrainingState]) -> None:
        """What they become after that."""

    def end(self, step: int, states: Sequence[TrainingState]) -> None:
        """What all end with, after the last step."""


def _rule(synchrony: Synchrony, models: Sequence[nn.Module], law: MeetingLaw | None) -> _Rule:
    start = _values(models[0])
    match synchrony.merge:
        case "mean":
            return _Mean(synchrony, start, law)
        case "elastic":
            return _Elastic(synchrony, start)
        case "neighbour":
            return _Neighbours(synchrony, len(models))
    raise ValueError(f"no reference of merge {synchrony.merge}")


class _Mean:
    """Means of all models; an outer optimiser is torch's SGD on a model of its own."""

    def __init__(self, synchrony: Synchrony, start: Model, law: MeetingLaw | None) -> None:
        self._rules, self._law = synchrony, law
        self._outer = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        self._optimizer: torch.optim.SGD | None = None
        if synchrony.outer != "none":
            self._optimizer = torch.optim.SGD(
                self._outer.values(),
                lr=synchrony.outer_rate,
                momentum=synchrony.outer_momentum,
                nesterov=synchrony.outer == "nesterov" and synchrony.outer_momentum > 0,
            )

    def before_update(
        self, step: int, before: Sequence[Model], states: Sequence[TrainingState]
    ) -> None:
        """Nothing: models meet after their updates."""

    def _is_meeting(self, step: int) -> bool:
        warm = self._rules.warm_up
        return step <= warm or (step - warm) % self._rules.local_steps == 0

    def after_update(self, step: int, states: Sequence[TrainingState]) -> None:
        if self._is_meeting(step):
            self._meet(step, step, states)

    def end(self, step: int, states: Sequence[TrainingState]) -> None:
        if not self._is_meeting(step):
            self._meet(step, step + 1, states)

    def _meet(self, step: int, recorded: int, states: Sequence[TrainingState]) -> None:
        """
        Args:
            recorded: The step under which a recording has it: the end is one of its own.
        """
        models = [_values(state.model) for state in states]
        average = _average(models)
        if self._law is not None:
            common = {name: parameter.detach() for name, parameter in self._outer.items()}
            total = self._law.meet(recorded, common, models)
            average = {name: x - total[name] / len(models) for name, x in common.items()}
        with torch.no_grad():
            for name, parameter in self._outer.items():
                parameter.grad = parameter.detach() - average[name]
        if self._optimizer is not None and step > self._rules.warm_up:
            self._optimizer.step()
        else:
            with torch.no_grad():
                for name, parameter in self._outer.items():
                    parameter.copy_(average[name])
        for state in states:
            _set(state.model, self._outer)
        if self._rules.state == "reset":
            for state in states:
                state.optimizer.state.clear()
        elif self._rules.state == "average":
            _average_state(states)


@torch.no_grad()
def _average_state(states: Sequence[TrainingState]) -> None:
    """Moments and the like, of which there is a number for each element of a parameter."""
    parameters = [dict(state.model.named_parameters()) for state in states]
    for name, first in parameters[0].items():
        for key, value in states[0].optimizer.state.get(first, {}).items():
            if not isinstance(value, Tensor) or value.shape != first.shape:
                continue
            if not value.is_floating_point():
                continue
            every = [
                state.optimizer.state[named[name]][key]
                for state, named in zip(states, parameters, strict=True)
            ]
            average = torch.stack(every).mean(0)
            for one in every:
                one.copy_(average)


class _Elastic:
    def __init__(self, synchrony: Synchrony, start: Model) -> None:
        self._rules = synchrony
        self._centre = start

    def before_update(
        self, step: int, before: Sequence[Model], states: Sequence[TrainingState]
    ) -> None:
        if step % self._rules.local_steps:
            return
        alpha, beta, centre = self._rules.alpha, self._rules.beta, self._centre
        for state, x in zip(states, before, strict=True):
            _set(state.model, {n: x[n] - alpha * (x[n] - centre[n]) for n in x})
        self._centre = {
            n: c + beta * torch.stack([x[n] - c for x in before]).sum(0) for n, c in centre.items()
        }

    def after_update(self, step: int, states: Sequence[TrainingState]) -> None:
        """Nothing: models have met before."""

    def end(self, step: int, states: Sequence[TrainingState]) -> None:
        for state in states:
            _set(state.model, self._centre)


class _Neighbours:
    def __init__(self, synchrony: Synchrony, workers: int) -> None:
        self._every = synchrony.local_steps
        self._weights = torch.tensor(
            synchrony.weights or _even_weights(synchrony.place, workers), dtype=torch.float64
        )

    def before_update(
        self, step: int, before: Sequence[Model], states: Sequence[TrainingState]
    ) -> None:
        if step % self._every:
            return
        for name in before[0]:
            models = torch.stack([x[name] for x in before])
            mixed = torch.tensordot(self._weights.to(models.dtype), models, dims=1)
            for worker, state in enumerate(states):
                with torch.no_grad():
                    dict(state.model.named_parameters())[name].copy_(mixed[worker])

    def after_update(self, step: int, states: Sequence[TrainingState]) -> None:
        """Nothing: models have met before."""

    def end(self, step: int, states: Sequence[TrainingState]) -> None:
        average = _average([_values(state.model) for state in states])
        for state in states:
            _set(state.model, average)


def hearing(place: str, workers: int) -> list[list[bool]]:
    """Whether a worker (row) hears another one (column): a graph that is drawn here anew."""
    rows = next(r for r in range(isqrt(workers), 0, -1) if workers % r == 0)
    columns = workers // rows

    def hears(i: int, j: int) -> bool:
        gap = (i - j) % workers
        match place:
            case "ring":
                return gap in (0, 1, workers - 1)
            case "exponential":
                return gap == 0 or gap & (gap - 1) == 0
            case "hypercube":
                return (i ^ j).bit_count() <= 1
            case "torus":
                down = (i // columns - j // columns) % rows
                right = (i % columns - j % columns) % columns
                return (not down and right in (0, 1, columns - 1)) or (
                    not right and down in (0, 1, rows - 1)
                )
        return True

    return [[hears(i, j) for j in range(workers)] for i in range(workers)]


def _even_weights(place: str, workers: int) -> list[list[float]]:
    """Even weights over a worker and those that it hears."""
    heard = hearing(place, workers)
    return [[one / sum(row) for one in row] for row in heard]
