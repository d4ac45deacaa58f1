"""The whole decision how a training step is split, as immutable data.

A plan is made above this line (by a planner or by hand) and obeyed below it. It is priced by
`cost`, played by `simulator`, obeyed by `run`, checked by `verification` and drawn by `report`.
Its file form is JSON; its hash names the decision and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from headway.documents import document, read_document, to_type
from headway.errors import DocumentError, PlanError
from headway.plan.batch import BatchSplit, whole_shares
from headway.plan.exchange import Exchange
from headway.plan.mesh import Axis, Mesh
from headway.plan.pipeline import AXIS, Pipeline
from headway.plan.prediction import Prediction
from headway.plan.sharding import SHARD, Zero, sharding_problems

FORMAT = 1


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
class Synchrony:
    """Who agrees with whom and when: every rank with every rank, at every step."""

    kind: Literal["synchronous"] = "synchronous"


@document
class MemoryPolicy:
    """What is kept where.

    Attributes:
        precision: The arithmetic type of the forward pass.
        zero: What the ranks of the data axis (of the axis "shard", where the mesh has one) keep a
            part of instead of all: 0 nothing, 1 the optimiser's state, 2 gradients as well, 3
            parameters, too. Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """

    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    zero: Zero = 0


@document
class Plan:
    """The decision; see the module's docstring. Build one with `data_parallel`."""

    mesh: Mesh
    batch: BatchSplit
    layouts: tuple[Layout, ...] = ()
    pipeline: Pipeline = Pipeline()
    exchange: Exchange = Exchange()
    synchrony: Synchrony = Synchrony()
    memory: MemoryPolicy = MemoryPolicy()
    format: int = FORMAT
    prediction: Prediction | None = None

    def check(self) -> None:
        """Raise unless the plan can exist.

        Raises:
            PlanError: With every reason.
        """
        problems = _problems(self)
        if problems:
            raise PlanError(
                "this plan cannot exist", problems=problems, fix="Correct these values of the plan."
            )

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def data_degree(self) -> int:
        """The number of shares into which the global batch is cut."""
        return self.mesh.degree(self.exchange.axis) * self.mesh.degree(SHARD)

    @property
    def pipe_degree(self) -> int:
        """Ranks of a pipeline; 1: there is none."""
        return self.mesh.degree(AXIS)

    @property
    def exchange_degree(self) -> int:
        """Ranks over which the exchange sums; 1 where a pipeline's schedule or the sharding of the
        state has the sums."""
        return self.data_degree if self.pipe_degree == 1 and not self.memory.zero else 1

    @cached_property
    def flushes(self) -> bool:
        """Whether all weights change at once, at the end of a step; else a table says when."""
        if self.pipe_degree == 1 or self.batch.parts is None:
            return True
        return self.pipeline.make(self.pipe_degree, self.batch.parts).flush

    @property
    def exact(self) -> bool:
        """Whether a step is that of the serial run, to rounding."""
        return self.exchange.exact and self.flushes

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch a rank works on."""
        place = self.mesh.coordinate(rank)
        outer, inner = place.get(self.exchange.axis, 0), place.get(SHARD, 0)
        return outer * self.mesh.degree(SHARD) + inner

    def to_dict(self) -> dict[str, object]:
        found = dataclasses.asdict(self)
        if self.prediction is None:
            del found["prediction"]
        if not self.memory.zero:  # plans of before the entry existed keep their hash
            del found["memory"]["zero"]
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that name this decision, independent of the file's layout."""
        decision = replace(self, prediction=None).to_dict()
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


def data_parallel(
    batch: int,
    *,
    processes: int,
    microbatch: int | None = None,
    precision: Literal["float32", "float64", "bfloat16"] = "float32",
    exchange: Exchange | None = None,
    shares: Sequence[float] = (),
    zero: Zero = 0,
    shards: int | None = None,
) -> Plan:
    """The plan in which every rank works through the whole model with its share of each batch.

    Args:
        batch: Samples of the global batch.
        processes: Number of ranks.
        microbatch: Most samples in one forward pass of one rank; more are accumulated.
        precision: Arithmetic type of the forward pass.
        exchange: How gradients are summed; the default fits most links.
        shares: Of unequal devices: how much of each batch every rank takes, in proportion; in
            samples where they add up to the batch. Empty: all as much.
        zero: As `MemoryPolicy.zero`.
        shards: Ranks that lie next to each other and keep the state together (hybrid sharding); the
            rest are copies of them. None: all.

    Raises:
        PlanError: Such a plan cannot exist.
    """
    plan = Plan(
        mesh=Mesh(axes=data_axes(processes, shards)),
        batch=BatchSplit(
            samples=batch, microbatch=microbatch, shares=whole_shares(batch, shares, processes)
        ),
        exchange=exchange or Exchange(),
        memory=MemoryPolicy(precision=precision, zero=zero),
    )
    plan.check()
    return plan


