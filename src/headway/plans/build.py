"""Plans from a user's few numbers (processes, stages, parts); the mesh follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from headway.collective.all_reduce.algorithm import AllReduceOptions
from headway.errors import PlanError
from headway.plans.batch import BatchSplit, whole_shares
from headway.plans.exchange import AllReduceName, ExchangePlan
from headway.plans.layer_split import LayerSplit
from headway.plans.mesh import Axis, Mesh
from headway.plans.pipeline import PIPE_AXIS, PipelinePlan
from headway.plans.plan import SHARD_AXIS, MemoryPolicy, Plan, Zero


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
) -> Plan:
    """The plan in which every rank works through the whole model with its share of each batch.

    Args:
        batch: Samples of the global batch.
        microbatch: Most samples in one forward pass of one rank; more are accumulated.
        precision: Arithmetic type of the forward pass.
        exchange: How gradients are summed; the default fits most links.
        shares: Of unequal devices: how much of each batch every rank takes, in proportion; in
            samples where they add up to the batch. Empty: all as much.
        zero: As `MemoryPolicy.zero`.
        shards: Ranks that lie next to each other and keep the state together (hybrid sharding); the
            rest are copies of them. None: all.
        split: How layers are split, by ranks that lie next to each other and share their samples.

    Raises:
        PlanError: Such a plan cannot exist.
    """
    layers = split or LayerSplit()
    copies = data_parallel_groups(processes, layers.ranks, "ranks that split layers")
    plan = Plan(
        mesh=Mesh(axes=(*data_axes(copies, shards), *layers.axes)),
        batch=BatchSplit(
            samples=batch, microbatch=microbatch, shares=whole_shares(batch, shares, copies)
        ),
        split=layers,
        exchange=exchange or ExchangePlan(),
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
    return (Axis(name="data", size=ranks // shards), Axis(name=SHARD_AXIS, size=shards))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


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
) -> Plan:
    """The plan in which the model is cut into stages, and the rest of the ranks are copies of it.

    Args:
        batch: Samples of the global batch.
        processes: Number of ranks; a multiple of `stages`.
        stages: Ranks of one pipeline; neighbours lie next to each other. 1: the model is not cut,
            and the plan is that of `data_parallel`.
        microbatch: Most samples in one forward pass; decides the number of micro-batches where
            `pipeline` does not.
        precision: Arithmetic type of the forward pass.
        exchange: Of the copies; with more than one stage the default is the only one yet.
        shares: Of the batch, in proportion, one for each copy; empty: all as much.
        zero: As `MemoryPolicy.zero`.
        shards: As for `data_parallel`.
        split: As for `data_parallel`.

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
            split=split,
        )
    layers = split or LayerSplit()
    copies = data_parallel_groups(processes, stages * layers.ranks)
    pipe = pipeline or PipelinePlan()
    whole = whole_shares(batch, shares, copies)
    share = max(whole, default=-(-batch // copies))
    if pipe.microbatches is None and microbatch and not pipe.table:
        pipe = replace(pipe, microbatches=-(-share // microbatch))
    plan = Plan(
        mesh=Mesh(
            axes=(*data_axes(copies, shards), Axis(name=PIPE_AXIS, size=stages), *layers.axes)
        ),
        split=layers,
        batch=BatchSplit(
            samples=batch,
            parts=pipe.parts(stages, min(whole, default=batch // copies)),
            shares=whole,
        ),
        pipeline=pipe,
        exchange=exchange or ExchangePlan(),
        memory=MemoryPolicy(precision=precision, zero=zero),
    )
    plan.check()
    return plan


def data_parallel_groups(processes: int, ranks: int, what: str = "ranks of a pipeline") -> int:
    """The number of groups; refuse processes that make no whole number of them.

    Raises:
        PlanError: With the nearest number of processes that does.
    """
    if ranks < 1 or processes % ranks:
        raise PlanError(
            "this plan cannot exist",
            problems=[f"{processes} processes are no multiple of {ranks} {what}"],
            fix=f"Start {max(1, processes // max(ranks, 1)) * max(ranks, 1)} processes.",
        )
    return processes // ranks


def with_collective(
    plan: Plan, collective: AllReduceName, carrier: AllReduceOptions | None
) -> Plan:
    """The same plan with another path of its exchange.

    Args:
        collective: See `Exchange.collective`.
        carrier: See `Exchange.carrier`.

    Raises:
        PlanError: Says by name what of the plan does not go with it.
    """
    exchange = replace(plan.exchange, collective=collective, carrier=carrier)
    found = replace(plan, exchange=exchange)
    found.check()
    return found
