"""The training loop of one rank: build, resume, train, validate, save, stop.

Every rank runs the same lines; what only rank 0 does (the events of the run, the showcase) goes
through its `Journal`. A restart is a start that finds a checkpoint.

`CheckpointInventory`: in a pipeline each rank has a part of the checkpoint. `StopRequest`: SIGTERM,
SIGHUP and the first Ctrl-C set a flag that the loop reads.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, perf_counter, time
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from headway.channel.facts import gather_facts
from headway.checkpoint.format import Manifest
from headway.checkpoint.save_plan import HeldTensorSpec, Holdings
from headway.checkpoint.staging import specs_of
from headway.checkpoint.store import CheckpointStore
from headway.data import CachedSource, Cursor, Loader, RankBatch, as_source
from headway.errors import (
    CheckpointError,
    CheckpointMismatch,
    HeadwayError,
    UsageError,
    WorkerFailed,
)
from headway.plans import BatchSplit, explain, with_collective
from headway.run.distributed.failure_record import summarize_exception
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World, translate_exception
from headway.run.executor import Executor
from headway.run.recipe.batch_units import stop_steps
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.user_code import describe_recipe, importable_folders, user_frame
from headway.run.step.batch import NO_SHOWCASE, first_readers, rank_source, reads_sample_parts
from headway.run.step.forward_pass import to_float64
from headway.run.step.memory import keep_freed_memory
from headway.run.step.randomness import build_model, generators_restored
from headway.run.step.setup import recipe_plan
from headway.run.strategy.training_state import Facts, TrainingState
from headway.run.training.job import TrainingOutcome, TrainJob
from headway.run.training.journal import Journal
from headway.run.training.run_directory import RunDirectory, describe_environment


class CheckpointInventory:
    """What each rank holds of a checkpoint, as the ranks have reported it to each other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[str, HeldTensorSpec] = {}
        self._known: list[dict[str, HeldTensorSpec]] = [{}] * world.ranks

    def agree(self, tensors: Mapping[str, Tensor], facts: Facts) -> tuple[Holdings, Facts]:
        """Who has which tensors, and the facts of all ranks together; collective."""
        own = specs_of(tensors)
        # Names and shapes are the bulk of it, and change only when parameters are frozen.
        news = own if own != self._told else None
        self._told = own
        # On the default group, from the main thread: the side group belongs to the checkpoint that
        # may still be being written.
        with self._world.explained("agreeing on a checkpoint"):
            found = gather_facts((news, facts["optimizer"]["scalars"]))
        self._known = [
            known if specs is None else specs
            for known, (specs, _) in zip(self._known, found, strict=True)
        ]
        scalars = {name: values for _, told in found for name, values in told.items()}
        optimizer = {**facts["optimizer"], "scalars": dict(sorted(scalars.items()))}
        return Holdings.of(self._known), {**facts, "optimizer": optimizer}


