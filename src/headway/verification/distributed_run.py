"""The run to be verified: the executor on several ranks, recorded on rank 0.

The steps are those of training. Where updates cross the border of a step (priority), nothing waits
for them: each is copied as it is made, and held back for a moment before, so that a forward pass
that does not wait meets the old values. After each step the ranks compare checksums of what they
hold: ranks that drift apart are a difference even where rank 0 is right. Where a run ends in an
error, what it has done before is recorded, and shows the tensor that was wrong first.

A plan whose exchange is inexact runs twice: with nothing compressed, to be equal to the serial run,
and as it is, with what goes into and comes out of the buckets of every rank (`replay` compares it).
All this is in float64; data parallelism makes two more steps so in the recipe's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, get_args

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.channel.facts import gather_facts
from headway.comm.compress.state import STATE_PREFIX
from headway.comm.lanes.buckets import Bucket, BucketNames
from headway.comm.tuning.autotuning import AdaptiveExchange, BucketArrangement
from headway.errors import Diverged
from headway.optim import parallel_norms
from headway.optim.layerwise import Layerwise
from headway.plans import ExchangePlan, Plan, data_parallel
from headway.run.distributed import replica_sync
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.process_groups import gather_to_first
from headway.run.distributed.world import World
from headway.run.executor import Executor, Kind
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import build_model
from headway.run.step.setup import recipe_plan, stepped_each_step
from headway.run.strategy.growing_tables import GrowingTables
from headway.run.strategy.training_state import TrainingState
from headway.run.synchrony.rounds import RoundsRun
from headway.run.synchrony.worker_group import AnyFreeRun
from headway.verification.exchange_recording import ExchangeRecorder, exchange_file
from headway.verification.history_run import history_file
from headway.verification.recording import (
    Recorder,
    VerifyJob,
    build_training_state,
    recipe_and_plan,
)
from headway.verification.reference.epochs import reference_epochs
from headway.verification.reference.recipes import check_plan
from headway.verification.serial_run import save_cut
from headway.verification.worker_exchange import (
    by_worker,
    meeting_kinds,
    meetings_file,
    worker_name,
)
from headway.verification.worker_run import workers_file

TensorsByKind = dict[str, dict[str, Tensor]]

PATIENCE = 5.0
"""Seconds that a rank which has failed waits for the recording of rank 0."""
REARRANGED_AFTER = 1
"""The step after which, and after the next, an exchange that may re-arrange its buckets must."""


def record_split(place: LaunchEnv, job: VerifyJob, target: Path) -> None:
    """Run the recipe by its plan in float64; rank 0 saves the recording to `target`."""
    with World.join(place, device="cpu", timeout_seconds=job.timeout_seconds) as world:
        record_in_world(world, job, target)


def record_in_world(world: World, job: VerifyJob, target: Path) -> None:
    """As `record_split`, in a world that is there already."""
    recipe = job.load()
    plan = recipe_plan(recipe, job.plan, world.ranks)
    if job.plan is None:
        check_plan(recipe, plan)
    world = on_two_nodes(world, plan)
    if plan.exchange.exact or world.ranks == 1:
        run = _recorded(world, job, recipe, _in_float64(plan))
        run.save(target)
    else:
        _recorded(world, job, recipe, _in_float64(uncompressed(plan))).save(target)
        run = _recorded(world, job, recipe, _in_float64(plan))
        run.save(inexact_file(target))
    job = replace(job, narrow=True)
    recipe, plan = recipe_and_plan(job, world.ranks)
    if world.ranks > 1 and has_precision_law(recipe, plan) and not run.coupled:
        _recorded(world, job, recipe, plan).save(narrow_file(target))


def has_precision_law(recipe: Recipe, plan: Plan) -> bool:
    """Whether each rank has the gradients of whole samples, which can be made again to the bit.

    Where a rank holds a part of the model, of a sample or of the state, operators have other
    shapes than in one process, and how their rounding differs no law says; nor by how much rounding
    grows from level to level of Adasum. Where groups of ranks combine parameters among themselves,
    only those of rank 0 are recorded. Nor is there one for numbers that ranks exchange in a forward
    pass (`RecordedRun.coupled`), as those of tables that are split or grow.
    """
    alike = plan.copies == plan.ranks and not plan.memory.zero and not plan.split.ranks > 1
    alike = alike and not plan.split.tables
    model = build_model(recipe)
    return (
        recipe.precision != "float64"
        and alike
        and plan.synchrony.by_all_reduce
        and plan.exchange.values == "gradients"
        and (plan.exchange.reduce != "adasum" or plan.ranks == 2)
        and not any(part.ranks for part in plan.exchange.parts)
        and not GrowingTables(model).tables
        and all(p.is_cpu and not p.is_complex() for p in model.parameters())
    )


def _recorded(world: World, job: VerifyJob, recipe: Recipe, plan: Plan) -> RecordedRun:
    model = build_model(recipe)
    trained = build_training_state(recipe, model if job.narrow else to_float64(model))
    executor = Executor(
        trained.model,
        trained.optimizer,
        loss=recipe.loss,
        plan=plan,
        scheduler=stepped_each_step(trained.scheduler),
        clip=recipe.clip,
        seed=recipe.seed,
        world=world,
    )
    return RecordedRun(world, job, executor.plan, trained, executor)


def inexact_file(target: Path) -> Path:
    """Where the run with the inexact exchange is recorded, beside that without it."""
    return target.with_suffix(".inexact.safetensors")


def narrow_file(target: Path) -> Path:
    """Where the run in the recipe's own precision is recorded, beside that in float64."""
    return target.with_suffix(".narrow.safetensors")