def data_axes(ranks: int, shards: int | None) -> tuple[Axis, ...]:
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
            fix=f"Let shards be one of {', '.join(map(str, _divisors(ranks)))}.",
        )
    return (Axis(name="data", size=ranks // shards), Axis(name=SHARD, size=shards))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def pipelined(
    batch: int,
    *,
    processes: int,
    stages: int,
    pipeline: Pipeline | None = None,
    microbatch: int | None = None,
    precision: Literal["float32", "float64", "bfloat16"] = "float32",
    exchange: Exchange | None = None,
    shares: Sequence[float] = (),
    zero: Zero = 0,
    shards: int | None = None,
) -> Plan:
    """The plan in which the model is cut into stages, and the rest of the ranks are copies of it.

    Args:
        batch: Samples of the global batch.
        processes: Number of ranks; a multiple of `stages`.
        stages: Ranks of one pipeline; neighbours lie next to each other. 1: the model is not cut,
            and the plan is that of `data_parallel`.
        pipeline: Schedule and cut.
        microbatch: Most samples in one forward pass; decides the number of micro-batches where
            `pipeline` does not.
        precision: Arithmetic type of the forward pass.
        exchange: Of the copies; with more than one stage the default is the only one yet.
        shares: Of the batch, in proportion, one for each copy; empty: all as much.
        zero: As `MemoryPolicy.zero`.
        shards: As for `data_parallel`.

    Raises:
        PlanError: Such a plan cannot exist.
    """
    if stages == 1:
        return data_parallel(
            batch,
            processes=processes,
            microbatch=microbatch,
            precision=precision,
            exchange=exchange,
            shares=shares,
            zero=zero,
            shards=shards,
        )
    check_copies(processes, stages)
    copies = processes // stages
    pipe = pipeline or Pipeline()
    whole = whole_shares(batch, shares, copies)
    share = max(whole, default=-(-batch // copies))
    if pipe.microbatches is None and microbatch and not pipe.table:
        pipe = replace(pipe, microbatches=-(-share // microbatch))
    plan = Plan(
        mesh=Mesh(axes=(Axis(name="data", size=copies), Axis(name=AXIS, size=stages))),
        batch=BatchSplit(
            samples=batch,
            parts=pipe.parts(stages, min(whole, default=batch // copies)),
            shares=whole,
        ),
        pipeline=pipe,
        exchange=exchange or Exchange(),
        memory=MemoryPolicy(precision=precision, zero=zero),
    )
    plan.check()
    return plan


def check_copies(processes: int, stages: int) -> None:
    """Refuse processes that make no whole number of pipelines.

    Raises:
        PlanError: With the nearest number of processes that does.
    """
    if stages < 1 or processes % stages:
        raise PlanError(
            "this plan cannot exist",
            problems=[f"{processes} processes are no multiple of {stages} ranks of a pipeline"],
            fix=f"Start {max(1, processes // max(stages, 1)) * max(stages, 1)} processes.",
        )


def _problems(plan: Plan) -> list[str]:
    """Every reason why the plan cannot exist, one line each."""
    return _wrong_types(plan) or _illegal_values(plan)


def _wrong_types(plan: Plan) -> list[str]:
    """What a plan file could not hold; a plan that was built in Python was never compared."""
    try:
        to_type(plan.to_dict(), Plan, where="plan")
    except DocumentError as error:
        return [problem.partition("  ")[2] for problem in error.problems]
    return []


def _illegal_values(plan: Plan) -> list[str]:
    found: list[str] = []
    names = plan.mesh.names
    if plan.format != FORMAT:
        found.append(f"format {plan.format} is not known; this headway reads format {FORMAT}")
    if not names:
        found.append("mesh has no axis; it needs at least one, for example data")
    found.extend(
        f"mesh axis {a.name} has size {a.size}; at least 1" for a in plan.mesh.axes if a.size < 1
    )
    found.extend(
        f"mesh axis {n} appears twice" for n in sorted({n for n in names if names.count(n) > 1})
    )
    found.extend(
        f"mesh axis {a.name} of size {a.size}: no mechanism splits along it yet; only data, "
        f"{SHARD} and pipe"
        for a in plan.mesh.axes
        if a.name not in (plan.exchange.axis, SHARD, AXIS) and a.size > 1
    )
    if plan.exchange.axis not in names:
        found.append(
            f"exchange.axis {plan.exchange.axis} is not an axis of the mesh ({', '.join(names)})"
        )
    if plan.batch.samples < 1:
        found.append(f"batch.samples is {plan.batch.samples}; at least 1")
    elif plan.batch.samples < plan.data_degree:
        found.append(
            f"batch.samples is {plan.batch.samples} for {plan.data_degree} ranks on axis "
            f"{plan.exchange.axis}: some ranks would never have work; use at most "
            f"{plan.batch.samples} ranks"
        )
    found.extend(plan.batch.problems(plan.data_degree))
    if plan.batch.microbatch is not None and plan.batch.microbatch < 1:
        found.append(f"batch.microbatch is {plan.batch.microbatch}; at least 1, or leave it out")
    found.extend(plan.exchange.problems(plan.ranks))
    found.extend(_layout_problems(plan))
    found.extend(
        sharding_problems(plan.memory.zero, plan.mesh, plan.exchange, piped=plan.pipe_degree > 1)
    )
    if not found and plan.pipe_degree > 1:
        found.extend(_pipeline_problems(plan))
    return found


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
                found.append(f"{place}: {word!r} on {axis}: no mechanism yet; only copy")
    return found
