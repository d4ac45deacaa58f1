"""The plan: the whole decision how a training step is distributed, as immutable data.

Everything above makes plans (the planner, or a person), everything below carries them out: a plan
is priced by `cost`, simulated by `simulator`, executed by `run`, checked by `verification` and
drawn by `report`. Its file form is JSON; its hash names the decision and nothing else.

`Plan.check` says why a plan cannot exist, sharded state included (ZeRO: Rajbhandari et al. 2020,
section 5; hybrid sharding: Zhao et al. 2023, PyTorch FSDP, section 3.2.2). `check_executable`
refuses legal plans that can be priced and simulated but that the executor does not support yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from headway.cluster.cluster import MAX_RANKS
from headway.collective.all_reduce.algorithm import AllReduceOptions
from headway.documents import document, read_document, to_type
from headway.errors import DocumentError, PlanError
from headway.keywords import checks_keywords
from headway.plans.batch import BatchSplit, Norm, whole_shares
from headway.plans.exchange import AllReduceName, ExchangePlan
from headway.plans.layer_split import SPACE, TENSOR, LayerSplit
from headway.plans.mesh import Axis, Mesh
from headway.plans.pipeline import PIPE_AXIS, PipelinePlan
from headway.plans.prediction import Prediction
from headway.plans.synchrony import WORKER_AXIS, Synchrony
from headway.plans.tensor_layout import divisors
from headway.units import counted

Zero = Literal[0, 1, 2, 3]
"""See `plan.MemoryPolicy`."""
SHARD_AXIS = "shard"
"""The axis of the mesh whose ranks keep the state together; they take shares of the batch, too."""


def sharding_problems(zero: int, mesh: Mesh, exchange: ExchangePlan) -> Iterator[str]:
    """The problems of a plan's sharding, one line each."""
    if not zero:
        if mesh.degree(SHARD_AXIS) > 1:
            yield (
                f"mesh axis {SHARD_AXIS} keeps state together; memory.zero is 0: "
                "let it be 1, 2 or 3"
            )
        return
    for name, value, only in (
        ("compress", exchange.compress, "none"),
        ("reduce", exchange.reduce, "mean"),
        ("values", exchange.values, "gradients"),
        ("collective", exchange.collective, "all_reduce"),
        ("priority", exchange.priority, False),
    ):
        if value != only:
            yield (
                f"exchange.{name} is {value!r}: with memory.zero {zero} gradients are summed "
                f"exactly where they are kept; leave it at {only!r}"
            )
    if exchange.parts:
        yield f"exchange.parts: with memory.zero {zero} all gradients are summed alike"


PLAN_FORMAT = 1


@document
class Layout:
    """How the tensors whose logical name matches a pattern lie on the mesh.

    `placements` has one word per mesh axis that matters: "copy" (every rank has all of it),
    "split:D" (cut along tensor dimension D) or "pending" (a sum that is still to be taken).
    Tensors that no layout matches are copies on every axis.
    """

    tensors: str
    placements: dict[str, str]


@document
class MemoryPolicy:
    """What is kept where.

    Attributes:
        zero: What the ranks of the data axis (of the axis "shard", where the mesh has one) keep a
            part of instead of all: 0 nothing, 1 the optimiser's state, 2 gradients as well, 3
            parameters, too. Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """

    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    zero: Zero = 0