def uncompressed(plan: Plan) -> Plan:
    """The plan with an exact exchange: no compressor, the mean in place of Adasum or a sum."""
    parts = tuple(replace(part, compress=None, ranks=None) for part in plan.exchange.parts)
    exchange = replace(
        plan.exchange, compress="none", reduce="mean", values="gradients", parts=parts
    )
    return replace(plan, exchange=exchange)


def trained_plan(job: VerifyJob, processes: int) -> Plan:
    """The plan by which a training run is made that is verified, in float64."""
    return _in_float64(recipe_plan(job.load(), job.plan, processes))


def simple_plan(job: VerifyJob, processes: int, like: Plan | None = None) -> Plan:
    """Data parallelism in float64, to resume with another plan.

    Args:
        like: Its exchange, and how state is sharded; None: neither.
    """
    recipe = job.load()
    plan = data_parallel(
        resolve_batch(recipe),
        processes=processes,
        microbatch=recipe.microbatch,
        exchange=like.exchange if like else None,
        zero=like.memory.zero if like else 0,
    )
    return _in_float64(plan)


def _in_float64(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, precision="float64"))


def on_two_nodes(world: World, plan: Plan) -> World:
    """A world whose ranks count as two nodes, for a hierarchy that would else have one level."""
    levels = plan.exchange.collective == "hierarchical"
    levels |= any(split.way in ("table_row", "grid") for split in plan.split.tables)
    if not levels or world.place.node_name or world.ranks < 2:
        return world
    nodes = 2 if world.ranks % 2 == 0 else world.ranks
    world.place = replace(world.place, node_name=f"node {world.rank * nodes // world.ranks}")
    return world


