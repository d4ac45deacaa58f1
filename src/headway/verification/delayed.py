"""The law of schedules without a flush: delayed updates, emulated by one process.

The same table, carried out micro-batch by micro-batch on the whole model: each stage has the
weights of the version that the table names, a STEP applies the mean gradient of its group to the
newest. Written without the executor on purpose. What it must equal: the split run, to 1e-12.
Sources: PipeDream (Narayanan et al., SOSP 2019), PipeDream-2BW (ICML 2021).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headway.data import RankBatch
from headway.parallel import Stages
from headway.run.parts import sum_and_count, to_float64
from headway.run.place import Place
from headway.run.randomness import LogicalRandomness, Sites, probe, seed_everything
from headway.run.recipe import Recipe
from headway.run.start import plan_of
from headway.run.training import build_model
from headway.run.training_state import Trained
from headway.run.trees import resize
from headway.schedule import Kind, PipelineSchedule
from headway.schedule.groups import groups_of
from headway.verification.record import Recorder, VerifyJob, build
from headway.verification.serial import data_of, steps_of

Weights = dict[str, Tensor]


def cut_file(target: Path) -> Path:
    """Where the cut of an inexact pipeline is written beside a recording."""
    return target.with_suffix(".cut.json")


def save_cut(stages: Stages, target: Path) -> None:
    """For each stage the names of its parameters."""
    names = [list(stage.parameters) for stage in stages]
    cut_file(target).write_text(json.dumps(names), encoding="utf-8")


def record_delayed(
    _: Place, job: VerifyJob, target: Path, *, ranks: int, stages: Sequence[Sequence[str]]
) -> None:
    """Run the recipe by its plan's table in one process, in float64; save the recording.

    Args:
        _: Alone.
        job: As of the split run.
        target: The recording.
        ranks: Of the split run.
        stages: For each stage the names of its parameters.
    """
    recipe = job.load()
    plan = plan_of(recipe, job.plan, ranks)
    trained = build(recipe, to_float64(build_model(recipe)))
    recorder = Recorder(trained)
    sites: Sites | None = None
    for step, batches in enumerate(steps_of(recipe, job, plan.batch, plan.data_degree), 1):
        first = batches[0].micros[0]
        sites = sites or probe(trained.model, recipe.loss, data_of(first), resize)
        table = plan.pipeline.make(plan.pipe_degree, len(batches[0].micros))
        loss = _Step(recipe, trained, table, stages, sites).run(batches)
        if trained.scheduler is not None:
            trained.scheduler.step()
        recorder.take(step, loss, trained.numbers())
    recorder.recording().save(target)


class _Step:
    """One step of the recipe."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Trained,
        table: PipelineSchedule,
        stages: Sequence[Sequence[str]],
        sites: Sites,
    ) -> None:
        self._recipe, self._trained, self._sites = recipe, trained, sites
        self._all = dict(trained.model.named_parameters())
        self._stages = stages
        self._groups = [groups_of(table, stage) for stage in range(len(stages))]
        self._versions = [
            {
                action.microbatch: action.version
                for _, action in table.actions()
                if action.kind == Kind.FORWARD and action.stage == stage
            }
            for stage in range(len(stages))
        ]
        self._history: list[list[Weights]] = [[self._read(stage)] for stage in range(len(stages))]
        self._gradients: dict[int, Weights] = {}
        self._counts: dict[int, float] = {}

    def run(self, batches: Sequence[RankBatch]) -> float:
        """All updates of the step; returns the mean loss."""
        pending = list(range(len(batches[0].micros)))
        total = 0.0
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
        """The gradients of a micro-batch of all copies, at the weights that it is to see."""
        for stage, history in enumerate(self._history):
            self._write(history[self._versions[stage][microbatch]])
        self._trained.model.zero_grad()
        loss, counted = 0.0, 0.0
        for batch in batches:
            micro, start = batch.micros[microbatch], batch.start
            seed_everything(self._recipe.seed, start.epoch, start.position)
            with LogicalRandomness(self._sites, micro.positions, start.epoch):
                value = self._recipe.loss(self._trained.model, data_of(micro))
                total, count = sum_and_count(value, len(micro.positions))
                total.backward()
            loss, counted = loss + float(total.detach()), counted + float(count)
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
