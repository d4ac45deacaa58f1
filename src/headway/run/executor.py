"""The executor: runs a plan's step program, one handler per kind of instruction.

`compile_step` turns a plan and the number of micro-batches into a list of instructions;
a `Strategy` exchanges gradients and makes the update; `Executor` runs the instructions one after
the other. A feature adds instructions and handlers, not branches here.

Loss, gradients and updated parameters of a step equal those of the serial run for every plan with
an exact exchange and a flush, because the loss is the sum over the global batch divided by the
global count, however the batch is split. `headway verify` proves it for a recipe and a plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.checkpoint.pretrained import load_weights
from headway.checkpoint.store import CheckpointStore
from headway.data import Cursor, Loader, LoaderSource, MicroBatch, RankBatch
from headway.data.examples import check_batch
from headway.data.stateful_source import begin_slots, check_slots
from headway.data.torch_loader import known_length
from headway.errors import CheckpointMismatch, PlanError, UsageError
from headway.keywords import checks_keywords, users_line
from headway.parallel.global_norm import GlobalNorm
from headway.plans import BatchSplit, Plan
from headway.plans.plan import check_device
from headway.run.distributed import replica_sync
from headway.run.distributed.process_groups import global_norm
from headway.run.distributed.world import World
from headway.run.pipeline.step import check_last_batch
from headway.run.recipe.accepted_forms import with_article
from headway.run.recipe.loss_errors import loss_errors_explained
from headway.run.recipe.recipe import (
    Loss,
    Metrics,
    check_trains,
    give_outputs,
    metric_parts,
    sum_and_count,
)
from headway.run.recipe.schema import Precision
from headway.run.step.batch import (
    PaddingBatch,
    RankLoader,
    check_agreement,
    rank_loader,
    rank_source,
    resize_batch,
    spatial_loss,
    to_device,
)
from headway.run.step.double_precision import double_precision
from headway.run.step.forward_pass import ForwardPass, autocast, float_dtype, to_float64
from headway.run.step.loss_probe import explain_split_loss, whole_copy
from headway.run.step.metrics import MetricParts, metrics_over_ranks
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraws,
    is_compiled,
    probe_random_draws,
    seed_everything,
)
from headway.run.step.record import StepRecord
from headway.run.step.setup import (
    check_components,
    find_world,
    resolve_plan,
    usable_loss,
    with_growing_tables,
)
from headway.run.strategy.checkpoint import (
    checkpoint_contents,
    make_inventory,
    restore_checkpoint,
)
from headway.run.strategy.slot_states import SlotStates
from headway.run.strategy.step_context import TrainingSetup
from headway.run.strategy.strategy import make_strategy
from headway.run.strategy.training_state import TrainingState

Kind = Literal[
    "clear",
    "pipeline",
    "forward",
    "idle",
    "tally",
    "arm",
    "backward",
    "settle",
    "propose",
    "send",
    "receive",
    "adopt",
    "scale",
    "clip",
    "update",
    "agree",
    "release",
]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a step program.

    Kinds:
        clear: drop the last step's gradients.
        pipeline: forward and backward of all micro-batches through the stages of a pipeline, and
            the sums of the gradients of each stage's copies.
        forward: the loss of micro-batch `microbatch`.
        idle: a forward pass that counts nothing, in place of a micro-batch that this rank lacks
            and another one has: see `Plan.meets_in_forward`.
        tally: start to sum loss, count and votes over all ranks.
        arm: send gradients as soon as the next backward pass has made them.
        backward: the gradients of micro-batch `microbatch`, added to those before.
        send: start the exchange of all gradients that have not been sent.
        receive: wait for the summed gradients.
        scale: divide by a global count that is only known now.
        clip: limit the global norm of the gradients.
        update: the optimiser's and the scheduler's step.
        agree: that of a worker, and its meeting with others where it is time.
        release: let the exchange make the update, while the next step begins (priority).
        settle: the pipeline's table has made the updates; read the tally, step the scheduler.
        propose: make this rank's own update and exchange it in place of the gradients.
        adopt: make the combined update.
    """

    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.kind if self.microbatch is None else f"{self.kind} {self.microbatch}"


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The instructions of one rank for one optimiser step."""

    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.instructions))


def compile_step(
    plan: Plan, num_microbatches: int, *, clip: bool, passes: int | None = None
) -> StepProgram:
    """The program of a rank.

    Args:
        num_microbatches: Of this rank in this step; 0 where a ragged batch leaves it without work.
        passes: The most micro-batches that any rank has in this step; None: as this one.
    """
    if plan.pipe_degree > 1:
        limit: list[Kind] = ["clip"] if clip else []
        ending: list[Kind] = ["scale", *limit, _update(plan)] if plan.flushes else ["settle"]
        kinds: list[Kind] = ["clear", "pipeline", "tally", *ending]
        return StepProgram(tuple(map(Instruction, kinds)))
    most = max(passes or 0, num_microbatches) if plan.meets_in_forward else num_microbatches
    own = [_microbatch(number, idle=number >= num_microbatches) for number in range(most)]
    exchange = plan.exchange
    together = plan.ranks > plan.workers
    updates = exchange.values == "updates"
    if own:
        # Between the last forward and the last backward pass: the step reduction overlaps with the
        # backward pass, and gradients are complete only in the last one.
        arm = [Instruction("arm")] if together and not updates else []
        own[-1][1:1] = [Instruction("tally"), *arm]
    else:
        own.append([Instruction("tally")])
    return StepProgram(
        (
            Instruction("clear"),
            *(instruction for one in own for instruction in one),
            *map(Instruction, _ending(plan, together, updates, clip)),
        )
    )


def _ending(plan: Plan, together: bool, updates: bool, clip: bool) -> list[Kind]:
    """What follows the last backward pass."""
    priority = plan.exchange.priority
    if updates:
        return ["propose", "send", "receive", "adopt"] if together else ["propose", "adopt"]
    if together and priority and not clip:  # a clipped norm needs all gradients together
        return ["send", "release"]
    arrive: list[Kind] = ["send", "receive"] if together else []
    limit: list[Kind] = ["clip"] if clip else []
    return [*arrive, "scale", *limit, _update(plan)]


def _update(plan: Plan) -> Kind:
    return "update" if plan.synchrony.by_all_reduce else "agree"


def _microbatch(number: int, *, idle: bool) -> list[Instruction]:
    return [Instruction("idle" if idle else "forward", number), Instruction("backward", number)]


@checks_keywords
class Executor:
    """Trains a model by a plan, in the user's own loop or in headway's.

        run = headway.Executor(model, optimizer, loss=loss, batch=64)
        for batch in run.batches(dataset):
            loss = run.step(batch)

    Args:
        model: Any module; it is used as it is and keeps its names.
        loss: See `headway.run.recipe.recipe.Loss`; or a torch criterion; or "tokens", the model's
            own (`headway.huggingface`).
        plan: A plan, or the path of a plan file.
        batch: In its place samples of the global batch, for data parallelism over all processes.
        clip: Largest global norm of the gradients.
        precision: Arithmetic of the forward pass: "float32", "float64", or "bfloat16", which keeps
            float32 parameters (autocast); None: that of the plan, else "float32".
        weights: What the model starts from; see `Recipe.weights`, also for `weights_only`.
        world: The processes; found in the environment (torchrun, Slurm) where it is not given.

    Raises:
        PlanError: The plan cannot exist, or is for another number of processes.
        RecipeError: Model, loss, optimiser or scheduler cannot be used; see
            `headway.run.step.setup.check_components`.
        UsageError: Not exactly one of `plan` and `batch` is given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss | Literal["tokens"],
        plan: Plan | str | Path | None = None,
        batch: int | None = None,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        precision: Precision | None = None,
        weights: str | Path | None = None,
        weights_only: Sequence[str] = (),
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        self.world = world or find_world()
        self.plan = resolve_plan(plan, batch, self.world.ranks, precision)
        tables = self.plan.split.tables
        check_components(model, optimizer, scheduler, self.world.ranks, tables)
        self.plan = with_growing_tables(self.plan, model)
        loss = usable_loss(loss)
        check_device(self.plan, self.world.device.type)
        if weights is not None:
            load_weights(model, weights, weights_only)
        self.model = model.to(self.world.device)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.seed = seed
        self.steps_done = 0
        self.record = StepRecord()
        self._last_loss = self.record.loss
        self.wants_stop = False
        # The runner of a pipeline cuts the inputs itself.
        self._loss = (
            loss if self.plan.pipe_degree > 1 else spatial_loss(loss, self.plan, self.world)
        )
        self._given_loss = loss
        self._clip = clip
        self._next_epoch = 0
        self._after: Cursor | None = None
        self._following: RankBatch | None = None
        self._resumed: Cursor | None = None
        self._compared = False
        self._divided = False
        self._stores: dict[Path, CheckpointStore] = {}
        self._inventory = make_inventory(self.plan, self.world)
        self.slots = SlotStates(self.plan, self.world.rank)
        self._sites: RandomDraws | None = None
        self._mode: LogicalRandomness | None = None
        self._mode_of: MicroBatch | None = None
        self._batch: RankBatch | None = None
        self._loss_of: dict[int, Tensor] = {}
        self._shares: list[Tensor] = []
        self._counts: list[Tensor | float] = []
        self._dtype = float_dtype(self.plan.memory.precision)
        if self._dtype is not None:
            to_float64(self.model)
        # The lines above have moved and widened the parameters, but not the optimiser's state.
        move_optimizer_state(optimizer)
        # While the model is whole: under ZeRO `make_strategy` shards it.
        if self.world.ranks > 1:
            replica_sync.sync_initial_state(self.model, self.world)
        self._norm: GlobalNorm | None = global_norm(self.plan, self.world)
        self._spare = PaddingBatch(self.plan)
        self._check_loss: Callable[[RankBatch], None] | None = self._loss_check(loss)
        self.strategy = make_strategy(
            TrainingSetup(
                model=self.model,
                optimizer=optimizer,
                scheduler=scheduler,
                plan=self.plan,
                world=self.world,
                clip=clip,
                seed=seed,
            ),
            ForwardPass(
                model=self.model,
                loss=self._loss,
                arithmetic=self._arithmetic,
                prepare=self._prepare,
                probe=self._probe,
            ),
        )
        self.pipeline = self.strategy.pipeline
        self.strategy.follow()
        self._before: dict[Kind, Callable[[], None]] = {}
        self._handlers: dict[str, Callable[[Instruction], None]] = {
            "clear": self._clear, "pipeline": self._pass_through, "forward": self._forward,
            "idle": self._idle, "tally": self._tally, "backward": self._backward,
            **{kind: partial(_carry_out, getattr(self.strategy, kind)) for kind in _PLAIN},
        }  # fmt: skip

    # -- the public loop ---------------------------------------------------------------------

    def batches(
        self,
        examples: Any,
        *,
        epochs: int | None = 1,
        cursor: Cursor | None = None,
        workers: int = 0,
        drop_last: bool = False,
    ) -> Iterator[RankBatch]:
        """This rank's share of every global batch, in an order that depends on the seed alone.

        Args:
            examples: A `Source`, any map-style torch `Dataset`, a stream, or a torch `DataLoader`,
                whose batch must be the global batch; its sampler decides the order.
            epochs: Passes over the data; None: no end. With a cursor, counted from the beginning of
                the run. After `resume`, write the loop as for a new run: epochs that the saved run
                has made give no batches, and the loop ends where it would have ended.
            cursor: Where to begin; by default where `resume` has left off, else at an epoch that no
                step has used.
            drop_last: Leave out the ragged last batch of an epoch.
        """
        if cursor is None:
            cursor = Cursor(seed=self.seed, epoch=self._next_epoch)
            epochs = None if epochs is None else self._next_epoch + epochs
            if self._resumed is not None:
                if epochs is not None and epochs <= self._resumed.epoch:
                    self._next_epoch = epochs
                    return
                cursor, self._resumed = self._resumed, None
        loader = self.loader(
            examples, cursor=cursor, workers=workers, drop_last=drop_last, epochs=epochs
        )
        with loader:
            yield from self.looking_ahead(loader)

    def looking_ahead(self, batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
        """The same batches; each is read one step earlier where the plan has use for that."""
        if not self.strategy.parameters.looks_ahead:
            yield from batches
            return
        source = iter(batches)
        batch = next(source, None)
        while batch is not None:
            self._following = next(source, None)
            yield batch
            batch, self._following = self._following, None

    def loader(self, examples: Any, *, cursor: Cursor | None = None, **options: Any) -> RankLoader:
        """The loader behind `batches`; see `headway.run.step.batch.rank_loader` for `options`."""
        source = rank_source(examples, self.plan, self.world.rank)
        if isinstance(source, LoaderSource):
            options["drop_last"] = bool(options.get("drop_last")) or source.drop_last
            options["workers"] = options.get("workers") or source.workers
        check_batch(source, self.plan.batch.samples, drop_last=bool(options.get("drop_last")))
        if not options.get("drop_last"):
            check_last_batch(self.plan, known_length(source))
        self.slots.attach(source)
        if self.slots.source is not None:  # each rank has its slots of a checkpoint
            self._inventory = make_inventory(self.plan, self.world, slots=True)
        options["cursor"] = cursor or Cursor(seed=self.seed, epoch=0, position=0)
        return rank_loader(source, self.plan, self.world, **options)

    def step(self, batch: RankBatch) -> float:
        """One optimiser step; returns the loss of the global batch.

        With workers that do not agree at every step it is the loss of this worker's samples. A step
        that the others have closed without this worker (backup workers) is not computed: the loss
        of the last one that was is returned again.

        Raises:
            Diverged: The loss is not finite; parameters are those before the step.
            PeerLost: Another rank vanished.
            Stalled: The exchange ran into its time-out; names who is missing.
            UsageError: Another batch than one of `batches`.
            DataError: The ranks' data have different lengths; found in the first step.
        """
        if not isinstance(batch, RankBatch):
            raise UsageError(
                f"a step takes what run.batches gives, not {with_article(batch)}: "
                "write for batch in run.batches(dataset): run.step(batch)",
                where=users_line(),
            )
        self._batch = batch
        if not self._compared:  # the order of the samples follows from their number
            check_agreement(self.world, "number of samples", batch.length)
            self._compared = True
        self.record = StepRecord(samples=batch.samples)
        self._spare.note(batch)
        self.cut(batch)
        # Anew in each step: a ragged batch has another program.
        program = compile_step(
            self.plan, len(batch.micros), clip=self._clip is not None, passes=batch.passes
        )
        if self.strategy.rounds is not None:
            self.strategy.rounds.begin(self.steps_done)
        if not self.model.training:  # else modules that the user has put into eval mode stay there
            self.model.train()
        if self.strategy.passes_over(self.steps_done):
            self.record.loss = self._last_loss
        else:
            with loss_errors_explained(self._given_loss):
                self._carry_out(program)
        self._last_loss = self.record.loss
        self.steps_done += 1
        self._next_epoch = batch.start.epoch + 1
        self._after = batch.after
        return self.record.loss

    def skip(self, steps: int) -> None:
        """Leave steps out that a worker has missed, before it makes its first one."""
        for _ in range(steps):
            self.strategy.leave_out()
        self.steps_done += steps

    @property
    def met(self) -> bool:
        """Whether all workers hold the same model now; always, where all ranks agree at every step.

        Only then a validation is of one model.
        """
        return self.strategy.rounds is None or self.strategy.rounds.met

    def finish(self) -> None:
        """After the last step: workers that have not met end with one model; collective.

        The mean of their models, or the centre of an elastic run; `close` does it, too.
        """
        self.strategy.finish()

    def evaluate(self, batches: RankLoader) -> tuple[float, int]:
        """The mean loss over all samples of a loader and their number; equal on every rank.

        Buffers become those of rank 0; in a pipeline those of the first rank that holds them.

        Args:
            batches: As `loader` makes it: all ranks of a pipeline read the same.
        """
        values, samples = self.validation(batches, None)
        return values["loss"], samples

    def validate(
        self, examples: Any, metrics: Metrics | None = None, *, limit: int | None = None
    ) -> dict[str, float]:
        """The mean loss and the metrics over validation data; equal on every rank, collective.

        Sums and counts are added over all samples of all ranks, and divided once; statistics are
        put together, and their metric is made once.

        Args:
            examples: A `Source`, a map-style `Dataset`, or a loader.
            metrics: See `headway.run.recipe.recipe.Metrics`.
            limit: Most samples; None: all of them.

        Returns:
            "loss" and each metric.

        Raises:
            PlanError: Metrics of split samples, of which no rank has a whole one.
            RecipeError: In a pipeline: metrics that call the model otherwise than once.
            RecipeError: A metric is no mean, no pair (sum, count) and no statistic.
        """
        if isinstance(examples, Loader):
            return self.validation(examples, metrics)[0]
        with self.validation_loader(examples, limit=limit) as loader:
            return self.validation(loader, metrics)[0]

    def validation_loader(self, examples: Any, *, limit: int | None = None) -> Loader:
        """This rank's shares of validation data, the same samples in order each time."""
        plan = self.plan
        source = rank_source(examples, plan, self.world.rank)
        known = known_length(source)
        samples = limit if known is None else min(known, limit or known)
        batch = BatchSplit(
            samples=plan.batch.samples if samples is None else min(samples, plan.batch.samples),
            microbatch=plan.batch.largest(plan.data_degree),
        )
        check_slots(source, batch.samples, samples)
        begin_slots(source)  # the same examples at every validation
        alone = self.world.alone  # each process validates the whole then, for itself
        return Loader(
            source,
            batch if alone else batch.shared_as(plan.batch, plan.data_degree),
            rank=0 if alone else plan.data_rank(self.world.rank),
            ranks=1 if alone else plan.data_degree,
            cursor=Cursor(seed=self.seed),
            # The same samples at every validation, so that their losses can be compared.
            shuffle=False,
            epochs=1,
            limit=samples,
        )

    def validation(
        self, batches: RankLoader, metrics: Metrics | None
    ) -> tuple[dict[str, float], int]:
        """The mean loss and metrics, by name, and the number of samples."""
        if metrics is not None:
            check_metrics(self.plan)
        self.flush()
        self.strategy.parameters.share_buffers()
        found = MetricParts()
        # float64, because counts above 2^24 are not exact in float32.
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            self._spare.note(batch)
            self.cut(batch)
            wide = double_precision(self.plan.memory.precision)
            told = loss_errors_explained(self._given_loss)
            with told, evaluating(self.model), torch.no_grad(), wide:
                # All ranks that share a sample have computed its loss: only one of them counts.
                totals += self._sums(batch) * self.plan.counts(self.world.rank)
                if metrics is not None:
                    for value, samples in self._evaluated(batch, metrics):
                        found.add(metric_parts(value, samples))
        doing = f"validation of step {self.steps_done + 1}"
        self.world.sum(totals, doing)
        values = {"loss": float(totals[0] / totals[1])}
        if metrics is not None:
            own = found.joined() if self.plan.counts(self.world.rank) else {}
            values |= metrics_over_ranks(own, self.world, doing)
        return values, int(totals[2])

    def cut(self, batch: RankBatch | None, metrics: Metrics | None = None) -> None:
        """Cut the model into the plan's stages, or split its layers; collective.

        The first `step` does it, too. Each rank keeps its own part.

        Args:
            batch: Any batch that the model can be called with; only that of rank 0 is used.
            metrics: Which validation will compute: tried with the stages as the loss is.

        Raises:
            PlanError: The model cannot be cut.
            RecipeError: Loss or metrics do not call the model exactly once.
        """
        if self.pipeline is not None and metrics is not None:
            self.pipeline.metrics = metrics
        if self._check_loss is not None and batch is not None and batch.micros:
            self._check_loss(batch)
            self._check_loss = None
        wide = double_precision(self.plan.memory.precision)
        with wide, loss_errors_explained(self._given_loss):
            self._sites = self.strategy.prepare(batch) or self._sites
        self._divided = True

    def save(self, path: str | Path, *, keep: int = 2) -> None:
        """Save a checkpoint of model, optimiser, scheduler and the place in the data; collective.

        Returns when it is on disk, whole. Any number of ranks and any plan can resume from it. Of
        workers that have different models now it holds each one's, with which the same workers go
        on, and the mean, from which others begin.

        Args:
            path: A directory of checkpoints that all ranks see; one of this step is added.
            keep: How many of them stay.

        Raises:
            CheckpointError: It cannot be written.
            UsageError: The plan's model has not been cut yet.
        """
        if keep < 1:
            raise UsageError(f"keep is {keep}", fix="Keep 1 checkpoint at least.")
        if not self.strategy.can_save:
            raise UsageError(
                f"after step {self.steps_done} each worker is at a step of its own "
                f"({self.plan.synchrony}), and a checkpoint is of one step",
                fix="Save after run.finish().",
            )
        trained = self._trained()
        self.flush()
        self.strategy.share_buffers()
        with self.world.explained(f"the checkpoint of step {self.steps_done}"):
            tensors, facts, holdings = checkpoint_contents(
                trained, self.strategy, self._inventory, self.slots
            )
            facts["cursor"] = (self._after or Cursor(seed=self.seed)).to_dict()
            store = self._store(path)
            store.keep = keep
            store.save(self.steps_done, tensors, facts, holdings)
            store.wait()

    def resume(self, path: str | Path) -> int:
        """Go on from the newest whole checkpoint that `save` or `headway train` has written.

        Collective. `batches` goes on behind the last batch that had been used; a loop over epochs
        is written as for a new run, and passes through those that are done without batches.

        Args:
            path: The directory given to `save`, or the "checkpoints" of a run directory.

        Returns:
            The steps done; 0 where there is no checkpoint, and nothing is changed.

        Raises:
            CheckpointError: None of the checkpoints can be used, or one is of another model.
            UsageError: The plan's model has not been cut yet.
        """
        self.flush()
        with self.world.explained("restoring a checkpoint"):
            manifest = restore_checkpoint(
                self._store(path), self._trained(), self.strategy, self.slots
            )
        if manifest is None:
            return 0
        cursor = Cursor.from_dict(manifest.facts.get("cursor", Cursor(seed=self.seed).to_dict()))
        if cursor.seed != self.seed:
            raise CheckpointMismatch(
                f"the checkpoint was made with seed {cursor.seed}, the Executor has {self.seed}",
                why="Samples would be seen twice or never, because the seed decides their order.",
                fix=f"Write Executor(..., seed={cursor.seed}).",
            )
        self.steps_done = manifest.step
        self._after = self._resumed = cursor
        return manifest.step

    def _trained(self) -> TrainingState:
        """What a checkpoint holds, as this rank has it."""
        if self.plan.needs_batch and not self._divided:
            raise UsageError(
                "this rank does not know its part of the model yet",
                why="A model is cut into stages, layers and tables are split, by a first batch.",
                fix="Write run.cut(next(iter(run.batches(dataset)))) before save or resume.",
            )
        held = self.strategy.parameters
        return TrainingState(
            self.model, self.optimizer, self.scheduler, away=held.away, layout=held.layers
        )

    def _store(self, path: str | Path) -> CheckpointStore:
        directory = Path(path)
        if directory not in self._stores:
            self._stores[directory] = CheckpointStore(
                directory,
                rank=self.world.rank,
                ranks=self.world.ranks,
                group=self.world.side_group,
            )
        return self._stores[directory]

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, the model is whole on rank 0; collective.

        with run.whole() as model:
            if run.world.rank == 0:
                torch.save(model.state_dict(), "model.pt")
        """
        self.strategy.gather_whole()
        try:
            yield self.strategy.parameters.whole
        finally:
            self.strategy.parameters.release_whole()

    def call_before(self, kind: Kind, look: Callable[[], None]) -> None:
        """Call a function before every instruction of a kind; it must change nothing."""
        self._before[kind] = look

    def flush(self) -> None:
        """Wait until every update has been made (priority); call it before you read parameters."""
        self.strategy.flush()

    def close(self) -> None:
        """Take the hooks off the model and leave the world; collective.

        A model that was cut into stages is whole on rank 0 then, and unusable on the other ranks.
        """
        self.finish()
        self.strategy.gather_whole()
        self._leave()

    def _leave(self) -> None:
        self.strategy.close()
        self.world.leave()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error the other ranks may never come to the collectives that gather the model.
        self.close() if kind is None else self._leave()

    # -- the interpreter ---------------------------------------------------------------------

    def _carry_out(self, program: StepProgram) -> None:
        # Spans are on the wall clock, so that those of several ranks can be compared.
        offset = time() - perf_counter()
        node = f"step {self.steps_done + 1}"
        for instruction in program.instructions:
            if instruction.kind in self._before:
                self._before[instruction.kind]()
            computes = instruction.kind in _COMPUTING
            wide = double_precision(self.plan.memory.precision) if computes else nullcontext()
            start = perf_counter()
            with wide:
                self._handlers[instruction.kind](instruction)
            times = offset + start, offset + perf_counter()
            self.record.note(instruction.kind, str(instruction), self.world.rank, times, node)

    def _clear(self, _: Instruction) -> None:
        assert self._batch is not None
        self._shares, self._counts = [], []
        own = sum(len(micro.positions) for micro in self._batch.micros)
        self.strategy.begin(self.record, own, f"step {self.steps_done + 1}")

    def _forward(self, instruction: Instruction) -> None:
        micro, value = self._call(instruction)
        total, count = sum_and_count(value, len(micro.positions))
        give_outputs(value, micro.absorb)
        # By the samples of the global batch, so that gradients only need to be added: over
        # micro-batches here, over ranks in the exchange.
        share = total / self.record.samples
        self._loss_of[instruction.microbatch or 0] = share
        self._shares.append(share.detach())
        self._counts.append(count)

    def _idle(self, instruction: Instruction) -> None:
        with self.strategy.parameters.idle():
            micro, value = self._call(instruction)
        total, _ = sum_and_count(value, len(micro.positions))
        # Times 0: backward must run, with the collectives of sharded state, and add nothing.
        self._loss_of[instruction.microbatch or 0] = total * 0.0

    def _call(self, instruction: Instruction) -> tuple[MicroBatch, Any]:
        """An instruction's micro-batch, and what the loss returns for it."""
        micro = self._micro(instruction)
        with (
            self.strategy.context.exchanging(),
            self._randomness(micro, drawing=True),
            self._normalising(instruction),
        ):
            return micro, self._apply(self._loss, micro)

    def _normalising(self, instruction: Instruction) -> AbstractContextManager[None]:
        """The context of a pass whose batch normalisation has the statistics of all ranks."""
        assert self._batch is not None
        if self._norm is None:
            return nullcontext()
        return self._norm.over(counted=(instruction.microbatch or 0) < len(self._batch.micros))

    def _tally(self, _: Instruction) -> None:
        assert self._batch is not None
        fact = self._batch.fact
        self.strategy.tally(self._shares, self._counts, vote=self.wants_stop, fact=fact)
        if self._following is not None:
            parameters = self.strategy.parameters
            self.strategy.context.remarks += parameters.ahead(self._batch, self._following)

    def _backward(self, instruction: Instruction) -> None:
        loss = self._loss_of.pop(instruction.microbatch or 0)
        check_trains(loss)
        recomputes = self._sites is not None and self._sites.in_backward
        with (
            self.strategy.context.exchanging(),
            self._randomness(self._micro(instruction), drawing=recomputes),
            self._normalising(instruction),  # of what backward computes again
        ):
            loss.backward()

    def _pass_through(self, _: Instruction) -> None:
        # Losses are known only on the ranks where a pipe ends.
        assert self._batch is not None
        assert self.pipeline is not None
        self.pipeline.run(self._batch, self.record, f"step {self.steps_done + 1}")
        self._shares, self._counts = self.pipeline.losses, self.pipeline.counts

    # -- one micro-batch ---------------------------------------------------------------------

    def _micro(self, instruction: Instruction) -> MicroBatch:
        assert self._batch is not None
        number = instruction.microbatch or 0
        own = self._batch.micros
        return own[number] if number < len(own) else self._spare.micro

    def _sums(self, batch: RankBatch) -> Tensor:
        """Of a batch: loss, what it is a sum over, samples."""
        found = [(*map(float, sum_and_count(v, n)), n) for v, n in self._evaluated(batch)]
        # The row of zeros is for a rank that a ragged batch leaves without micro-batches.
        return torch.tensor([(0.0, 0.0, 0), *found], dtype=torch.float64).sum(0)

    def _evaluated(self, batch: RankBatch, metrics: Metrics | None = None) -> list[tuple[Any, int]]:
        """What the loss, or metrics, make of each of this rank's micro-batches; its samples."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(batch, metrics)
        function = self._loss if metrics is None else metrics
        found = []
        for micro in batch.micros:
            value = self._apply(function, micro)
            if metrics is None:
                give_outputs(value, micro.absorb)
            found.append((value, len(micro.positions)))
        # Other ranks gather sharded weights for the passes that this one lacks, and need it there.
        for _ in range(self._spare.lacking(batch)):
            self._apply(function, self._spare.micro)
        return found

    def _apply(self, function: Callable[[nn.Module, Any], Any], micro: MicroBatch) -> Any:
        """What a loss, or metrics, make of a micro-batch."""
        data = self._prepare(micro.data)
        with self._arithmetic(), self.strategy.reducer.calling():
            return function(self.model, data)

    def _prepare(self, data: Any) -> Any:
        return to_device(data, self.world.device, self._dtype)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return autocast(self.plan.memory.precision, self.world.device)

    @contextmanager
    def _randomness(self, micro: MicroBatch, *, drawing: bool) -> Iterator[None]:
        """Inside, random draws are keyed by sample."""
        assert self._batch is not None
        start = self._batch.start
        if self._sites is None:
            self._sites = self._probe(self._prepare(micro.data))
        if not drawing:
            yield
            return
        # Every micro-batch starts from the same state, so that draws have the same numbers; see
        # `step.randomness`.
        seed_everything(self.seed, start.epoch, start.position)
        # Backward gets the same object: recomputation looks up the draws that forward has met.
        if self._mode is None or self._mode_of is not micro:
            self._mode = LogicalRandomness(self._sites, micro.positions, start.epoch)
            self._mode_of = micro
        with self._mode.active() if self._sites.forward else nullcontext():
            yield

    def _loss_check(self, loss: Loss) -> Callable[[RankBatch], None] | None:
        """A look at the loss of the first batch, with the whole model, on one rank alone."""
        # Of samples in parts, of which no rank has a whole one, nothing can be said.
        if self.world.rank or self.plan.split.spatial:
            return None
        sharded = self.plan.memory.zero > 0 and self.world.ranks > 1
        model = whole_copy(self.model) if sharded else self.model
        if model is None:
            return None

        def check(batch: RankBatch) -> None:
            if len(batch.micros[0].positions) == batch.samples:
                return  # it is not split
            with double_precision(self.plan.memory.precision):
                doubt = explain_split_loss(model, loss, batch.micros, self._prepare)
            if doubt:
                warnings.warn(doubt, stacklevel=2)

        return check

    def _probe(self, data: Any, loss: Loss | None = None) -> RandomDraws:
        """Probe the random draws of the model; warns where they depend on the split."""
        with self._arithmetic(), self.strategy.reducer.calling():
            sites = probe_random_draws(self.model, loss or self._loss, data, resize_batch)
        for doubt in sites.doubts:
            warnings.warn(f"random numbers of the model depend on the split: {doubt}", stacklevel=2)
        if sites.forward and is_compiled(self.model):
            warnings.warn(
                "the model is compiled, and trains uncompiled: it draws random numbers, which "
                "headway draws sample by sample outside of compiled code",
                stacklevel=2,
            )
        return sites


_COMPUTING = ("forward", "idle", "backward", "pipeline")
"""Instructions that run the user's model."""
_PLAIN = ("arm", "propose", "send", "receive", "adopt", "scale", "clip", "update",
          "agree", "settle", "release")  # fmt: skip
"""Instructions that need nothing but the gradients."""


def _carry_out(do: Callable[[], None], _: Instruction) -> None:
    do()


def check_metrics(plan: Plan) -> None:
    """Refuse metrics where no rank calls the model on whole samples.

    Raises:
        PlanError: Of split samples.
    """
    if plan.split.spatial:
        raise PlanError(
            "metrics cannot be computed with split samples",
            problems=["no rank calls the model on a whole sample"],
            fix='Leave out metrics and monitor="loss", or split the model by stages, zero or '
            "tensor.",
        )


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move existing state of the optimiser to the device and type of its parameters."""
    # `load_state_dict` casts every tensor of the state to its parameter's device and type.
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