class _ForwardCollectives(TorchDispatchMode):
    """Whether the forward passes of a step exchange anything with other ranks.

    A loss of the user's may gather the features of all ranks; no plan tells of it.
    """

    def __init__(self, run: Executor, looks: Mapping[Kind, Callable[[], None]]) -> None:
        """
        Args:
            run: Whose forward passes are watched.
            looks: What else is called before an instruction: the executor calls one function.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._inside = False
        for kind in get_args(Kind):
            run.call_before(kind, partial(self._before, kind, looks.get(kind)))

    def _before(self, kind: Kind, look: Callable[[], None] | None) -> None:
        """The instruction before has ended: the mode is on during a forward pass alone."""
        forward = kind in ("forward", "idle")
        if self._inside and not forward:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif forward and not self._inside:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._inside = forward
        if look is not None:
            look()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found |= "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


@dataclass
class _CrossingSteps:
    """With priority: gradients, parameters and state of the optimiser, copied at each update."""

    trained: TrainingState
    numbers: dict[int, dict[str, dict[str, Tensor]]] = field(default_factory=dict)

    def note(self, step: int, bucket: Bucket) -> None:
        """The update of a bucket has been made."""
        kinds = self.of(step)
        rows = zip(bucket.names, bucket.parameters, bucket.views, bucket.used, strict=True)
        for name, parameter, view, used in rows:
            kinds["parameter"][name] = parameter.detach().clone()
            if used:
                kinds["gradient"][name] = view.detach().clone()
            for key, value in self.trained.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    kinds["optimizer"][f"{name}.{key}"] = value.detach().clone()

    def of(self, step: int) -> dict[str, dict[str, Tensor]]:
        kinds = ("gradient", "parameter", "buffer", "optimizer")
        return self.numbers.setdefault(step, {kind: {} for kind in kinds})

    def note_rest(self, step: int) -> None:
        """What no update changes: buffers, and parameters that are not trained."""
        model = self.trained.model
        kinds = self.of(step)
        kinds["buffer"] = {name: b.detach().clone() for name, b in model.named_buffers()}
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        kinds["parameter"] |= {name: p.detach().clone() for name, p in frozen.items()}


def nap(worker: int, step: int) -> float:
    """Seconds that a worker which meets nobody waits before a step, so that all are ahead of all
    others, and behind them, within a few steps."""
    return 0.03 * (hash((worker, step)) % 3 == 0) + 0.02 * (step // 3 % 3 == worker % 3)


def _copied(numbers: Mapping[str, Mapping[str, Tensor]]) -> TensorsByKind:
    return {
        kind: {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for kind, tensors in numbers.items()
    }


def _await_file(path: Path) -> None:
    """Wait for what rank 0 writes, but not for ever: it may be stuck."""
    until = monotonic() + PATIENCE
    while not path.exists() and monotonic() < until:
        sleep(0.02)


class RecordedRun:
    """The steps of a plan in a world, recorded while they are made."""

    def __init__(
        self,
        world: World,
        job: VerifyJob,
        plan: Plan,
        trained: TrainingState,
        executor: Executor,
    ) -> None:
        self._world, self._job, self._plan = world, job, plan
        self._recipe = recipe = job.load()
        self._run = executor
        self._losses: dict[int, float] = {}
        self._recorder = Recorder(trained)
        self._apart: dict[str, str] = {}
        # Of workers that do not meet, each rank's own: loss, count and tensors of every step.
        self._free: list[tuple[float, float, TensorsByKind]] | None = None
        rounds = executor.strategy.rounds
        if isinstance(rounds, AnyFreeRun):
            self._free = []
            rounds.snapshots.every = 0  # no checkpoint is made here
        self._meetings: ExchangeRecorder | None = None
        if isinstance(rounds, RoundsRun) and (differences := rounds.differences) is not None:
            self._meetings = ExchangeRecorder(lambda: differences.description)
            differences.observe(self._meetings)
        self._crossing: _CrossingSteps | None = None
        if plan.exchange.priority and recipe.clip is None and world.ranks > 1:
            self._crossing = _CrossingSteps(trained)
        crossing = self._crossing
        self._observer: ExchangeRecorder | None = None
        if world.ranks > 1 and (crossing or job.narrow or not plan.exchange.exact):
            self._observer = ExchangeRecorder(
                self._description, None if crossing is None else crossing.note
            )
        _divide_norms(trained)  # also in a training run: the same numbers
        looks: dict[Kind, Callable[[], None]] = {}
        if recipe.clip is not None and plan.synchrony.by_all_reduce:
            looks["clip"] = self._before_clip
        self._collectives = _ForwardCollectives(executor, looks)

    @property
    def coupled(self) -> bool:
        """Whether the gradients of a rank depend on the samples of others.

        Known after the first step. Not said of plans whose forward pass gathers parameters or parts
        of tensors.
        """
        plan = self._plan
        alone = plan.data_degree == plan.ranks and not plan.memory.zero and plan.split.ranks == 1
        return plan.batch.norm == "global" or (alone and self._collectives.found)

    def save(self, target: Path) -> None:
        """Make the steps; rank 0 writes the recording, every rank its exchange.

        What was recorded before an error is written as well.
        """
        ended, made = True, False
        try:
            self._make_steps()
            made = True
            self._save_history(target)
            self._run.flush()
            self._take_crossing()
            self._checkpoint_exchange()
            # Not `run.close`, which would gather the model and leave the caller's world.
            self._run.strategy.close()
            ended = bool(self._apart)
        finally:
            # Of workers that do not meet nothing is gathered before the end.
            gathered = self._free is None or made
            if gathered:
                self.write(target, ended=ended)
            if ended and gathered:
                # The first rank that leaves ends the others.
                _await_file(target)

    def _save_history(self, target: Path) -> None:
        rounds = self._run.strategy.rounds
        if isinstance(rounds, AnyFreeRun) and rounds.first:
            rounds.history.save(history_file(target, rounds.worker))

    def _checkpoint_exchange(self) -> None:
        """Save what compressors keep back, as a checkpoint does, and take it up; collective."""
        exchange = self._run.strategy.exchange
        if self._observer is None or exchange is None or self._apart or self._job.narrow:
            return
        saved = self._run.strategy.exchange_state()
        if saved:
            self._run.strategy.restore_exchange(saved)
            named = {key.removeprefix(STATE_PREFIX): value for key, value in saved.items()}
            self._observer.checkpointed(named, exchange.state())

    def write(self, target: Path, *, ended: bool) -> None:
        """Write what has been recorded; the updates of all steps have been made.

        Args:
            ended: The run ended before it was over.
        """
        if self._observer is not None and (self._job.narrow or not self._plan.exchange.exact):
            self._observer.recording().save(exchange_file(target, self._world.rank))
        if self._meetings is not None:
            self._meetings.recording().save(meetings_file(target, self._world.rank))
        if self._world.rank == 0:
            recording = self._recorder.recording(apart=self._apart, ended=ended)
            replace(recording, coupled=self.coupled).save(target)
            if not self._plan.flushes and self._run.pipeline and self._run.pipeline.stages:
                save_cut(self._run.pipeline.stages, target)
            if not self._plan.synchrony.by_all_reduce:
                workers_file(target).touch()

    def _make_steps(self) -> None:
        """All steps, or until the ranks are apart."""
        run, recipe, job = self._run, self._recipe, self._job
        source = training_data(recipe)
        cursor = job.start(recipe, reference_epochs(recipe, source).sizes_to_the_end)
        step = 0
        with run.loader(source, cursor=cursor, drop_last=recipe.drop_last) as loader:
            # The range first: else zip would read one more batch before it notices the end.
            for step, batch in zip(range(1, job.count(recipe) + 1), loader, strict=False):
                run.cut(batch)  # split layers have no exchange before
                self.watch(step)
                if self._free is not None:
                    sleep(nap(self._world.rank * self._plan.workers // self._plan.ranks, step))
                try:
                    loss = run.step(batch)
                except Diverged:
                    self._take_unfinished(step)
                    raise
                if not self.take(step, loss):
                    break
        self._finish_workers(step)

    def take(self, step: int, loss: float) -> bool:
        """Record a step that has been made; whether the ranks hold the same numbers."""
        self._losses[step] = loss
        if self._crossing is not None:
            self._crossing.note_rest(step)
            return True
        numbers = self._run.strategy.tensors_by_kind()
        if self._free is not None:
            # Gathered at the end: nobody waits for all here.
            self._free.append((loss, self._run.strategy.count, _copied(numbers)))
            return True
        if not self._plan.synchrony.by_all_reduce:
            self._take_workers(step, loss, self._run.strategy.count, numbers)
            return self._same_in_workers(step)
        self._recorder.take(step, loss, numbers, self._run.record.norm)
        held = self._run.strategy.parameters
        return self._same_everywhere(step, held.alike, held.away)

    def _take_workers(
        self, step: int, loss: float, count: float, numbers: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Record the tensors of all workers, and the loss over all samples; collective."""
        world, inner = self._world, self._plan.ranks // self._plan.workers
        worker, place = divmod(world.rank, inner)
        own = {} if place else dict(numbers)
        if self._meetings is not None:
            own |= meeting_kinds(self._meetings, step)
        flat = {
            f"{kind}/{name}": value.detach().to_dense() if value.is_sparse else value.detach()
            for kind, tensors in by_worker({worker: own}).items()
            for name, value in tensors.items()
        }
        told = [(loss, count)] if self._world.alone else gather_facts((loss, count))
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in gather_to_first(flat, world).items():
            kind, _, name = key.partition("/")
            found.setdefault(kind, {})[name] = value
        counted = [(mean, count) for mean, count in told[::inner] if count]
        total = sum(mean * count for mean, count in counted)
        self._recorder.take(step, total / sum(count for _, count in counted), found)

    def _same_in_workers(self, step: int) -> bool:
        """Whether all copies of a worker's model are the same after a step; collective."""
        # Copies of a parameter in several stages are averaged in messages of their own, whose sums
        # may be taken in another order; a copy that is wrong shows in the next gradient.
        if self._plan.ranks == self._plan.workers or self._plan.pipe_degree > 1:
            return True
        held, first = self._run.strategy.parameters, self._plan.worker_ranks(self._world.rank)[0]
        worker = first * self._plan.workers // self._plan.ranks
        own = replica_sync.checksums(held.named, held.away)
        found = self._apart_in({worker_name(worker, name): n for name, n in own.items()})
        for name, ranks in found.items():
            self._apart[f"{step}/parameter/{name.partition(' at ')[0]}"] = ranks
        return not found

    def _finish_workers(self, step: int) -> None:
        """Record the model that all workers end with."""
        if self._plan.synchrony.by_all_reduce:
            return
        if self._meetings is not None:
            self._meetings.step = step + 1
        self._run.finish()
        for made, (loss, count, numbers) in enumerate(self._free or (), 1):
            self._take_workers(made, loss, count, numbers)
        ends = self._run.strategy.tensors_by_kind()
        kinds = ["parameter"]
        if self._plan.synchrony.central:
            kinds.append("optimizer")  # of the servers
        # A pipeline's are complete on the first rank of each worker.
        self._take_workers(step + 1, 0.0, 1.0, {kind: ends.get(kind, {}) for kind in kinds})
        if self._free is not None:  # before that nobody waits for all
            self._same_in_workers(step + 1)

    def _take_crossing(self) -> None:
        """With priority: all steps of which all updates have been made."""
        if self._crossing is None:
            return
        for step, loss in self._losses.items():
            numbers = self._crossing.of(step)
            self._recorder.take(step, loss, numbers)
            if not self._same_everywhere(step, numbers["parameter"]):
                break

    def _take_unfinished(self, step: int) -> None:
        """What there is of a step whose loss or norm is not finite: its update was not made."""
        numbers: Mapping[str, Mapping[str, Tensor]] = {}
        if self._crossing is not None:
            self._take_crossing()
        else:
            numbers = {"gradient": self._run.strategy.tensors_by_kind()["gradient"]}
        self._recorder.take(step, self._run.record.loss, numbers)

    def watch(self, step: int) -> None:
        """A step is about to be made."""
        if self._meetings is not None:
            self._meetings.step = step
        exchange = self._run.strategy.exchange
        if exchange is None:
            return
        if step - REARRANGED_AFTER in (1, 2) and not self._job.narrow:
            _rearrange(exchange, step - REARRANGED_AFTER)
        if self._observer is not None:
            self._observer.step = step
            exchange.observe(self._observer)

    def _description(self) -> ExchangePlan:
        exchange = self._run.strategy.exchange
        assert exchange is not None
        return exchange.description

    def _before_clip(self) -> None:
        self._recorder.before_clip(self._run.strategy.tensors_by_kind())

    def _same_everywhere(
        self, step: int, named: Mapping[str, Tensor], away: frozenset[Tensor] = frozenset()
    ) -> bool:
        """Whether ranks that hold a parameter, and exchange it, hold the same numbers; collective.

        If not, the tensors that differ are noted: also gradients, of which parameters are made.
        """
        if self._world.ranks == 1:
            return True
        parameters = self._apart_in(replica_sync.checksums(named, away))
        for name, ranks in parameters.items():
            self._apart[f"{step}/parameter/{name.partition(' at ')[0]}"] = ranks
        plan = self._plan
        parts = plan.memory.zero or plan.split.tensor or plan.split.tables
        if plan.exchange.values == "updates" or parts:
            return not parameters  # a rank has gradients of its own, or of its part
        if parameters:
            for kind in ("unclipped", "gradient"):
                found = self._recorder.of_kind(step, kind)
                sums = {f"{n}/{t.shape}": replica_sync.checksum(t) for n, t in found.items()}
                # Of stages only rank 0 has recorded anything.
                everywhere = plan.pipe_degree == 1
                for name, ranks in self._apart_in(sums, everywhere=everywhere).items():
                    self._apart[f"{step}/{kind}/{name.rpartition('/')[0]}"] = ranks
        return not parameters

    def _apart_in(self, sums: Mapping[str, int], *, everywhere: bool = False) -> dict[str, str]:
        """Of which tensors the checksums of two ranks differ, and of which ranks; collective.

        Args:
            everywhere: What one rank has, those that it exchanges it with must have.
        """
        found_on = gather_facts(dict(sums))
        first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        apart: dict[str, str] = {}
        for rank, known in enumerate(found_on):
            for name, found in known.items():
                group = self._group(name, rank)
                holder, expected = first.setdefault((name, group), (rank, found))
                if found != expected:
                    apart.setdefault(name, f"ranks {holder} and {rank} hold different numbers")
        for (name, group), (holder, _) in first.items() if everywhere else ():
            for rank in group or range(self._world.ranks):
                if name not in found_on[rank]:
                    apart.setdefault(name, f"rank {holder} has one, and rank {rank} has none")
        return apart

    def _group(self, name: str, rank: int) -> tuple[int, ...]:
        """The node group in which a parameter is combined; empty: all ranks."""
        part = self._plan.exchange.part(name.partition(" at ")[0].partition("/")[0])
        groups = part.ranks if part and part.ranks else ()
        return next((group for group in groups if rank in group), ())


