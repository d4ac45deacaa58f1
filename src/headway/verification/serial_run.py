"""Reference runs in one process: the serial loop, and delayed updates of a pipeline.

Written without the executor on purpose. The serial loop is that of any tutorial: model, loss,
backward, clip, step. All that it shares with the split run is the meaning of a random number.

For schedules without a flush the same table is carried out micro-batch by micro-batch on the whole
model: each stage has the weights of the version that the table names, a STEP applies the mean
gradient of its group to the newest version. The split run must equal it to 1e-12. Sources:
PipeDream (Narayanan et al., SOSP 2019), PipeDream-2BW (Narayanan et al., ICML 2021).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import fsum, isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headway.data import Cursor, MicroBatch, RankBatch
from headway.data.torch_loader import known_length
from headway.errors import Diverged
from headway.metrics import Statistic
from headway.parallel.stages import ModelStages
from headway.plans import BatchSplit
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.batch_units import resolve_batch, stop_steps
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe, check_trains, give_outputs
from headway.run.recipe.training_data import (
    recipe_epoch_length,
    training_data,
    validation_data,
)
from headway.run.step.batch import resize_batch
from headway.run.step.double_precision import double_precision
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraws,
    build_model,
    probe_random_draws,
)
from headway.run.step.setup import recipe_plan
from headway.run.strategy.training_state import TrainingState
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule, update_groups
from headway.verification.own_precision import check_own_precision
from headway.verification.recording import (
    Recorder,
    VerifyJob,
    build_training_state,
    initial_values,
)
from headway.verification.reference.batches import reference_batches
from headway.verification.reference.draw_sites import check_sites, unchanged
from headway.verification.reference.draws import begin_draws, initial_model
from headway.verification.reference.epochs import ReferenceEpochs, reference_epochs
from headway.verification.reference.monitor import SerialMonitor
from headway.verification.reference.random_laws import check_orders, check_sample_draws
from headway.verification.reference.recipes import batch_samples, check_amounts, check_seed
from headway.verification.reference.sources import check_source
from headway.verification.saved_facts import facts_of, numbers_of


def record_serial(_: LaunchEnv, job: VerifyJob, target: Path, *, ranks: int | None = None) -> None:
    """Run the recipe serially in float64 and save the recording to `target`.

    Args:
        ranks: None: every global batch goes through the model in one piece. A number: it goes
            through in the micro-batches that the plan has for so many ranks, one after the other,
            for models whose modules see a batch as a whole (batch normalisation).
    """
    recipe = job.load()
    buffers = CopyBuffers()
    _record(recipe, job, target, *_shares(recipe, job, ranks), partial(_step, recipe, buffers))


def _record(
    recipe: Recipe,
    job: VerifyJob,
    target: Path,
    split: BatchSplit,
    copies: int,
    make_step: Callable[[TrainingState, RandomDraws, Sequence[RankBatch], Recorder], float],
) -> None:
    """Record steps that `make_step` makes of the batches of all copies; it returns the loss."""
    model = to_float64(initial_model(recipe))
    if job.perturbed:
        perturb(model, job.perturbed)
    trained = build_training_state(recipe, model, reference=True)
    recorder, initial = Recorder(trained), initial_values(trained.model)
    monitor = SerialMonitor(recipe, trained.scheduler)
    sites: RandomDraws | None = None
    source = training_data(recipe)
    check_source(source)
    check_orders(known_length(source) or 0, recipe.seed)
    epochs = reference_epochs(recipe, source)
    _check_recipe(recipe, job, epochs)
    steps = reference_batches(
        source,
        split,
        copies,
        job.start(recipe, epochs.sizes_to_the_end),
        steps=job.count(recipe),
        drop_last=recipe.drop_last,
    )
    for step, batches in enumerate(steps, 1):
        # Once: a probe runs the model several times, and finds the same in every step.
        if sites is None:
            sites = find_draws(recipe, trained.model, batches)
            if sites.forward:
                check_sample_draws(recipe.seed)
        loss = make_step(trained, sites, batches, recorder)
        if not isfinite(loss):
            raise Diverged(
                f"the loss is {loss}",
                where=f"step {step} of the serial run",
                fix="Lower the learning rate, or check this batch's data.",
            )
        if trained.scheduler is not None and monitor.plateau is None:
            trained.scheduler.step()
        numbers = trained.tensors_by_kind()
        if job.whole and step in (job.steps, 2 * job.steps):
            numbers["facts"] = numbers_of(facts_of(trained, batches[0].after) | monitor.facts())
        recorder.take(step, loss, numbers, recorder.norm)
        if job.whole:
            first = batches[0]
            rate = float(trained.optimizer.param_groups[0]["lr"])
            recorder.told(step, {
                "lr": rate, "norm": recorder.norm, "samples": first.samples,
                "epoch": first.start.epoch, "position": first.start.position,
            })  # fmt: skip
        if job.whole and job.validates(step) and recipe.validation is not None:
            values = _validation(recipe, trained.model)
            recorder.validated(step, values)
            monitor.validated(step, values)
    replace(recorder.recording(), initial=initial).save(target)


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Move every parameter up or down by a unit in its last place, or leave it, at random.

    Args:
        seed: Of the draw, `VerifyJob.perturbed`.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        sign = torch.randint(-1, 2, parameter.shape, generator=generator).double()
        parameter.mul_(1.0 + torch.finfo(torch.float64).eps * sign.to(parameter.device))


def _check_recipe(recipe: Recipe, job: VerifyJob, epochs: ReferenceEpochs) -> None:
    """What reference and run take from the recipe by the same code."""
    batch, drawn = resolve_batch(recipe), epochs.drawn
    steps: int | None = None
    length = known_length(epochs.source)
    if drawn or length is None or length >= batch:
        steps = stop_steps(recipe, recipe_epoch_length(recipe, epochs.source))
    check_amounts(recipe, epochs.counted_sizes, batch=batch, steps=steps, drawn=drawn)
    check_seed(recipe, build_model)
    check_own_precision(load_recipe(job.recipe, job.overrides))


@torch.no_grad()
def _validation(recipe: Recipe, model: nn.Module) -> dict[str, float]:
    """The mean loss and metrics over the validation data, in evaluation mode."""
    source = validation_data(recipe)
    check_source(source)
    known, most = known_length(source), recipe.validation_samples
    samples = most if known is None else min(known, most or known)
    batch = min(samples or batch_samples(recipe), batch_samples(recipe))
    model.eval()
    found: dict[str, list[tuple[float, float]]] = {}
    statistics: dict[str, list[Statistic]] = {}
    for (share,) in reference_batches(
        source,
        BatchSplit(samples=batch),
        1,
        Cursor(seed=recipe.seed),
        steps=None,
        drop_last=False,
        in_order=samples,
    ):
        for micro in share.micros:
            samples = len(micro.positions)
            with double_precision(recipe.precision):
                value = recipe.loss(model, loss_inputs(micro, recipe))
                give_outputs(value, micro.absorb)
                values: dict[str, Any] = {"loss": value}
                if recipe.metrics is not None:
                    values |= recipe.metrics(model, loss_inputs(micro, recipe))
            for name, value in values.items():
                if isinstance(value, Statistic):
                    statistics.setdefault(name, []).append(value)
                    continue
                total, count = loss_sum(value, samples)
                found.setdefault(name, []).append((float(total), float(count)))
    model.train()
    # Of a metric that nothing counts there is no mean.
    return {name: _whole(parts) for name, parts in statistics.items()} | {
        name: fsum(total for total, _ in pairs) / (fsum(n for _, n in pairs) or nan)
        for name, pairs in found.items()
    }


def _whole(parts: Sequence[Statistic]) -> float:
    tensors = [part.part.double() for part in parts]
    rows = parts[0].join == "rows"
    return float(parts[0].final(torch.cat(tensors) if rows else torch.stack(tensors).sum(0)))


def find_draws(recipe: Recipe, model: nn.Module, shares: Sequence[RankBatch]) -> RandomDraws:
    """Where the model draws random numbers.

    Raises:
        NotEqual: The probe has changed something, or has found draws that are not there.
    """
    first = next(micro for share in shares for micro in share.micros)
    data = loss_inputs(first, recipe)
    with double_precision(recipe.precision):
        with unchanged(model), arithmetic(recipe):
            found = probe_random_draws(model, recipe.loss, data, resize_batch)
        if not found.doubts:
            check_sites(model, recipe.loss, data, found)
    return found


def _shares(recipe: Recipe, job: VerifyJob, ranks: int | None) -> tuple[BatchSplit, int]:
    """How a global batch is cut into micro-batches, and over how many copies."""
    if ranks is None:
        return BatchSplit(samples=batch_samples(recipe)), 1
    plan = recipe_plan(recipe, job.plan, ranks)
    if plan.batch.norm == "global":  # normalised in one piece
        return BatchSplit(samples=batch_samples(recipe)), 1
    return plan.batch, plan.data_degree


class CopyBuffers:
    """Buffers of each copy of the model: running statistics are of what this copy has seen.

    The copies of a split run have their own, and only those of the first are used: for validation,
    and in checkpoints. Its buffers are those that the model has between steps.
    """

    def __init__(self) -> None:
        self._held: list[dict[str, Tensor]] = []

    def micros(
        self, model: nn.Module, shares: Sequence[RankBatch]
    ) -> Iterator[tuple[MicroBatch, Cursor]]:
        """All micro-batches, each with the beginning of its batch; inside, the model has the
        buffers of the copy that computes it."""
        if not self._held:
            self._held = [_read_buffers(model) for _ in shares]
        if len(shares) > 1:
            self._held[0] = _read_buffers(model)
        for copy, share in enumerate(shares):
            if len(shares) > 1:
                _write_buffers(model, self._held[copy])
            for micro in share.micros:
                yield micro, share.start
            if len(shares) > 1:
                self._held[copy] = _read_buffers(model)
        if len(shares) > 1:
            _write_buffers(model, self._held[0])


def _read_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _write_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _step(
    recipe: Recipe,
    buffers: CopyBuffers,
    trained: TrainingState,
    sites: RandomDraws,
    shares: Sequence[RankBatch],
    recorder: Recorder,
) -> float:
    """One step; returns the loss."""
    model, samples = trained.model, shares[0].samples
    micros = buffers.micros(model, shares)
    sums, counts = gradients_of(recipe, model, sites, micros, samples)
    # What the loss is a sum over (words, pixels) is known only after the last micro-batch.
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(samples / counts)
    if recipe.clip is not None:
        recorder.before_clip(trained.tensors_by_kind())
        recorder.norm = float(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip))
    trained.optimizer.step()
    return sums / counts


def gradients_of(
    recipe: Recipe,
    model: nn.Module,
    sites: RandomDraws,
    micros: Iterable[tuple[MicroBatch, Cursor]],
    samples: int,
) -> tuple[float, float]:
    """Leave the sum of the gradients of micro-batches in the model.

    Args:
        micros: Each with the beginning of its global batch.
        samples: Losses are divided by it.

    Returns:
        The sum of the losses, not divided, and what it is a sum over.
    """
    model.zero_grad()  # not the optimiser's alone: all gradients are of this step
    sums, counts = 0.0, 0.0
    for micro, start in micros:
        begin_draws(recipe.seed, start.epoch, start.position)
        drawing = LogicalRandomness(sites, micro.positions, start.epoch).active()
        with double_precision(recipe.precision), drawing:
            with arithmetic(recipe):
                value = recipe.loss(model, loss_inputs(micro, recipe))
            give_outputs(value, micro.absorb)
            total, count = loss_sum(value, len(micro.positions))
            check_trains(total)
            (total / samples).backward()
        sums, counts = sums + float(total.detach()), counts + float(count)
    return sums, counts


def loss_sum(value: Any, samples: int) -> tuple[Tensor, Tensor | float]:
    """What a loss has returned, a mean over samples or a pair, as a sum and a count."""
    return value[:2] if isinstance(value, tuple) else (value * samples, float(samples))


def loss_inputs(micro: MicroBatch, recipe: Recipe) -> object:
    """What a loss gets: in float64, or as it was read."""
    return tree_map(_widened, micro.data) if recipe.precision == "float64" else micro.data


def arithmetic(recipe: Recipe) -> AbstractContextManager[Any]:
    """In which a forward pass computes: autocast for bfloat16, else as its parameters are."""
    half = recipe.precision == "bfloat16"
    return torch.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


Weights = dict[str, Tensor]


def cut_file(target: Path) -> Path:
    """Where the cut of an inexact pipeline is written beside a recording."""
    return target.with_suffix(".cut.json")


def save_cut(stages: ModelStages, target: Path) -> None:
    """For each stage the names of its parameters."""
    names = [list(stage.parameters) for stage in stages]
    cut_file(target).write_text(json.dumps(names), encoding="utf-8")


def record_delayed(
    _: LaunchEnv, job: VerifyJob, target: Path, *, ranks: int, stages: Sequence[Sequence[str]]
) -> None:
    """Run the recipe by its plan's table in one process, in float64; save the recording."""
    recipe = job.load()
    plan = recipe_plan(recipe, job.plan, ranks)

    def step(
        trained: TrainingState, sites: RandomDraws, batches: Sequence[RankBatch], _: Recorder
    ) -> float:
        table = plan.pipeline.make(plan.pipe_degree, len(batches[0].micros))
        return _Step(recipe, trained, table, stages, sites).run(batches)

    _record(recipe, job, target, plan.batch, plan.data_degree, step)