class Training:
    """The training of one rank; `run` is its whole life.

    Attributes:
        current: The step in progress, for messages.
        trained: Model, optimiser and scheduler; known, as `executor` is, after `begin`.
    """

    def __init__(self, job: TrainJob, world: World, stop: StopRequest, stack: ExitStack) -> None:
        self.current = 0
        self._job = job
        self._world = world
        self._stop = stop
        self._stack = stack
        self._directory = RunDirectory(job.directory)
        self._validation: float | None = None

    def run(self) -> TrainingOutcome:
        """Train from the recipe to the last checkpoint."""
        self.prepare()
        with self._journal.warnings():
            total = self.begin()
            stopped_by = self._train(total)
            return self._finish(stopped_by)

    def prepare(self) -> None:
        """Recipe, plan, and the run directory."""
        self._recipe = load_recipe(self._job.recipe, self._job.overrides)
        job, world = self._job, self._world
        given = job.find(world) if job.find is not None else job.plan
        self._plan = recipe_plan(self._recipe, given, world.ranks)
        if job.collective is not None:
            self._plan = with_collective(self._plan, job.collective, job.carrier)
        self._open()

    def begin(self) -> int:
        """Build everything and restore a checkpoint, if any; returns the steps of the run."""
        self._build()
        self._cut()
        cursor = self._restore()
        total = stop_steps(self._recipe, len(self._data))
        self._announce(total)
        loader = self.executor.loader(
            self._data,
            cursor=cursor,
            epochs=None,
            workers=self._recipe.workers,
            drop_last=self._recipe.drop_last,
        )
        self._stack.enter_context(loader)
        self._batches = iter(loader)
        if self._job.proving and self.executor.steps_done:
            self._after = cursor
            self._save()
        return total

    # -- before the first step ---------------------------------------------------------------

    def _open(self) -> None:
        job, world = self._job, self._world
        # Later attempts of the same launch go on in a directory that is already described, unless
        # the first one was killed before.
        first = world.place.attempt == 0 or job.resume
        if world.rank == 0 and (first or not self._directory.recipe_file.exists()):
            self._directory.check_free(resume=job.resume)
            self._directory.describe(
                describe_recipe(self._recipe, job.recipe),
                self._plan,
                describe_environment(
                    torch_version=torch.__version__,
                    device=str(world.device),
                    backend=world.backend,
                ),
            )
        # The others look for what rank 0 has written.
        world.barrier("opening the run directory")
        if not self._directory.recipe_file.exists():
            raise UsageError(
                "the ranks do not see the same run directory",
                where=f"rank {world.rank}, {self._directory.path.absolute()}",
                fix="Give a --directory on a file system that all machines share.",
            )
        self._journal = Journal(
            self._directory, world, trace_every=job.trace_every, stack=self._stack
        )

    def _build(self) -> None:
        recipe = self._recipe
        keep_freed_memory()
        model = build_model(recipe).to(self._world.device)
        if self._plan.memory.precision == "float64":
            to_float64(model)
        optimizer = recipe.optimizer(model)
        scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
        self._data = as_source(recipe.data())
        self.trained = TrainingState(model, optimizer, scheduler)
        self.executor = Executor(
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
            late=self._job.proving,
        )
        # After an error the peers of a save in progress may never answer: do not wait for them.
        self._stack.push(lambda kind, *_: self._store.close(wait=kind is None))
        if self._plan.ranks > 1 or self._plan.batch.microbatch:
            self._warn_of_batch_norm(model)

    def _cut(self) -> None:
        # Before a checkpoint is read: each rank reads only what it keeps.
        self._inventory: CheckpointInventory | None = None
        if self._plan.split.tensor or (self._plan.memory.zero and self._plan.ranks > 1):
            self._inventory = CheckpointInventory(self._world)
        if self._plan.pipe_degree == 1 and not self._plan.split.tensor:
            return
        self._world.doing("cuts the model")
        first: RankBatch | None = None
        if self._world.rank in first_readers(self._data, self._plan):
            options: dict[str, Any] = {"epochs": 1, "drop_last": self._recipe.drop_last}
            with self.executor.loader(self._data, alone=True, **options) as loader:
                first = next(iter(loader))
        self.executor.cut(first)
        held = self.executor.strategy.parameters
        self.trained = replace(self.trained, away=held.away, layout=held.layers)
        self._inventory = CheckpointInventory(self._world)

    def _warn_of_batch_norm(self, model: torch.nn.Module) -> None:
        kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        if names:
            self._journal.event(
                "warning",
                text=f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: batch "
                "normalisation sees one micro-batch at a time, so this run is not exactly the "
                "serial one; GroupNorm or LayerNorm would be",
            )

    def _restore(self) -> Cursor:
        """The position to start from: that of the newest sound checkpoint, or the beginning."""
        beginning = Cursor(seed=self._recipe.seed)
        if not self._job.resume and self._world.place.attempt == 0:
            return beginning
        destinations: dict[str, torch.Tensor] = {}

        def prepare(manifest: Manifest) -> dict[str, torch.Tensor]:
            destinations.update(self.trained.destinations(manifest))
            return destinations

        with self._storing():
            manifest = self._store.restore(prepare)
        if manifest is None:
            return beginning
        # A checkpoint made from weights alone has no cursor: training begins with them.
        cursor = Cursor.from_dict(manifest.facts.get("cursor", beginning.to_dict()))
        if cursor.seed != self._recipe.seed:
            raise CheckpointMismatch(
                f"the checkpoint was made with seed {cursor.seed}, the recipe has "
                f"{self._recipe.seed}",
                why="Samples would be seen twice or never, because the seed decides their order.",
                fix=f"Set seed = {cursor.seed}, or use a new run directory.",
            )
        self.trained.apply(manifest, destinations)
        self.executor.strategy.restore_exchange(destinations)
        self.executor.steps_done = manifest.step
        self._journal.event("resume", step=manifest.step, checkpoint=manifest.step)
        return cursor

    def _announce(self, total: int) -> None:
        tokens = self._recipe.tokens_per_sample
        expected = self._plan.prediction
        self._journal.event(
            "start",
            step=self.executor.steps_done,
            steps=total,
            ranks=self._world.ranks,
            batch=self._plan.batch.equation(
                self._plan.data_degree, tokens, pipe=self._plan.pipe_degree
            ),
            plan=explain(self._plan, tokens),
            predicted=None if expected is None else asdict(expected),
        )

    # -- the loop ----------------------------------------------------------------------------

    def _train(self, total: int) -> str | None:
        """Step until the end of the recipe or a signal; returns the signal's name."""
        run, recipe = self.executor, self._recipe
        first = run.steps_done + 1
        while run.steps_done < total:
            self.current = run.steps_done + 1
            if self._job.before_step is not None:
                self._job.before_step(self._world.place, self.current)
            # A failed save ends the job at the next step, not only at the next save.
            with self._storing():
                self._store.check()
            self.step()
            if run.steps_done == first:
                # Only now the optimiser has state, so that the size of a checkpoint is known.
                tensors, _, holdings = self._contents()
                self._store.reserve(tensors, holdings)
            # By the votes of all ranks, not by this rank's signal: all stop after the same step.
            stopping, last = run.record.votes > 0, run.steps_done == total
            if stopping or last or _due(recipe.checkpoint_every, run.steps_done):
                self._save()
            if stopping:
                # The vote may be another rank's, which alone has got the signal.
                return self._stop.requested or "another rank"
            if last or _due(recipe.validate_every, run.steps_done):
                self._validate()
        return None

    def step(self) -> None:
        """One optimiser step, and its entry in the journal."""
        run = self.executor
        start = perf_counter()
        self._world.doing("data of step %d", run.steps_done + 1)
        batch = next(self._batches)
        waited = perf_counter() - start
        self._world.doing("computes step %d", run.steps_done + 1)
        run.wants_stop = self._stop.requested is not None
        run.step(batch)
        self._after = batch.after
        remarks = run.strategy.context.remarks
        while remarks:
            self._journal.event("note", step=run.steps_done, text=remarks.pop(0))
        self._journal.step(
            run.steps_done,
            batch,
            run.record,
            seconds=perf_counter() - start,
            waited=waited,
            lr=float(self.trained.optimizer.param_groups[0]["lr"]),
        )

    def _contents(self) -> tuple[dict[str, torch.Tensor], Facts, Holdings | None]:
        """This rank's part of a checkpoint, the facts, and who holds what; collective."""
        tensors = {**self.trained.tensors(), **self.executor.strategy.exchange_state()}
        facts = self.trained.facts()
        if self._inventory is None:
            return tensors, facts, None
        holdings, facts = self._inventory.agree(tensors, facts)
        return tensors, facts, holdings

    def _save(self) -> None:
        step = self.executor.steps_done
        # With priority the last update may still be on its way.
        self.executor.flush()
        self._world.doing("the checkpoint of step %d", step)
        # Running statistics differ between ranks; a checkpoint holds one set, with which all go on.
        self.executor.strategy.parameters.share_buffers()
        start = time()
        with self._storing():
            tensors, facts, holdings = self._contents()
            facts["cursor"] = self._after.to_dict()
            receipt = self._store.save(step, tensors, facts, holdings)
        self._journal.span(step, "checkpoint", "checkpoint", "stage the checkpoint", start, time())
        self._journal.event(
            "checkpoint", step=step, bytes=receipt.bytes, held_seconds=receipt.held_seconds
        )

    def _validate(self) -> None:
        recipe, plan = self._recipe, self._plan
        if recipe.validation is None:
            return
        start = perf_counter()
        self._world.doing("the validation after step %d", self.executor.steps_done)
        source = rank_source(recipe.validation(), plan, self._world.rank)
        samples = min(len(source), recipe.validation_samples or len(source))
        batch = BatchSplit(
            samples=min(samples, plan.batch.samples),
            microbatch=plan.batch.largest(plan.data_degree),
        ).shared_as(plan.batch, plan.data_degree)
        with Loader(
            source,
            batch,
            rank=plan.data_rank(self._world.rank),
            ranks=plan.data_degree,
            cursor=Cursor(seed=recipe.seed),
            # The same samples at every validation, so that their losses can be compared.
            shuffle=False,
            epochs=1,
            limit=samples,
        ) as loader:
            self._validation, seen = self.executor.evaluate(loader)
        self._journal.event(
            "validation",
            step=self.executor.steps_done,
            loss=self._validation,
            samples=seen,
            seconds=perf_counter() - start,
        )

    @contextmanager
    def _storing(self) -> Iterator[None]:
        # A checkpoint that fails because a peer has died is not the cause: report the lost peer.
        try:
            yield
        except (CheckpointError, RuntimeError) as error:
            cause = error if isinstance(error, RuntimeError) else error.__cause__
            if isinstance(cause, RuntimeError):
                lost = translate_exception(cause, self._world, "a checkpoint")
                if lost is not None:
                    raise lost from error
            raise

    # -- the end -----------------------------------------------------------------------------

    def _finish(self, stopped_by: str | None) -> TrainingOutcome:
        run, showcase = self.executor, self._recipe.showcase
        self._world.doing("the end of the run after step %d", run.steps_done)
        self.executor.flush()
        with self._storing():
            # Before the event "stop": a run is complete only with its last checkpoint.
            self._store.wait()
        if stopped_by is None and showcase is not None:
            # On all ranks, because gathering the model is collective; rank 0 alone shows it.
            with run.whole() as model:
                self._show(model)
        if isinstance(self._data, CachedSource):
            self._journal.event(
                "data_cache", step=run.steps_done, **self._data.statistics().to_dict()
            )
        self._journal.event("stop", step=run.steps_done, reason=stopped_by or "complete")
        self._world.barrier("the end of the run")
        return TrainingOutcome(
            steps=run.steps_done,
            loss=run.record.loss,
            validation=self._validation,
            stopped_by=stopped_by,
        )

    def _show(self, model: torch.nn.Module) -> None:
        """Write the recipe's showcase to the journal, on rank 0."""
        assert self._recipe.showcase is not None
        if self._world.rank == 0:
            model.eval()
            with torch.no_grad(), generators_restored():
                left_out = reads_sample_parts(self._data, self._plan)
                text = NO_SHOWCASE if left_out else self._recipe.showcase(model)
            self._journal.event("showcase", step=self.executor.steps_done, text=text)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def train(place: LaunchEnv, job: TrainJob) -> TrainingOutcome:
    """Train as one rank of the world found at `place`.

    Raises:
        HeadwayError: With rank and step; exceptions of the user's code become `WorkerFailed`.
    """
    world: World | None = None
    training: Training | None = None
    folders = [Path.cwd()]
    if isinstance(job.recipe, str) and job.recipe.endswith(".toml"):
        # The user's modules are imported throughout the run, not only while the recipe is built.
        folders.append(Path(job.recipe).parent)
    try:
        with importable_folders(*folders), ExitStack() as stack:
            world = stack.enter_context(
                World.join(
                    place,
                    device=job.device,
                    timeout_seconds=job.timeout_seconds,
                    patience_seconds=job.patience_seconds,
                )
            )
            stop = stack.enter_context(StopRequest())
            training = Training(job, world, stop, stack)
            return training.run()
    except HeadwayError as error:
        error.where = error.where or _where(place, training)
        raise
    except Exception as error:
        # The exception may be what a broken connection looks like from inside.
        lost = None if world is None else _lost(error, world)
        if lost is not None:
            raise lost from error
        place_in_code, source = user_frame(error)
        raise WorkerFailed(
            summarize_exception(error),
            where=_where(place, training),
            why=f"Raised at {place_in_code}: {source}",
            fix="Fix the cause, then rerun with --resume.",
        ) from error


def _lost(error: Exception, world: World) -> HeadwayError | None:
    """The error of an exchange that the user's own code has made, or of a lost rank."""
    if isinstance(error, RuntimeError):
        return translate_exception(error, world, "an exchange of your own code") or world.lost()
    return world.lost()


def _where(place: LaunchEnv, training: Training | None) -> str:
    return f"rank {place.rank}, step {training.current if training else 0}"


# A terminal's Ctrl-C may arrive twice: from the terminal and again from the launching agent.
SAME_REQUEST_SECONDS = 0.5


class StopRequest:
    """Context manager that turns signals into a request; does nothing outside the main thread.

    Attributes:
        requested: Name of the first signal that came ("SIGTERM", "SIGINT", "SIGHUP"), else None.

    Once the request is a Ctrl-C, another signal that comes more than half a second later raises
    KeyboardInterrupt: on a second Ctrl-C the agent of the workers sends them SIGTERM.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before = signal.getsignal(number)
            # nohup: who started the job asked for it to survive the terminal.
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue
            self._previous[number] = before
            signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._previous.items():
            # None: a handler that C code had installed; Python can only fall back to the default.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._previous.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._since = monotonic()
        elif self.requested == "SIGINT" and monotonic() - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