def _rearrange(exchange: AdaptiveExchange, time: int) -> None:
    """Give the buckets other parameters, where measuring may change them anyway.

    Args:
        time: 1: every other parameter into one bucket, the rest into another; 2: a bucket for each.
    """
    plan = exchange.description
    if plan.bucket != "auto" and not plan.priority:
        return
    chunk = plan.initial_chunk_bytes if plan.priority else None
    names = list(exchange.parameters)
    order = names if plan.priority else names[::-1]
    layout: BucketNames = tuple((name,) for name in order)
    if time == 1:
        kinds: dict[Hashable, list[str]] = {}
        for name in order:
            parameter = exchange.parameters[name]
            kinds.setdefault((plan.part(name), parameter.dtype), []).append(name)
        halves = (kind[first::2] for kind in kinds.values() for first in (0, 1))
        layout = tuple(tuple(half) for half in halves if half)
    exchange.rearrange(BucketArrangement(layout, chunk))


def _divide_norms(trained: TrainingState) -> None:
    """Divide the norms of LARS and LAMB over the ranks, also where it does not pay."""
    optimizer = trained.optimizer
    if isinstance(optimizer, Layerwise) and optimizer.shared_norms is not None:
        parallel_norms(optimizer, optimizer.shared_norms.operator.group, always=True)
