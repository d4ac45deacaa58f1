"""`headway plan svm`: memory and time of a support vector machine before it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from headway.cli.terminal.console import parse_option, say, say_json, table_lines
from headway.cluster.presets import find_cluster
from headway.cost.machines import Machine, machine_of
from headway.cost.support_vectors import (
    ACTIVE_SHARES,
    PROCESS_BYTES,
    STEPS_PER_FILL,
    SUPPORT_SHARES,
    RankPlan,
    SampleSet,
    fewest_ranks,
    plan_ranks,
)
from headway.errors import UsageError
from headway.units import (
    counted,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    parse_bytes,
)


def plan_svm(
    *,
    rows: int,
    columns: int,
    cluster: str,
    nonzeros: float | None = None,
    classes: int = 2,
    nodes: int | None = None,
    ranks: Annotated[str | None, Parameter(negative="")] = None,
    working_set: int = 512,
    support: str | None = None,
    memory: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """What a support vector machine needs, for several numbers of ranks: memory, time, traffic.

    Args:
        rows: Samples.
        columns: Of a sample.
        cluster: A cluster.toml, or a preset such as dgx-a100. headway's own machines are trained
            on processors (preset cpu, or measure yours); other devices are priced as if.
        nonzeros: Of a sample, in the mean, of sparse data; by default samples are dense.
        classes: Of more than two, pairs are trained one after the other; the time is of one.
        nodes: Number of nodes of a preset; by default 1.
        ranks: "8" or "1,2,16"; by default powers of two, and all of the cluster.
        working_set: Samples that are solved for at once, 2 to 1024.
        support: Share of the samples that become support vectors, as in "0.1" or "0.02..0.4",
            which is the default, from measured sets.
        memory: Of a rank, as in "64 GiB"; by default the device's.
    """
    data = SampleSet(rows=rows, columns=columns, nonzeros=nonzeros, classes=classes)
    _check(data, working_set)
    described = find_cluster(cluster, nodes=nodes)
    machine = machine_of(described, dtype="fp32")
    room = machine.device.memory if memory is None else parse_option(
        "--memory", memory, parse_bytes
    )  # fmt: skip
    shares = SUPPORT_SHARES if support is None else parse_option("--support", support, _shares)
    counts = _powers(described.ranks) if ranks is None else parse_option("--ranks", ranks, _counts)
    if max(counts) > described.ranks:
        raise UsageError(
            f"--ranks {ranks}: the cluster has {counted(described.ranks, 'rank')}",
            fix="Ask for fewer, or for more --nodes of a preset.",
        )
    plans = plan_ranks(data, counts, machine, memory=room, working_set=working_set, support=shares)
    least = fewest_ranks(data, memory=room, working_set=working_set, support=shares)
    if json:
        say_json(_facts(plans, data, machine, room, least))
    else:
        say("\n".join(_lines(plans, data, machine, room, least, shares)))


def _check(data: SampleSet, working_set: int) -> None:
    problems = [
        f"--{name} {value}: at least {least}"
        for name, value, least in (
            ("rows", data.rows, 2), ("columns", data.columns, 1), ("classes", data.classes, 2)
        )
        if value < least
    ]  # fmt: skip
    if data.nonzeros is not None and not 0 < data.nonzeros <= data.columns:
        problems.append(f"--nonzeros {data.nonzeros:g}: above 0, and at most the columns")
    if not 2 <= working_set <= 1024:
        problems.append(f"--working-set {working_set}: 2 to 1024")
    if problems:
        raise UsageError("there is no such training", why="\n  ".join(problems))


def _powers(most: int) -> tuple[int, ...]:
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*powers, most)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f'{text!r}: write "8" or "1,2,16"') from None
    if counts[0] < 1:
        raise ValueError("at least 1")
    return counts


def _shares(text: str) -> tuple[float, float]:
    parts = text.split("..")
    try:
        low, high = float(parts[0]), float(parts[-1])
    except ValueError:
        low = high = 0.0
    if len(parts) > 2 or not 0 < low <= high <= 1:
        raise ValueError(f'{text!r} is no share, as in "0.1" or "0.02..0.4"')
    return low, high


def _lines(
    plans: Sequence[RankPlan],
    data: SampleSet,
    machine: Machine,
    room: float,
    least: int | None,
    shares: tuple[float, float],
) -> Iterator[str]:
    width = (
        "dense"
        if data.nonzeros is None
        else f"{data.nonzeros:g} nonzeros each, {format_bytes(data.row_bytes)} in compressed rows"
    )
    yield f"{data.rows:,} samples x {data.columns:,} columns, {width}"
    yield (f"on {machine.device.name}: {format_bytes(room)} a rank{_remark(data, machine)}")
    yield ""
    header = ("ranks", "memory", "", "outer step", "bound by", "whole fit")
    yield from table_lines([header, *(_row(plan) for plan in plans)])
    for plan in _detailed(plans):
        yield ""
        yield from _parts(plan, shares, data)
    yield ""
    if least is None:
        yield "it fits on no number of ranks: the machine itself is too large for one"
    elif not any(plan.fits for plan in plans):
        yield f"it fits on none of these; it does on {counted(least, 'rank')}"
    else:
        yield f"it fits on {counted(least, 'rank')} and more"
    yield (
        f"assumed: {format_share(shares[0])} to {format_share(shares[1])} of the samples become "
        f"support vectors; {STEPS_PER_FILL[0]:g} to {STEPS_PER_FILL[1]:g} outer steps for each "
        f"half working set of them, {format_share(ACTIVE_SHARES[0])} to "
        f"{format_share(ACTIVE_SHARES[1])} of the samples active (letter, KDD04, Adult)"
    )


def _remark(data: SampleSet, machine: Machine) -> str:
    # Only devices with units for half precision are no processors.
    if {"fp16", "bf16"} & set(machine.device.peak):
        return "; priced as if: headway trains on processors"
    if data.nonzeros is not None:
        return "; compressed rows use one core of a rank: describe a rank for each core"
    return ""


def _row(plan: RankPlan) -> tuple[str, ...]:
    low, high = plan.fit.seconds
    return (
        str(plan.ranks),
        format_bytes(plan.most_bytes),
        "" if plan.fits else "too much",
        format_seconds(plan.step.seconds),
        plan.step.bound_by,
        f"{format_seconds(low)} to {format_seconds(high)}",
    )


def _detailed(plans: Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    """The fewest ranks on which it fits, else all, and the most."""
    first = next((plan for plan in plans if plan.fits), plans[-1])
    return tuple({plan.ranks: plan for plan in (first, plans[-1])}.values())


def _parts(plan: RankPlan, shares: tuple[float, float], data: SampleSet) -> Iterator[str]:
    most = shares[1] * data.rows
    memory = {
        **plan.memory.parts,
        f"{format_number(most)} support vectors": plan.memory.per_support * most,
        "the process": PROCESS_BYTES,
    }
    yield f"{counted(plan.ranks, 'rank')}, memory of each"
    yield from _bars(memory, plan.most_bytes, format_bytes)
    yield f"{counted(plan.ranks, 'rank')}, an outer step with all samples active"
    yield from _bars(plan.step.parts, plan.step.seconds, format_seconds)
    low, high = plan.fit.steps
    yield f"  {format_number(low)} to {format_number(high)} of them"


def _bars(parts: Any, total: float, shown: Any) -> Iterator[str]:
    rows = [
        (f"  {name}", shown(value), format_share(value / total) if total else "")
        for name, value in sorted(parts.items(), key=lambda part: -part[1])
    ]
    yield from table_lines(rows, align=">")


def _facts(
    plans: Sequence[RankPlan], data: SampleSet, machine: Machine, room: float, least: int | None
) -> dict[str, object]:
    return {
        "rows": data.rows,
        "columns": data.columns,
        "nonzeros": data.nonzeros,
        "device": machine.device.name,
        "memory_bytes": room,
        "fewest_ranks": least,
        "ranks": [
            {
                "ranks": plan.ranks,
                "fits": plan.fits,
                "most_bytes": plan.most_bytes,
                "memory": {**plan.memory.parts, "process": PROCESS_BYTES},
                "bytes_per_support_vector": plan.memory.per_support,
                "step_seconds": plan.step.seconds,
                "step": dict(plan.step.parts),
                "bound_by": plan.step.bound_by,
                "support_vectors": plan.fit.support,
                "outer_steps": plan.fit.steps,
                "seconds": plan.fit.seconds,
            }
            for plan in plans
        ],
    }
