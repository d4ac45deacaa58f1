"""One rank's whole life: join the world, build, resume, train, validate, save, stop in order.

Every rank runs the same lines; what only rank 0 does (events of the run, the showcase) is marked by
`self._log is not None`. A restart is nothing special: it is a start that finds a checkpoint.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

from headway.checkpoint.manifest import Manifest
from headway.checkpoint.store import CheckpointStore
from headway.data import Cursor, Loader, RankBatch, as_source
from headway.errors import CheckpointError, CheckpointMismatch, HeadwayError, PlanError, WorkerFailed
from headway.plan import BatchSplit, Plan, data_parallel, explain
from headway.run.alike import share_buffers
from headway.run.amounts import resolve_batch, stop_steps
from headway.run.directory import RunDirectory, environment
from headway.run.events import EventLog
from headway.run.executor import Executor
from headway.run.memory import resident_bytes
from headway.run.place import Place
from headway.run.randomness import generators_restored, seed_everything
from headway.run.recipe import Recipe
from headway.run.recipe_file import load_recipe
from headway.run.reference import describe_recipe, importable
from headway.run.signals import StopRequest
from headway.run.training_state import Trained
from headway.run.world import World, translate
from headway.timeline import Span

_INIT = 0x494E4954
"""Keeps the numbers that initialise a model apart from those of its steps."""


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What `train` is asked to do; the same on every rank, and safe to send to a process.

    Attributes:
        recipe: Path of a recipe.toml, "module:function", or a bundled workload.
        overrides: "key=value" changes to the recipe.
        directory: The run directory; all ranks must see it.
        plan: A plan file; None: data parallelism over all ranks.
        resume: Go on from the newest sound checkpoint of the directory.
        device: "cpu", "cuda" or "auto".
        timeout_seconds: Longest wait for another rank.
        trace_every: Steps between detailed timelines; the first steps are always traced.
    """

    recipe: str
    directory: Path
    overrides: tuple[str, ...] = ()
    plan: Path | None = None
    resume: bool = False
    device: str = "auto"
    timeout_seconds: float = 300.0
    trace_every: int = 50


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank's training ended; the same on every rank.

    Attributes:
        steps: Optimiser steps done since the beginning of the run.
        loss: Of the last step.
        validation: Of the last validation; None where the recipe has no validation data.
        stopped_by: The signal that stopped the run, or None when it is complete.
    """

    steps: int
    loss: float
    validation: float | None
    stopped_by: str | None


def train(place: Place, job: TrainJob) -> Outcome:
    """Train as one rank of the world found at `place`.

    Raises:
        HeadwayError: With rank and step; exceptions of the user's code become `WorkerFailed`.
    """
    step = _StepCounter()
    folders = [Path.cwd(), *([Path(job.recipe).parent] if job.recipe.endswith(".toml") else [])]
    try:
        with importable(*folders), ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            world = stack.enter_context(
                World.join(place, device=job.device, timeout_seconds=job.timeout_seconds)
            )
            return _Training(job, world, stop, step, stack).run()
    except HeadwayError as error:
        error.where = error.where or f"rank {place.rank}, step {step.current}"
        raise
    except Exception as error:
        raise WorkerFailed(
            f"{type(error).__name__}: {error}",
            where=f"rank {place.rank}, step {step.current}",
            why=f"Raised in {_origin(error)}.",
            fix="Mend the cause, then go on with --resume.",
        ) from error


@dataclass(slots=True)
class _StepCounter:
    """The step that is being worked on, for messages."""

    current: int = 0


def build_model(recipe: Recipe) -> torch.nn.Module:
    """The model with the initial parameters that every rank and every plan starts from."""
    seed_everything(recipe.seed, _INIT)
    return recipe.model()


class _Training:
    """The training loop of one rank."""

    def __init__(
        self,
        job: TrainJob,
        world: World,
        stop: StopRequest,
        counter: _StepCounter,
        stack: ExitStack,
    ) -> None:
        self._job = job
        self._world = world
        self._stop = stop
        self._counter = counter
        self._stack = stack
        self._directory = RunDirectory(job.directory)
        self._log: EventLog | None = None
        self._validation: float | None = None

    def run(self) -> Outcome:
        """Everything from the recipe to the last checkpoint."""
        self._prepare()
        with self._warnings_as_events():
            self._build()
            cursor = self._restore()
            total = stop_steps(self._recipe, len(self._data))
            self._announce(total)
            loader = self._stack.enter_context(
                self._executor.loader(
                    self._data,
                    cursor=cursor,
                    epochs=None,
                    workers=self._recipe.workers,
                    drop_last=self._recipe.drop_last,
                )
            )
            stopped_by = self._train(iter(loader), total)
            return self._finish(total, stopped_by)

    # -- before the first step ---------------------------------------------------------------

    def _prepare(self) -> None:
        """Recipe, plan and run directory; rank 0 writes, everybody else finds it."""
        job, world = self._job, self._world
        self._recipe = load_recipe(job.recipe, job.overrides)
        self._plan = self._choose_plan()
        first = world.place.attempt == 0
        if world.rank == 0:
            if first:
                self._directory.check_free(resume=job.resume)
                self._directory.describe(
                    describe_recipe(self._recipe, job.recipe),
                    self._plan,
                    environment(
                        torch_version=torch.__version__,
                        device=str(world.device),
                        backend=world.backend,
                        cores=os.cpu_count() or 1,
                    ),
                )
            self._log = self._stack.enter_context(
                EventLog(self._directory.events_file, attempt=world.place.attempt)
            )
        world.barrier("opening the run directory")
        self._rank_log = self._stack.enter_context(
            EventLog(self._directory.rank_file(world.rank), attempt=world.place.attempt)
        )

    def _choose_plan(self) -> Plan:
        recipe, ranks = self._recipe, self._world.ranks
        samples = resolve_batch(recipe)
        if self._job.plan is None:
            return data_parallel(
                samples,
                processes=ranks,
                microbatch=recipe.microbatch,
                precision=recipe.precision,
            )
        plan = Plan.load(self._job.plan)
        if plan.batch.samples != samples:
            raise PlanError(
                "the plan is for another recipe",
                where=str(self._job.plan),
                problems=[f"batch: {plan.batch.samples} in the plan, {samples} in the recipe"],
                fix="Change batch.samples of the plan, or the batch of the recipe.",
            )
        return plan

    def _build(self) -> None:
        recipe = self._recipe
        model = build_model(recipe).to(self._world.device)
        if self._plan.memory.precision == "float64":
            model.to(torch.float64)
        optimizer = recipe.optimizer(model)
        scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
        self._data = as_source(recipe.data())
        self._trained = Trained(model, optimizer, scheduler)
        self._executor = Executor(
            model,
            optimizer,
            loss=recipe.loss,
            plan=self._plan,
            scheduler=scheduler,
            clip=recipe.clip,
            seed=recipe.seed,
            world=self._world,
        )
        self._store = CheckpointStore(
            self._directory.checkpoints,
            rank=self._world.rank,
            ranks=self._world.ranks,
            group=self._world.side_group,
            keep=recipe.checkpoint_keep,
        )
        # After an error the peers of a save that is under way may never answer.
        self._stack.push(lambda kind, *_: self._store.close(wait=kind is None))
        if self._plan.ranks > 1 or self._plan.batch.microbatch:
            self._warn_of_batch_norm(model)

    def _warn_of_batch_norm(self, model: torch.nn.Module) -> None:
        kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        if names and self._log is not None:
            self._warn(
                f"{names[0]} and {len(names) - 1} more normalise each micro-batch by itself: this "
                "run is not exactly the serial one; GroupNorm or LayerNorm would be exact"
                if len(names) > 1
                else f"{names[0]} normalises each micro-batch by itself: this run is not exactly "
                "the serial one; GroupNorm or LayerNorm would be exact"
            )

    def _restore(self) -> Cursor:
        """Where to begin: the newest sound checkpoint, or the beginning."""
        beginning = Cursor(seed=self._recipe.seed, epoch=0, position=0)
        if not self._job.resume and self._world.place.attempt == 0:
            return beginning
        destinations: dict[str, torch.Tensor] = {}

        def prepare(manifest: Manifest) -> dict[str, torch.Tensor]:
            destinations.clear()
            destinations.update(self._trained.destinations(manifest))
            return destinations

        with self._storing():
            manifest = self._store.restore(prepare)
        if manifest is None:
            return beginning
        cursor = Cursor.from_dict(manifest.facts["cursor"])
        if cursor.seed != self._recipe.seed:
            raise CheckpointMismatch(
                f"the checkpoint was made with seed {cursor.seed}, the recipe has "
                f"{self._recipe.seed}",
                why="Samples would be seen twice or never, because the seed decides their order.",
                fix=f"Set seed = {cursor.seed}, or use a new run directory.",
            )
        self._trained.apply(manifest, destinations)
        self._executor.steps_done = manifest.step
        if self._log is not None:
            self._log.write("resume", step=manifest.step, checkpoint=manifest.step)
        return cursor

    def _announce(self, total: int) -> None:
        if self._log is None:
            return
        recipe = self._recipe
        self._log.write(
            "start",
            step=self._executor.steps_done,
            steps=total,
            ranks=self._world.ranks,
            batch=self._plan.batch.equation(self._plan.data_degree, recipe.tokens_per_sample),
            plan=explain(self._plan, recipe.tokens_per_sample),
        )

    # -- the loop ----------------------------------------------------------------------------

    def _train(self, batches: Iterator[RankBatch], total: int) -> str | None:
        """Step until the recipe's end or a signal; returns the signal's name."""
        run, recipe = self._executor, self._recipe
        first = run.steps_done + 1
        while run.steps_done < total:
            self._counter.current = run.steps_done + 1
            with self._storing():
                self._store.check()
            start = perf_counter()
            batch = next(batches)
            waited = perf_counter() - start
            run.wants_stop = self._stop.requested is not None
            run.step(batch)
            self._report(batch, perf_counter() - start, waited)
            if run.steps_done == first:
                self._store.reserve(self._trained.tensors())
            stopping = run.record.votes > 0
            last = run.steps_done == total
            if stopping or last or _due(recipe.checkpoint_every, run.steps_done):
                self._save(batch.after)
            if stopping:
                return self._stop.requested or "another rank"
            if last or _due(recipe.validate_every, run.steps_done):
                self._validate()
        return None

    def _report(self, batch: RankBatch, seconds: float, waited: float) -> None:
        run, record = self._executor, self._executor.record
        step = run.steps_done
        self._rank_log.write(
            "rank_step",
            step=step,
            seconds=seconds,
            compute=record.seconds("forward", "backward"),
            exposed=record.seconds("wait"),
            data=waited,
            update=record.seconds("update"),
            memory_bytes=resident_bytes(self._world.device),
        )
        if step <= 3 or _due(self._job.trace_every, step):
            self._trace(step, waited)
        if self._log is not None:
            self._log.write(
                "step",
                step=step,
                loss=record.loss,
                samples=record.samples,
                epoch=batch.start.epoch,
                position=batch.start.position,
                seconds=seconds,
                rate=record.samples / seconds,
                lr=float(self._trained.optimizer.param_groups[0]["lr"]),
                norm=record.norm,
            )

    def _trace(self, step: int, waited: float) -> None:
        spans = self._executor.record.spans
        begin = spans[0].start
        read = Span(
            rank=self._world.rank,
            lane="data",
            kind="data",
            label="read the batch",
            start=begin - waited,
            end=begin,
            node=f"step {step}",
        )
        for span in (read, *spans):
            self._rank_log.write("span", step=step, **_row(span))

    def _save(self, after: Cursor) -> None:
        run = self._executor
        share_buffers(self._trained.model, self._world)
        start = time()
        with self._storing():
            receipt = self._store.save(
                run.steps_done,
                self._trained.tensors(),
                {**self._trained.facts(), "cursor": after.to_dict()},
            )
        span = Span(
            rank=self._world.rank,
            lane="checkpoint",
            kind="checkpoint",
            label="stage the checkpoint",
            start=start,
            end=time(),
            node=f"step {run.steps_done}",
        )
        self._rank_log.write("span", step=run.steps_done, **_row(span))
        if self._log is not None:
            self._log.write(
                "checkpoint",
                step=run.steps_done,
                bytes=receipt.bytes,
                held_seconds=receipt.held_seconds,
            )

    def _validate(self) -> None:
        recipe, run = self._recipe, self._executor
        if recipe.validation is None:
            return
        start = perf_counter()
        share_buffers(self._trained.model, self._world)
        source = as_source(recipe.validation())
        samples = min(len(source), recipe.validation_samples or len(source))
        batch = BatchSplit(
            samples=min(samples, self._plan.batch.samples), microbatch=self._plan.batch.microbatch
        )
        with Loader(
            source,
            batch,
            rank=self._world.rank,
            ranks=self._plan.data_degree,
            cursor=Cursor(seed=recipe.seed, epoch=0, position=0),
            shuffle=False,
            epochs=1,
            limit=samples,
        ) as loader:
            self._validation, seen = run.evaluate(loader)
        if self._log is not None:
            self._log.write(
                "validation",
                step=run.steps_done,
                loss=self._validation,
                samples=seen,
                seconds=perf_counter() - start,
            )

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """A checkpoint that fails because a peer has died is not the cause of the trouble."""
        try:
            yield
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, RuntimeError):
                lost = translate(cause, self._world, "a checkpoint")
                if lost is not None:
                    raise lost from error
            raise

    # -- the end -----------------------------------------------------------------------------

    def _finish(self, total: int, stopped_by: str | None) -> Outcome:
        run = self._executor
        with self._storing():
            self._store.wait()
        if self._log is not None:
            if stopped_by is None and self._recipe.showcase is not None:
                self._log.write("showcase", step=run.steps_done, text=self._showcase())
            self._log.write("stop", step=run.steps_done, reason=stopped_by or "complete")
        self._world.barrier("the end of the run")
        return Outcome(
            steps=run.steps_done,
            loss=run.record.loss,
            validation=self._validation,
            stopped_by=stopped_by,
        )

    def _showcase(self) -> str:
        assert self._recipe.showcase is not None
        self._trained.model.eval()
        with torch.no_grad(), generators_restored():
            return self._recipe.showcase(self._trained.model)

    # -- warnings ----------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        if self._log is not None:
            self._log.write("warning", text=text)

    @contextmanager
    def _warnings_as_events(self) -> Iterator[None]:
        """Warnings of rank 0 become events, so that they are shown once and kept in the report."""
        with warnings.catch_warnings():
            if self._log is not None:
                warnings.simplefilter("default")
                warnings.showwarning = self._show
            yield

    def _show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._warn(str(message))


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _row(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in Span.__slots__}


def _origin(error: BaseException) -> str:
    """File and line of the innermost frame of the user's own code, else of the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent.parent)
    users = [f for f in frames if "site-packages" not in f.filename and own not in f.filename]
    frame = (users or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