@document
class Plan:
    """The decision; build one with `data_parallel` or `pipelined`."""

    mesh: Mesh
    batch: BatchSplit
    layouts: tuple[Layout, ...] = ()
    split: LayerSplit = LayerSplit()
    pipeline: PipelinePlan = PipelinePlan()
    exchange: ExchangePlan = ExchangePlan()
    synchrony: Synchrony = Synchrony()
    memory: MemoryPolicy = MemoryPolicy()
    format: int = PLAN_FORMAT
    prediction: Prediction | None = None

    def check(self) -> None:
        """Refuse an illegal plan.

        Raises:
            PlanError: With every problem.
        """
        # Values are compared only where their types are right: a plan that was built in Python may
        # hold what a plan file could not.
        problems = _wrong_types(self) or _illegal_values(self)
        if problems:
            raise PlanError(
                "this plan cannot exist", problems=problems, fix="Correct these values of the plan."
            )

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def workers(self) -> int:
        """Groups of ranks that agree with each other as `synchrony` says."""
        return self.mesh.degree(WORKER_AXIS)

    @property
    def survives(self) -> bool:
        """Whether workers go on where one dies: those of one rank, by some of the rules."""
        return self.synchrony.survives and self.ranks == self.workers

    @property
    def has_leaders(self) -> bool:
        """Whether the first rank of each worker leads the others: workers of several ranks that do
        not meet in rounds."""
        rules = self.synchrony
        return self.ranks > self.workers and not (rules.by_all_reduce or rules.in_rounds)

    def worker_ranks(self, rank: int) -> range:
        """The ranks of a rank's worker; where all agree at every step, all ranks."""
        inner = self.ranks // self.workers
        first = rank // inner * inner
        return range(first, first + inner)

    @property
    def copies(self) -> int:
        """Copies of the model, whole or sharded, that agree at every step."""
        return self.mesh.degree(self.exchange.axis) * self.mesh.degree(SHARD_AXIS)

    @property
    def data_degree(self) -> int:
        """The number of shares into which the global batch is cut."""
        return self.workers * self.copies

    @property
    def group_degree(self) -> int:
        """Ranks that share each sample, because they split layers or samples."""
        return self.mesh.degree(TENSOR) * self.mesh.degree(SPACE)

    @property
    def pipe_degree(self) -> int:
        """Ranks of a pipeline; 1: there is none."""
        return self.mesh.degree(PIPE_AXIS)

    @property
    def needs_batch(self) -> bool:
        """Whether a first batch must be there before ranks know their parts of the model."""
        return self.pipe_degree > 1 or bool(self.split.tensor) or self.places_tables

    @property
    def places_tables(self) -> bool:
        """Whether tables lie otherwise than whole in the memory of every rank."""
        apart = any(split.hot or split.way == "grow" for split in self.split.tables)
        return bool(self.split.tables) and (self.data_degree > 1 or apart)

    @property
    def meets_in_forward(self) -> bool:
        """Whether ranks that share the batch meet in a forward pass: they make as many passes.

        Sharded state is gathered, batches are normalised, rows of tables are looked up by all ranks
        together; a rank that has fewer micro-batches repeats its last one, without counting it.
        """
        shared = self.memory.zero > 0 or self.batch.norm == "global" or bool(self.split.tables)
        return shared and self.data_degree > 1

    @property
    def exchange_degree(self) -> int:
        """The ranks over which the exchange sums; 1 where it has nothing to sum."""
        # In a pipeline the schedule sums over the copies of stages; under ZeRO, FSDP2 does.
        if self.pipe_degree > 1 or self.memory.zero:
            return 1
        return self.copies * self.mesh.degree(SPACE)

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same parts of split layers, and agree at every step."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for rank in range(self.ranks):
            at = self.mesh.coordinate(rank)
            place = at.get(WORKER_AXIS, 0), at.get(TENSOR, 0)
            found[place] = (*found.get(place, ()), rank)
        return tuple(found.values())

    @cached_property
    def flushes(self) -> bool:
        """Whether all weights are updated together, at the end of a step."""
        # Without parts there is no table to ask; `check` refuses such a pipeline.
        if self.pipe_degree == 1 or self.batch.parts is None:
            return True
        return self.pipeline.make(self.pipe_degree, self.batch.parts).flush

    @property
    def exact(self) -> bool:
        """Whether a step equals that of the serial run, up to rounding."""
        return self.exchange.exact and self.flushes and self.synchrony.exact

    def data_rank(self, rank: int) -> int:
        """The number of the share of the global batch that a rank computes."""
        place = self.mesh.coordinate(rank)
        axes = (WORKER_AXIS, self.exchange.axis, SHARD_AXIS)
        number = 0
        for axis in axes:
            number = number * self.mesh.degree(axis) + place.get(axis, 0)
        return number

    def micro_sizes(self, rank: int) -> tuple[int, ...]:
        """Samples of each micro-batch that a rank computes of a full batch, in order."""
        share = self.batch.share(self.data_rank(rank), self.data_degree)
        found = tuple(map(len, self.batch.microbatches(share)))
        if self.pipe_degree == 1 and self.meets_in_forward:
            found += found[-1:] * (self.batch.passes(self.data_degree) - len(found))
        return found

    def counts(self, rank: int) -> bool:
        """Whether a rank's loss counts: it does on the first of the ranks that share a sample."""
        place = self.mesh.coordinate(rank)
        return not place.get(TENSOR, 0) and not place.get(SPACE, 0)

    def to_dict(self) -> dict[str, object]:
        found = dataclasses.asdict(self)
        # Of the many ways to agree, only what is chosen: most plans choose none.
        found["synchrony"] = {
            name: found["synchrony"][name]
            for name in dict.fromkeys(("kind", *self.synchrony.given))
        }
        if not self.split.tables:  # plans without them keep the name that they had
            del found["split"]["tables"], found["split"]["shared_memory"]
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that name this decision, independent of the file's layout."""
        # A prediction is no part of the decision: the same plan has others on other clusters.
        decision = self.to_dict()
        del decision["prediction"]
        if self.batch.norm == "local":  # plans without it keep the name that they had
            del cast("dict[str, object]", decision["batch"])["norm"]
        canonical = json.dumps(decision, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @staticmethod
    def load(path: Path) -> Plan:
        """Read and check a plan file.

        Raises:
            DocumentError: The file cannot be read or has unknown or wrong entries.
            PlanError: The entries are well formed, but no such plan can exist.
        """
        plan = read_document(path, Plan)
        plan.check()
        return plan

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def _wrong_types(plan: Plan) -> list[str]:
    try:
        to_type(plan.to_dict(), Plan, where="plan")
    except DocumentError as error:
        # Without the place, which stands in front of two blanks: there is no file.
        return [problem.partition("  ")[2] for problem in error.problems]
    return []


MAX_AXES = 32
"""Of a mesh; headway knows five."""


def _illegal_values(plan: Plan) -> list[str]:
    # First and alone: what is checked below takes time for every axis and every rank.
    if len(plan.mesh.axes) > MAX_AXES:
        return [f"mesh has {len(plan.mesh.axes)} axes; at most {MAX_AXES}"]
    if plan.ranks > MAX_RANKS:
        return [f"mesh has {plan.ranks} ranks; at most {MAX_RANKS}"]
    found: list[str] = []
    names = plan.mesh.names
    known = (WORKER_AXIS, plan.exchange.axis, SHARD_AXIS, SPACE, TENSOR, PIPE_AXIS)
    if plan.format != PLAN_FORMAT:
        found.append(f"format {plan.format} is not known; this headway reads format {PLAN_FORMAT}")
    if not names:
        found.append("mesh has no axis; it needs at least one, for example data")
    found.extend(
        f"mesh axis {a.name} has size {a.size}; at least 1" for a in plan.mesh.axes if a.size < 1
    )
    found.extend(
        f"mesh axis {n} appears twice" for n in sorted({n for n in names if names.count(n) > 1})
    )
    found.extend(
        f"mesh axis {a.name} of size {a.size}: no mechanism splits along it yet; only "
        f"{', '.join((WORKER_AXIS, 'data', *known[2:-1]))} and {known[-1]}"
        for a in plan.mesh.axes
        if a.name not in known and a.size > 1
    )
    if plan.exchange.axis not in names:
        found.append(
            f"exchange.axis {plan.exchange.axis} is not an axis of the mesh ({', '.join(names)})"
        )
    if plan.batch.samples < 1:
        found.append(f"batch.samples is {plan.batch.samples}; at least 1")
    elif plan.batch.samples < plan.data_degree:
        axis = WORKER_AXIS if plan.workers > 1 else plan.exchange.axis
        found.append(
            f"batch.samples is {plan.batch.samples} for {counted(plan.data_degree, 'rank')} on "
            f"axis {axis}: some ranks would never have work; use at most "
            f"{counted(plan.batch.samples, 'rank')}"
        )
    found.extend(plan.batch.problems(plan.data_degree))
    if plan.batch.microbatch is not None and plan.batch.microbatch < 1:
        found.append(f"batch.microbatch is {plan.batch.microbatch}; at least 1, or leave it out")
    found.extend(_norm_problems(plan))
    found.extend(plan.exchange.problems(plan.ranks))
    found.extend(_layout_problems(plan))
    found.extend(plan.split.problems(plan.mesh, plan.exchange))
    found.extend(sharding_problems(plan.memory.zero, plan.mesh, plan.exchange))
    found.extend(plan.synchrony.problems(plan.workers, plan.ranks, plan.copies))
    found.extend(_worker_problems(plan))
    # A table can be made only where degrees and batch are legal.
    if not found and plan.pipe_degree > 1:
        found.extend(_pipeline_problems(plan))
    return found


def _norm_problems(plan: Plan) -> Iterator[str]:
    """What stands against statistics over the global batch."""
    if plan.batch.norm != "global":
        return
    rest = 'or set norm = "local"'
    if plan.pipe_degree > 1:
        yield (
            'batch.norm "global" with a pipeline: a micro-batch is normalised before the next one '
            f"is known; leave out stages, {rest}"
        )
    elif plan.batch.microbatch and plan.batch.passes(plan.data_degree) > 1:
        yield (
            f'batch.norm "global" with micro-batches of {plan.batch.microbatch} samples: one is '
            f"normalised before the next one is known; leave out microbatch, {rest}"
        )
    if plan.group_degree > 1:
        yield f'batch.norm "global" with split layers or samples; leave out split, {rest}'


def _worker_problems(plan: Plan) -> Iterator[str]:
    """What stands against workers that do not agree at every step."""
    if plan.workers == 1:
        return
    if plan.mesh.names[0] != WORKER_AXIS:
        yield (
            f"mesh axis {WORKER_AXIS} must be the first: the ranks of a worker lie next to each "
            "other"
        )
    if plan.batch.norm == "global":
        yield (
            f'batch.norm "global" with {plan.workers} workers: they do not meet in a forward pass; '
            'set norm = "local"'
        )


def _pipeline_problems(plan: Plan) -> list[str]:
    exchange = plan.exchange
    found = []
    if plan.batch.parts is None:
        found.append("batch.parts is missing: the number of micro-batches of a pipeline's step")
    else:
        found.extend(plan.pipeline.problems(plan.pipe_degree, plan.batch.parts))
    if not exchange.exact or exchange.priority or exchange.collective != "all_reduce":
        found.append(
            "exchange: copies of a pipeline's stages sum their gradients exactly, stage by stage; "
            f"leave out {exchange}"
        )
    return found


def _layout_problems(plan: Plan) -> list[str]:
    found = []
    for layout in plan.layouts:
        for axis, word in layout.placements.items():
            place = f"layout of {layout.tensors}"
            if axis not in plan.mesh.names:
                found.append(f"{place}: {axis} is not an axis of the mesh")
            if word != "copy":
                found.append(f"{place}: {word!r} on {axis}: not implemented; only copy")
    return found


@checks_keywords
def data_parallel(
    batch: int,
    *,
    processes: int,
    microbatch: int | None = None,
    precision: Literal["float32", "float64", "bfloat16"] = "float32",
    exchange: ExchangePlan | None = None,
    shares: Sequence[float] = (),
    zero: Zero = 0,
    shards: int | None = None,
    split: LayerSplit | None = None,
    norm: Norm = "local",
    synchrony: Synchrony | None = None,
) -> Plan:
    """The plan in which every rank computes its share of each batch with the whole model.

    Args:
        batch: Samples of the global batch.
        microbatch: Most samples in one forward pass of one rank; more are accumulated.
        shares: Of unequal devices: how much of each batch every rank takes, in proportion; in
            samples where they add up to the batch. Empty: all as much.
        shards: Ranks that lie next to each other and keep the state together (hybrid sharding); the
            rest are copies of them. None: all.
        split: How layers are split, by ranks that lie next to each other and share their samples.
        synchrony: Of workers that do not agree at every step; each has `synchrony.copies` copies of
            the model.

    Raises:
        PlanError: Such a plan cannot exist.
    """
    return pipelined(
        batch,
        processes=processes,
        stages=1,
        microbatch=microbatch,
        precision=precision,
        exchange=exchange,
        shares=shares,
        zero=zero,
        shards=shards,
        split=split,
        norm=norm,
        synchrony=synchrony,
    )


def _data_axes(ranks: int, shards: int | None) -> tuple[Axis, ...]:
    """The axes over which a batch is shared: one, or copies of groups that keep state together.

    Raises:
        PlanError: The groups are no whole number.
    """
    if shards is None or shards == ranks:
        return (Axis(name="data", size=ranks),)
    if shards < 1 or ranks % shards:
        raise PlanError(
            "this plan cannot exist",
            problems=[f"{ranks} ranks are no whole number of groups of {shards}"],
            fix=f"Let shards be one of {', '.join(map(str, divisors(ranks)))}.",
        )
    return (Axis(name="data", size=ranks // shards), Axis(name=SHARD_AXIS, size=shards))


def pipelined(
    batch: int,
    *,
    processes: int,
    stages: int,
    pipeline: PipelinePlan | None = None,
    microbatch: int | None = None,
    precision: Literal["float32", "float64", "bfloat16"] = "float32",
    exchange: ExchangePlan | None = None,
    shares: Sequence[float] = (),
    zero: Zero = 0,
    shards: int | None = None,
    split: LayerSplit | None = None,
    norm: Norm = "local",
    synchrony: Synchrony | None = None,
) -> Plan:
    """The plan in which the model is cut into stages, and further ranks are copies of the pipeline.

    Args:
        processes: Number of ranks; a multiple of `stages`.
        stages: Ranks of one pipeline; neighbours lie next to each other. 1: the model is not cut,
            and the plan is that of `data_parallel`.
        microbatch: Most samples in one forward pass; decides the number of micro-batches where
            `pipeline` does not.
        exchange: Of the copies; with more than one stage the default is the only one yet.

    Raises:
        PlanError: Such a plan cannot exist.
    """
    layers = split or LayerSplit()
    what = "ranks that split layers" if stages == 1 else "ranks of a pipeline"
    copies = data_parallel_groups(processes, stages * layers.ranks, what)
    whole = whole_shares(batch, shares, copies)
    agreed, inside = synchrony or Synchrony(), copies
    among: tuple[Axis, ...] = ()
    if not agreed.by_all_reduce:
        inside = max(1, agreed.copies)
        workers = data_parallel_groups(
            copies, inside, "copies of the model in a worker", agreed.contradictions()
        )
        among = (Axis(name=WORKER_AXIS, size=workers),)
    axes: tuple[Axis, ...] = ()
    pipe, parts = PipelinePlan(), None
    if stages > 1:
        axes, pipe = (Axis(name=PIPE_AXIS, size=stages),), pipeline or pipe
        # From the largest share, so that no micro-batch has more samples than `microbatch`.
        share = max(whole, default=-(-batch // copies))
        if pipe.microbatches is None and microbatch and not pipe.table:
            pipe = replace(pipe, microbatches=-(-share // microbatch))
        # From the smallest share, so that every copy has a sample for each of its micro-batches.
        parts = pipe.parts(stages, min(whole, default=batch // copies))
    plan = Plan(
        mesh=Mesh(axes=(*among, *_data_axes(inside, shards), *axes, *layers.axes)),
        batch=BatchSplit(
            samples=batch,
            microbatch=microbatch if stages == 1 else None,  # else in the number of parts
            parts=parts,
            shares=whole,
            norm=norm,
        ),
        split=layers,
        pipeline=pipe,
        exchange=exchange or ExchangePlan(),
        synchrony=agreed,
        memory=MemoryPolicy(precision=precision, zero=zero),
    )
    plan.check()
    return plan


def data_parallel_groups(
    processes: int,
    ranks: int,
    what: str = "ranks of a pipeline",
    more: Iterable[str] = (),
) -> int:
    """The number of groups of `ranks` processes.

    Args:
        more: Problems that are told together with that of the number.

    Raises:
        PlanError: With the nearest number of processes that does.
    """
    if ranks < 1 or processes % ranks:
        raise PlanError(
            "this plan cannot exist",
            problems=[f"{processes} processes are no multiple of {ranks} {what}", *more],
            fix=f"Start {max(1, processes // max(ranks, 1)) * max(ranks, 1)} processes.",
        )
    return processes // ranks


def with_collective(
    plan: Plan, collective: AllReduceName, carrier: AllReduceOptions | None
) -> Plan:
    """The same plan with another collective for its exchange.

    Raises:
        PlanError: Names what of the plan cannot be combined with it.
    """
    exchange = replace(plan.exchange, collective=collective, carrier=carrier)
    found = replace(plan, exchange=exchange)
    found.check()
    return found


def unsupported_by_executor(plan: Plan) -> Iterator[str]:
    """What the executor does not support of a plan, one line each."""
    named = [*plan.synchrony.carried_out_by_nothing()]
    yield from named
    if not named:
        yield from _unsupported_synchrony(plan)
    split, zero = plan.group_degree > 1, plan.memory.zero
    if plan.split.tensor and plan.split.spatial:
        yield "split.tensor and split.spatial at once"
    yield from _unsupported_tables(plan)
    if plan.split.by and plan.pipe_degree > 1 and zero:
        yield f"split.by with a pipeline and memory.zero {zero}: its parts lie on one grid"
    if not plan.flushes and split:
        yield f"split with a pipeline of {plan.pipeline.schedule}, without a flush"
    if zero and not plan.flushes:
        yield (
            f"memory.zero {zero} with a pipeline of {plan.pipeline.schedule}, without a flush: "
            "several versions of the weights are kept whole"
        )


def _unsupported_tables(plan: Plan) -> Iterator[str]:
    if not plan.split.tables:
        return
    if plan.pipe_degree > 1:
        yield (
            "split.tables with a pipeline: all ranks that share the batch look rows up together, "
            "and the copies of a stage are at different micro-batches at one time"
        )
    if plan.split.tensor:
        yield (
            "split.tables with split.tensor: what a lookup delivers has no rule by which the "
            "layers behind it would be split"
        )
    if plan.split.spatial:
        yield (
            "split.tables with split.spatial: ids are looked up by whole samples, of which no rank "
            "has one"
        )
    if not plan.synchrony.by_all_reduce:
        yield (
            f"split.tables with workers that do not agree at every step ({plan.synchrony}): a "
            "table is there once, and cannot be a different one for each worker"
        )


def _unsupported_synchrony(plan: Plan) -> Iterator[str]:
    synchrony = plan.synchrony
    if synchrony.by_all_reduce:
        return
    if not synchrony.in_rounds and plan.ranks == plan.workers and plan.memory.zero:
        yield f"memory.zero {plan.memory.zero} with workers of one rank ({synchrony})"
    if synchrony.place == "master" and synchrony.merge == "mean":
        yield 'synchrony.topology "master": the mean is taken by an all-reduce; leave it out'
    yield from _unsupported_compression(plan)
    if not plan.flushes:
        yield (
            f"a pipeline of {plan.pipeline.schedule} with workers that do not agree at every step "
            f"({synchrony}): without a flush stages are updated at different times, and there is "
            "no moment at which a worker has one model to meet with; 1f1b has one"
        )
    if not plan.exchange.exact:
        yield (
            f"exchange ({plan.exchange}) with workers that do not agree at every step "
            f"({synchrony}): inside a worker gradients are summed exactly; what travels between "
            "workers that meet in rounds is compressed by synchrony.compress"
        )
    for what, found in (
        ("exchange.priority", plan.exchange.priority),
        ("exchange.values updates", plan.exchange.values == "updates"),
    ):
        if found:
            yield f"{what} with workers that do not agree at every step ({synchrony})"


def _unsupported_compression(plan: Plan) -> Iterator[str]:
    """Why what travels between workers cannot be compressed."""
    synchrony = plan.synchrony
    if synchrony.compress == "none":
        return
    what = f'synchrony.compress "{synchrony.compress}"'
    if synchrony.merge != "mean":
        yield (
            f'{what} with merge "{synchrony.merge}": what is compressed is the difference to the '
            'model that all workers had after they last met, which only merge "mean" has'
        )
    for parts, found in (
        (f"memory.zero {plan.memory.zero}", plan.memory.zero > 0),
        ("stages", plan.pipe_degree > 1),
        ("split", plan.group_degree > 1),
    ):
        if found:
            yield f"{what} with {parts} inside workers: a rank has a part of the difference only"


def check_device(plan: Plan, device: str) -> None:
    """Refuse a plan that the executor runs on CPUs only.

    Args:
        device: Its type, as torch names it: "cpu", "cuda".

    Raises:
        PlanError: Names what the device cannot do.
    """
    if plan.pipe_degree > 1 and device != "cpu":
        raise PlanError(
            f"the executor cannot run pipelines on {device} yet",
            problems=[
                f"stages > 1 on {device}: messages between stages are told apart by their tags, "
                "which NCCL ignores; stages would wait for ever, or take each other's tensors"
            ],
            fix="Use --device cpu, or a plan without stages (data parallelism, zero, split).",
        )


def check_executable(plan: Plan) -> None:
    """Refuse a plan that can only be priced and simulated.

    Raises:
        PlanError: With everything that the executor does not support.
    """
    if problems := list(unsupported_by_executor(plan)):
        raise PlanError(
            "the executor cannot run this plan yet",
            problems=[f"not supported: {problem}" for problem in problems],
            fix="Leave one of them out; `headway plan RECIPE --runnable` searches what can be run.",
        )