class _Step:
    """One step of the recipe with delayed updates, in one process."""

    def __init__(
        self,
        recipe: Recipe,
        trained: TrainingState,
        table: PipelineSchedule,
        stages: Sequence[Sequence[str]],
        sites: RandomDraws,
    ) -> None:
        self._recipe, self._trained, self._sites = recipe, trained, sites
        self._all = dict(trained.model.named_parameters())
        self._stages = stages
        self._groups = [update_groups(table, stage) for stage in range(len(stages))]
        self._versions = [
            {
                action.microbatch: action.version
                for _, action in table.actions()
                if action.kind == ActionKind.FORWARD and action.stage == stage
            }
            for stage in range(len(stages))
        ]
        # `history[v]` is what the table calls version v: the weights after v updates of the stage.
        self._history: list[list[Weights]] = [[self._read(stage)] for stage in range(len(stages))]
        self._gradients: dict[int, Weights] = {}
        self._counts: dict[int, float] = {}

    def run(self, batches: Sequence[RankBatch]) -> float:
        """All updates of the step; returns the mean loss."""
        pending = list(range(len(batches[0].micros)))
        total = 0.0
        # The table's order between stages plays no role here: a micro-batch runs as soon as the
        # versions that the table names for it exist.
        while pending:
            ready = [m for m in pending if self._is_ready(m)]
            assert ready, "a version that no group can make"
            pending.remove(ready[0])
            total += self._compute(ready[0], batches)
            for stage in range(len(self._stages)):
                self._step(stage)
        self._show()
        return total / sum(self._counts.values())

    def _is_ready(self, microbatch: int) -> bool:
        return all(
            versions[microbatch] < len(history)
            for versions, history in zip(self._versions, self._history, strict=True)
        )

    def _compute(self, microbatch: int, batches: Sequence[RankBatch]) -> float:
        """The gradients of a micro-batch of all copies, at the weights that the table names."""
        for stage, history in enumerate(self._history):
            self._write(history[self._versions[stage][microbatch]])
        micros = [(batch.micros[microbatch], batch.start) for batch in batches]
        loss, counted = gradients_of(self._recipe, self._trained.model, self._sites, micros, 1)
        # `zero_grad` sets `grad` to None, so that these tensors stay as they are.
        found = {name: p.grad for name, p in self._all.items() if p.grad is not None}
        self._gradients[microbatch], self._counts[microbatch] = found, counted
        self._trained.model.zero_grad()
        return loss

    def _step(self, stage: int) -> None:
        """All updates of a stage for which the gradients are there."""
        history = self._history[stage]
        while len(history) <= len(self._groups[stage]):
            group = self._groups[stage][len(history) - 1]
            if not all(m in self._gradients for m in group):
                return
            self._write(history[-1])
            for name, gradient in self._mean(stage, group).items():
                self._all[name].grad = gradient
            # No other stage's parameters have a gradient now, and the optimiser skips those without
            # one.
            self._trained.optimizer.step()
            self._trained.model.zero_grad()
            history.append(self._read(stage))

    def _mean(self, stage: int, group: Sequence[int]) -> Weights:
        count = sum(self._counts[m] for m in group) or 1.0
        found: Weights = {}
        for m in group:
            for name in self._stages[stage]:
                gradient = self._gradients[m].get(name)
                if gradient is not None:
                    so_far = found.get(name)
                    part = gradient.to_dense() / count if gradient.is_sparse else gradient / count
                    found[name] = part if so_far is None else so_far + part
        return found

    def _show(self) -> None:
        """The newest weights, and the gradients of the last update of each stage."""
        for stage, history in enumerate(self._history):
            self._write(history[-1])
            for name, gradient in self._mean(stage, self._groups[stage][-1]).items():
                self._all[name].grad = gradient

    def _read(self, stage: int) -> Weights:
        return {name: self._all[name].detach().clone() for name in self._stages[stage]}

    def _write(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, weight in weights.items():
                self._all[name].copy_(weight)
