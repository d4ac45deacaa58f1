"""The training loop of one rank: build, resume, train, validate, save, stop.

Every rank runs the same lines; what only rank 0 does (the events of the run, the showcase) goes
through its `Journal`. A restart is a start that finds a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep, time
from typing import Any

import torch
import torch.distributed as dist

from headway.atomic_files import write_atomically
from headway.channel.process_memory import keep_freed_memory
from headway.checkpoint.format import Manifest
from headway.checkpoint.save_plan import Holdings
from headway.checkpoint.store import CheckpointStore
from headway.data import CachedSource, Cursor, RankBatch, StatefulSource
from headway.documents import parse_json
from headway.errors import (
    CheckpointError,
    CheckpointMismatch,
    HeadwayError,
    UsageError,
    WorkerFailed,
)
from headway.plans import explain, with_collective
from headway.run.distributed.failure_record import summarize_exception
from headway.run.distributed.launch_env import LaunchEnv, RunEnding
from headway.run.distributed.world import World, translate_exception
from headway.run.executor import Executor, check_metrics
from headway.run.recipe.batch_units import counts_samples, steps_left, stop_steps
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.training_data import (
    recipe_epoch_length,
    training_data,
    validation_data,
)
from headway.run.recipe.user_code import describe_recipe, importable_folders, user_frame
from headway.run.step.batch import NO_SHOWCASE, first_readers, reads_sample_parts
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import build_model, generators_restored
from headway.run.step.setup import recipe_plan, stepped_each_step
from headway.run.strategy.checkpoint import (
    checkpoint_contents,
    make_inventory,
    restore_checkpoint,
)
from headway.run.strategy.split_tables import large_tables_in_files
from headway.run.strategy.training_state import Facts, TrainingState
from headway.run.synchrony.free_run import FreeRun
from headway.run.synchrony.rejoin import is_there, note_presence
from headway.run.synchrony.worker_group import AnyFreeRun, GroupRun
from headway.run.training.callbacks import Callbacks, RunView
from headway.run.training.job import TrainingOutcome, TrainJob
from headway.run.training.journal import Journal
from headway.run.training.loggers import LoggerCallback, check_loggers
from headway.run.training.monitor import Monitor
from headway.run.training.recorded_attempt import RecordedAttempt
from headway.run.training.run_directory import (
    RunDirectory,
    describe_environment,
)
from headway.run.training.stop_request import StopRequest
from headway.synchrony.history import History
from headway.synchrony.programs import rejoin_step


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
        self._values: dict[str, float] = {}
        self._saved = -1
        self._free: AnyFreeRun | None = None
        self._lost: list[str] = []
        self._recorded: RecordedAttempt | None = None
        self._needed: frozenset[int] = frozenset()
        # Samples used so far, where these and no number of steps decide when the run ends.
        self._used: int | None = None

    def run(self) -> TrainingOutcome:
        """Train from the recipe to the last checkpoint."""
        self.prepare()
        with self._journal.warnings():
            total = self.begin()
            try:
                self._callbacks.call("on_train_start", self._view)
                stopped_by = self._train(total)
                return self._finish(stopped_by)
            except Exception as error:
                self._callbacks.failed(self._view, error)
                raise

    def prepare(self) -> None:
        """Recipe, plan, and the run directory."""
        self._recipe = load_recipe(self._job.recipe, self._job.overrides)
        job, world = self._job, self._world
        if job.validate_every is not None and self._recipe.validation is not None:
            self._recipe = replace(self._recipe, validate_every=job.validate_every)
        # A proof must not repeat what callbacks do outside of the run.
        check_loggers(self._recipe.loggers)
        self._validating = _Due(self._recipe.validate_every)
        loggers = self._recipe.loggers if world.rank == 0 else ()
        own = (LoggerCallback(loggers), *self._recipe.callbacks, *job.callbacks)
        self._callbacks = Callbacks(() if job.proving else own)
        if job.replay is not None:
            self._recorded = RecordedAttempt.last(RunDirectory(job.replay))
            if self._recorded is None:
                raise UsageError(f"{job.replay} has no history to replay")
            every = self._recorded.checkpoint_every
            self._recipe = replace(self._recipe, checkpoint_every=every)
        given = job.find(world) if job.find is not None else job.plan
        if world.place.life:  # the others have it
            given = self._directory.plan_file
        self._plan = recipe_plan(self._recipe, given, world.ranks)
        if job.collective is not None:
            self._plan = with_collective(self._plan, job.collective, job.carrier)
        self._open()

    def begin(self) -> int:
        """Build everything and restore a checkpoint, if any; returns the steps of the run."""
        self._build()
        self._cut()
        cursor = self._cursor()
        self._began = self.executor.steps_done
        length = recipe_epoch_length(self._recipe, self._data)
        total = stop_steps(self._recipe, length)
        if counts_samples(self._recipe, length):
            if self._used is None:  # also of a checkpoint that does not count them
                self._used = self.executor.steps_done * self._plan.batch.samples
            total = self.executor.steps_done + steps_left(self._recipe, self._used)
        else:
            self._used = None
        total = self._steps_to_repeat(total)
        self._announce(total)
        self._view = RunView(self.executor, self._directory.path, total)
        skip = self._come_back(total) if self._world.place.life else 0
        loader = self.executor.loader(
            self._data,
            cursor=cursor,
            skip=skip,
            epochs=None,
            workers=self._recipe.workers,
            drop_last=self._recipe.drop_last,
        )
        self._stack.enter_context(loader)
        self._batches = self.executor.looking_ahead(loader)
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
        if (
            world.rank == 0
            and not world.place.life
            and (first or not self._directory.recipe_file.exists())
        ):
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
        with large_tables_in_files(self._plan):
            model = build_model(recipe).to(self._world.device)
            if self._plan.memory.precision == "float64":
                to_float64(model)
            optimizer = recipe.optimizer(model)
        scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
        self._monitor = Monitor.of(recipe, scheduler)
        if recipe.metrics is not None:
            check_metrics(self._plan)
        # Now: the strategy may change its groups.
        self._options = describe_options(optimizer)
        self._data = training_data(recipe)
        self.trained = TrainingState(model, optimizer, scheduler)
        self.executor = Executor(
            model,
            optimizer,
            loss=recipe.loss,
            plan=self._plan,
            scheduler=stepped_each_step(scheduler),
            clip=recipe.clip,
            seed=recipe.seed,
            world=self._world,
        )
        self._plan = self.executor.plan  # with what the model says of its tables
        self._repeat_history()
        rounds, world = self.executor.strategy.rounds, self._world
        rank, ranks, group = world.rank, world.ranks, world.side_group
        if isinstance(rounds, AnyFreeRun):
            # Each worker has the model at the end: the first that is left writes it.
            self._free, rank, ranks, group = rounds, 0, 1, None
            if isinstance(rounds, GroupRun):
                rank, ranks = dist.get_rank(rounds.saving), dist.get_world_size(rounds.saving)
                group = rounds.saving
            elif world.place.life:
                began, _, _ = self._noted_start()
                rounds.continue_history(History.load(self._history, killed=True), began)
            rounds.snapshots.every = rounds.snapshots.every or recipe.checkpoint_every
            if rounds.first:
                rounds.history.append_to(self._history)
        self._store = CheckpointStore(
            self._directory.checkpoints,
            rank=rank,
            ranks=ranks,
            group=group,
            keep=recipe.checkpoint_keep,
            late=self._job.proving,
        )
        # After an error the peers of a save in progress may never answer: do not wait for them.
        self._stack.push(lambda kind, *_: self._store.close(wait=kind is None))
        one_piece = self._plan.batch.norm == "global"
        if not one_piece and (self._plan.ranks > 1 or self._plan.batch.microbatch):
            self._warn_of_batch_norm(model)

    def _repeat_history(self) -> None:
        """Take up the history of the run that is to be repeated."""
        if self._recorded is None:
            return
        run = self.executor.strategy.rounds
        if not isinstance(run, AnyFreeRun):
            raise UsageError(
                "this plan has no history to replay",
                where=str(self._job.replay),
                why="Its workers meet in rounds: a run gives the same numbers each time.",
                fix="Leave out --replay.",
            )
        run.repeat(self._recorded.history())

    def _steps_to_repeat(self, total: int) -> int:
        """The last step of this worker; a worker that had died stops where nobody answers it."""
        recorded = self._recorded
        if recorded is None:
            return total
        recorded.check_repeatable(total)
        assert self._free is not None
        # Of a run that was stopped each worker has made the steps that it had come to.
        dead = self._free.worker in recorded.history().dead()
        return total if dead else recorded.last_step(self._world.rank)

    @property
    def _history(self) -> Path:
        assert self._free is not None
        folder = self._directory.history_of(self._world.place.attempt)
        return folder / f"worker-{self._free.worker:05d}"

    def _part(self) -> None:
        """After the first step of workers that do not meet: from now on one may die alone."""
        free, note_folder = self._free, self._world.place.note_folder
        if (
            not isinstance(free, FreeRun)
            or not self._plan.survives
            or note_folder is None
            or self._world.alone
        ):
            return
        self._world.part()
        note_presence(note_folder, self._world.rank)
        for name in ("needed", "free") if free.needed else ("free",):
            (note_folder / f"{name}-{self._world.rank:05d}").touch()
        # Whoever dies from here on is left out by the others, once all have noted that they may;
        # one that dies in this moment is not waited for.
        until = monotonic() + _NOTE_SECONDS
        while len(list(note_folder.glob("free-*"))) < self._world.ranks and monotonic() < until:
            sleep(0.001)

    def _tell_losses(self, total: int) -> None:
        """Say which workers have died, and what of their work is missing."""
        assert self._free is not None
        if self._job.replay is not None:
            return
        for worker in range(self._plan.workers):
            back = [str(self._began + one.step + 1) for one in self._free.history.lives(worker)]
            gone = worker in self._free.gone
            if not gone and not back:
                continue
            made = self._steps_of(worker)
            lost = f"{total - self._began - len(set(made))} of its steps were not made"
            text = f"worker {worker} died" + (f" after step {made[-1]}" if gone and made else "")
            if back:
                text += f"{', having come' if gone else ' and came'} back with {_listed(back)}"
            self._lost.append(f"{text}: {lost}")
            self._journal.event("warning", step=self.executor.steps_done, text=f"{text}: {lost}")

    def _steps_of(self, worker: int) -> list[int]:
        attempt = RecordedAttempt(self._directory, self._world.place.attempt)
        return [step for step, _ in attempt.steps(worker)]

    def _come_back(self, total: int) -> int:
        """As a new process of a worker that has died: the steps that are made or left out."""
        place, folder = self._world.place, self._world.place.note_folder
        assert self._free is not None
        assert folder is not None
        others = [
            max(self._steps_of(other), default=self._began)
            for other in range(self._plan.workers)
            if other != place.rank and is_there(folder, other)
        ]
        own = max(self._steps_of(place.rank), default=self._began)
        step = rejoin_step(self._plan.synchrony, own, others)
        if step >= total:
            raise RunEnding
        self.executor.skip(step - self._began)
        if self._used is not None:
            self._used += (step - self._began) * self._plan.batch.samples
        return step - self._began

    def _cut(self) -> None:
        # Before a checkpoint is read: each rank reads only what it keeps.
        group = self._free.inside if isinstance(self._free, GroupRun) else None
        self._inventory = make_inventory(
            self._plan, self._world, group, slots=isinstance(self._data, StatefulSource)
        )
        if not self._plan.needs_batch:
            return
        self._world.doing("cuts the model")
        first: RankBatch | None = None
        if self._world.rank in first_readers(self._data, self._plan):
            options: dict[str, Any] = {"epochs": 1, "drop_last": self._recipe.drop_last}
            with self.executor.loader(self._data, alone=True, **options) as loader:
                first = next(iter(loader))
        self.executor.cut(first, self._recipe.metrics)
        held = self.executor.strategy.parameters
        self.trained = replace(self.trained, away=held.away, layout=held.layers)

    def _warn_of_batch_norm(self, model: torch.nn.Module) -> None:
        kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        if names:
            self._journal.event(
                "warning",
                text=f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: batch "
                "normalisation sees one micro-batch at a time, so this run is not exactly the "
                'serial one; norm = "global" without micro-batches, or GroupNorm, would be',
            )

    @property
    def _start_note(self) -> Path | None:
        """Where a worker notes how it begins, for itself in another life."""
        folder = self._world.place.note_folder
        return None if folder is None else folder / f"start-{self._world.rank:05d}"

    def _noted_start(self) -> tuple[int, int | None, dict[str, Any]]:
        """Steps and samples before this attempt, and where its data begin."""
        assert self._start_note is not None
        steps, used, begins = parse_json(self._start_note.read_text())
        return steps, used, begins

    def _cursor(self) -> Cursor:
        """Where the data begin; of a process that comes back where they began for the first."""
        if self._world.place.life:
            # Of the checkpoint no more is needed: parameters are what the others have.
            self.executor.steps_done, self._used, begins = self._noted_start()
            self._needed = frozenset({self.executor.steps_done})
            return Cursor.from_dict(begins)
        cursor = self._restore()
        if self._start_note is not None:
            # Without the state of a stream, which then reads to the position.
            begins = replace(cursor, stream=None).to_dict()
            noted = json.dumps([self.executor.steps_done, self._used, begins])
            write_atomically(self._start_note, noted)
        return cursor

    def _restore(self) -> Cursor:
        """The position to start from: that of the newest sound checkpoint, or the beginning."""
        beginning = Cursor(seed=self._recipe.seed)
        if self._recorded is not None:
            manifest = self._restore_recorded(self._recorded)
        elif not self._job.resume and self._world.place.attempt == 0:
            return beginning
        else:
            with self._storing():
                manifest = restore_checkpoint(
                    self._store, self.trained, self.executor.strategy, self.executor.slots
                )
            self._tell_restart(0 if manifest is None else manifest.step)
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
        self.executor.steps_done = self._saved = manifest.step
        self._used = manifest.facts.get("samples")
        self._validating.owed = manifest.facts.get("owes validation", False)
        if self._monitor is not None and "monitor" in manifest.facts:
            self._monitor.restore(manifest.facts["monitor"])
        if self._free is not None and self._recorded is None:
            self._needed = frozenset({manifest.step})  # the history needs it
        self._pin()
        if "callbacks" in manifest.facts and not self._job.proving:
            self._callbacks.restore(manifest.facts["callbacks"])
        self._journal.event("resume", step=manifest.step, checkpoint=manifest.step)
        return cursor

    def _restore_recorded(self, recorded: RecordedAttempt) -> Manifest | None:
        """The checkpoint with which the history begins; None: it begins without."""
        step, folder = recorded.began_at, recorded.run.checkpoints
        if step is None:
            return None
        store = self._store.of(folder)
        manifest = restore_checkpoint(
            store, self.trained, self.executor.strategy, self.executor.slots, only=step
        )
        if manifest is None:
            raise UsageError(
                f"the checkpoint of step {step}, with which this history begins, is not there",
                where=str(folder),
                fix="Copy it back, or repeat a run that has its checkpoints.",
            )
        return manifest

    def _tell_restart(self, step: int) -> None:
        """Say what of the attempt before is lost, of workers that do not meet."""
        attempt = self._world.place.attempt - 1
        if self._free is not None and self._world.rank == 0 and attempt >= 0:
            text = RecordedAttempt(self._directory, attempt).lost(step)
            if text:
                self._journal.event("warning", step=step, text=f"attempt {attempt} ended: {text}")

    def _announce(self, total: int) -> None:
        if self._world.rank == 0 and not self._world.place.life:
            self._directory.add_to_recipe({"optimizer options": self._options})
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
            checkpoint_every=self._recipe.checkpoint_every,
            predicted=None if expected is None else asdict(expected),
        )

    # -- the loop ----------------------------------------------------------------------------

    def _train(self, total: int) -> str | None:
        """Step until the end of the recipe or a signal; returns the signal's name."""
        run, recipe = self.executor, self._recipe
        first = run.steps_done + 1
        saving, validating = _Due(recipe.checkpoint_every), self._validating
        if self._lacks_validation(total) and self._judge():
            return None
        while run.steps_done < total:
            self.current = run.steps_done + 1
            if self._job.before_step is not None:
                self._job.before_step(self._world.place, self.current)
            # A failed save ends the job at the next step, not only at the next save.
            with self._storing():
                self._store.check()
            self.step()
            if self._used is not None and self._recorded is None:
                total = run.steps_done + steps_left(recipe, self._used)
                self._view.steps = total
            if run.steps_done == first and self._free is not None:
                self._part()
            elif run.steps_done == first:
                # Only now the optimiser has state, so that the size of a checkpoint is known.
                tensors, _, holdings = self._contents()
                self._store.reserve(tensors, holdings)
            # By the votes of all ranks, not by this rank's signal: all stop after the same step.
            stopping, last = run.record.votes > 0, run.steps_done == total
            last |= self._free is not None and self._free.over
            if last or (stopping and self._free is not None):
                run.finish()
                if self._free is not None:
                    self._end_free(self._free, total)
            validates = validating.now(run.steps_done, ready=run.met)
            if stopping or last or saving.now(run.steps_done, ready=run.strategy.can_save):
                self._save()
            if stopping:
                run.finish()  # after the checkpoint, from which each worker goes on by itself
                # The vote may be another rank's, which alone has got the signal.
                asked = "a callback" if self._view.stopping else "another rank"
                return self._stop.requested or asked
            if (last or validates) and self._judge():
                break
        return None

    def _end_free(self, free: AnyFreeRun, total: int) -> None:
        if free.first:
            free.history.save(self._history)
        self._journal.last(self.executor.steps_done, free.agreement_record())
        if free.leads:
            self._journal.lead()
        self._tell_losses(total)

    def _lacks_validation(self, total: int) -> bool:
        """Whether the checkpoint was written before the validation of the same step."""
        if self._recipe.validation is None:
            return False
        step, monitor = self.executor.steps_done, self._monitor
        due = self.executor.met and (step == total or _due(self._recipe.validate_every, step))
        # Who does not monitor keeps no note of the last validation, and repeats it.
        return step > 0 and due and (monitor is None or monitor.validated < step)

    def _judge(self) -> bool:
        """Validate; keep the best checkpoint. Returns whether training stops early."""
        self._validate()
        monitor = self._monitor
        if monitor is None:
            return False
        step = self.executor.steps_done
        improved = monitor.take(step, self._values)
        self._view.best_step = monitor.best_step
        if improved and self._recipe.keep_best:
            self._pin()
            if self._saved != step:
                self._save()
            self._journal.event("best", step=step, metric=monitor.metric, value=monitor.best)
        if monitor.exhausted:
            if self._saved != step:
                self._save()
            self._journal.event("note", step=step, text=monitor.explain())
        return monitor.exhausted

    def _pin(self) -> None:
        """Keep the checkpoint of the best validation, and that with which a history begins."""
        best = None
        if self._recipe.keep_best and self._monitor is not None:
            best = self._monitor.best_step
        self._store.pinned = self._needed | (frozenset() if best is None else frozenset({best}))

    def step(self) -> None:
        """One optimiser step, and its entry in the journal."""
        run = self.executor
        start = perf_counter()
        self._world.doing("data of step %d", run.steps_done + 1)
        batch = next(self._batches)
        waited = perf_counter() - start
        self._world.doing("computes step %d", run.steps_done + 1)
        run.wants_stop = self._stop.requested is not None or self._view.stopping
        run.step(batch)
        self._after = batch.after
        if self._used is not None:
            self._used += batch.samples
        for remarks in (run.strategy.context.remarks, self._free.remarks if self._free else []):
            while remarks:
                self._journal.event("note", step=run.steps_done, text=remarks.pop(0))
        view, seconds = self._view, perf_counter() - start
        view.loss, view.rate = run.record.loss, run.record.samples / seconds
        view.lr = float(self.trained.optimizer.param_groups[0]["lr"])
        self._journal.step(
            run.steps_done, batch, run.record, seconds=seconds, waited=waited, lr=view.lr
        )
        self._callbacks.call("on_step_end", view)

    def _contents(self) -> tuple[dict[str, torch.Tensor], Facts, Holdings | None]:
        """This rank's part of a checkpoint, the facts, and who holds what; collective."""
        tensors, facts, holdings = checkpoint_contents(
            self.trained, self.executor.strategy, self._inventory, self.executor.slots
        )
        if self._monitor is not None:
            facts["monitor"] = self._monitor.state()
        if states := self._callbacks.states():
            facts["callbacks"] = states
        return tensors, facts, holdings

    def _save(self) -> None:
        step = self.executor.steps_done
        # With priority the last update may still be on its way.
        self.executor.flush()
        self._world.doing("the checkpoint of step %d", step)
        free = self._free
        # Running statistics differ between ranks; a checkpoint holds one set, with which all go on.
        if free is None or free.met or isinstance(free, GroupRun):
            self.executor.strategy.share_buffers()
        if free is not None and not self._saves(free, step):
            self._saved = step
            return
        start = time()
        with self._storing():
            tensors, facts, holdings = self._contents()
            facts["cursor"] = self._after.to_dict()
            if self._used is not None:
                facts["samples"] = self._used
            if self._validating.owed:
                facts["owes validation"] = True
            receipt = self._store.save(step, tensors, facts, holdings)
        self._journal.span(step, "checkpoint", "checkpoint", "stage the checkpoint", start, time())
        self._journal.event(
            "checkpoint", step=step, bytes=receipt.bytes, held_seconds=receipt.held_seconds
        )
        self._saved = step
        self._callbacks.call("on_checkpoint", self._view)

    def _saves(self, free: AnyFreeRun, step: int) -> bool:
        """Whether this rank saves, of workers that do not meet."""
        if not free.saves or free.met or isinstance(free, GroupRun):
            return free.saves
        self._journal.lead()
        # Who led before may have been ahead.
        first = self._world.rank == 0 and not self._world.place.life
        return first or step > max(self._store.steps(), default=-1)

    def _validate(self) -> None:
        recipe, run = self._recipe, self.executor
        if recipe.validation is None:
            return
        start = perf_counter()
        self._world.doing("the validation after step %d", run.steps_done)
        data, most = validation_data(recipe), recipe.validation_samples
        with run.validation_loader(data, limit=most) as loader:
            self._values, seen = run.validation(loader, recipe.metrics)
        self._journal.event(
            "validation",
            step=run.steps_done,
            loss=self._values["loss"],
            samples=seen,
            seconds=perf_counter() - start,
            metrics={name: value for name, value in self._values.items() if name != "loss"},
        )
        self._view.validation = dict(self._values)
        self._callbacks.call("on_validation_end", self._view)

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
        self._callbacks.call("on_train_end", self._view)
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
            validation=self._values.get("loss"),
            metrics={name: v for name, v in self._values.items() if name != "loss"},
            best_step=None if self._monitor is None else self._monitor.best_step,
            stopped_by=stopped_by,
            lost=tuple(self._lost),
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


def describe_options(optimizer: torch.optim.Optimizer) -> str:
    """The numbers of each parameter group: "AdamW: lr 0.001, betas (0.9, 0.999), ..."."""
    groups = [
        ", ".join(f"{name} {value}" for name, value in group.items() if _is_option(name, value))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}: {'; '.join(dict.fromkeys(groups))}"


def _is_option(name: str, value: Any) -> bool:
    return name != "params" and isinstance(value, int | float | str | tuple) and value is not False


_NOTE_SECONDS = 5.0


def _listed(steps: list[str]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(steps)}"


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class _Due:
    """What happens every so many steps, or at the next one after which it can.

    Attributes:
        owed: It has been due, and has not happened.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.owed = False

    def now(self, step: int, *, ready: bool) -> bool:
        """Whether it happens after a step."""
        self.owed |= _due(self._every, step)
        happens, self.owed = self.owed and ready, self.owed and not ready
        return happens


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
                World.come_back(place, device=job.device, timeout_seconds=job.timeout_seconds)
                if place.life
                else World.join(
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
        here = _where(place, training)
        if error.where.startswith("rank ") and ", step " not in error.where:
            error.where += here.removeprefix(f"rank {place.rank}")
        error.where = error.where or here
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
