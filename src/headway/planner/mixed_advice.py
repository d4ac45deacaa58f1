"""A practitioner's questions where the devices are of several types.

The lemmas suppose equal devices: they are answered for each type as if all devices of the plan were
of it, and what is left is asked of the plan's own devices. Invariant: as of `guidelines`. Sources:
those of `guidelines`; Jia et al. 2022 (Whale), balancing inside and between task graphs; Lemma 1 of
Zou et al. 2017 for unequal devices, as headway derives it: T = T_C / G + T_O with G devices like
the fastest, G = sum over the devices of c_fastest / c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from headway.cost.guidelines import zou
from headway.planner.facts import Job, advice_of
from headway.planner.guidelines import Advice
from headway.planner.mixed import MixedSearch
from headway.planner.mixed_point import MixedPoint
from headway.planner.search import Search
from headway.planner.splits import advice_of_splits
from headway.planner.whale.filling import whole_filling
from headway.units import format_number, format_seconds, format_share


def advice_of_mixed(
    search: MixedSearch, point: MixedPoint, *, efficiency: float = 0.8
) -> tuple[list[Advice], list[str]]:
    """The answers, and what is not known.

    Args:
        search: Of the model and the cluster.
        point: The plan, priced by it.
        efficiency: Wanted share of linear speed-up.
    """
    jobs = {kind: _job(search, point, kind) for kind, _ in point.combination.amounts}
    answers = list(_of_group(point, jobs, efficiency))
    unknown: list[str] = []
    for kind, job in jobs.items():
        own, lacking = advice_of(job, efficiency=efficiency)
        as_if = f"[as if all {job.devices} devices were {kind}] " if len(jobs) > 1 else ""
        answers += [
            replace(one, question=f"{as_if}{one.question}")
            for one in (*own, *advice_of_splits(job))
        ]
        unknown += [line.partition(": --measure")[0] for line in lacking]  # of one type alone
    return answers, list(dict.fromkeys(unknown))


def _job(search: MixedSearch, point: MixedPoint, kind: str) -> Job:
    """All devices of the plan, with its largest micro-batch on this type, or a device's share."""
    question = replace(search.question.of(kind), memory=search.question.caps[kind])
    sizes = [part.microbatch for s in point.stages for part in s.parts if part.kind == kind]
    share = max(1, question.batch // point.devices)
    return Job(Search(question), point.devices, min(share, *sizes))


def _of_group(point: MixedPoint, jobs: Mapping[str, Job], efficiency: float) -> Iterator[Advice]:
    """Of the plan's own devices."""
    yield _idle(point)
    if len(jobs) > 1:
        yield _shares(point, jobs)
        yield _worth(point, jobs, efficiency)


def _idle(point: MixedPoint) -> Advice:
    kinds = [kind for kind, _ in point.combination.amounts]
    shares = {kind: point.idle(kind) for kind in kinds}
    words = ", ".join(f"{kind} for {format_share(share)}" for kind, share in shares.items())
    slowest = max(
        (part.stage.seconds, number, part.kind)
        for number, stage in enumerate(point.stages)
        for part in stage.parts
    )
    return Advice(
        question="How well are the plan's own devices filled?",
        answer=f"Of a step of {format_seconds(point.seconds)} they do not compute: {words}. All "
        f"wait for stage {slowest[1]} on {slowest[2]}, {format_seconds(slowest[0])} per "
        "micro-batch.",
        numbers={f"idle {kind}": share for kind, share in shares.items()}
        | {"step": point.seconds, "stage": slowest[1], "seconds": slowest[0]},
        source="Jia et al. 2022 (Whale), balancing between task graphs",
    )


def _shares(point: MixedPoint, jobs: Mapping[str, Job]) -> Advice:
    """Of data parallelism over the plan's devices, in whole samples."""
    batch = next(iter(jobs.values())).batch
    each = {kind: _sample(job) for kind, job in jobs.items()}
    numbers = dict(point.combination.amounts)
    costs = [np.arange(1, batch + 1, dtype=np.float64) * each[kind] for kind in numbers]
    sizes, longest = whole_filling(costs, list(numbers.values()), batch)
    even = -(-batch // point.devices) * max(each.values())
    shares = dict(zip(numbers, sizes, strict=True))
    words = ", ".join(f"{shares[kind]} for each of {n} {kind}" for kind, n in numbers.items())
    times = ", ".join(f"{format_seconds(one)} on {kind}" for kind, one in each.items())
    return Advice(
        question="How should the samples be shared among them, with data parallelism?",
        answer=f"Of {batch} samples {words}: a sample takes {times}, so the passes take "
        f"{format_seconds(longest)}; with even shares {format_seconds(even)}, "
        f"{format_number(even / longest)} times as long.",
        numbers={f"share {kind}": share for kind, share in shares.items()}
        | {f"devices {kind}": number for kind, number in numbers.items()}
        | {f"sample {kind}": one for kind, one in each.items()}
        | {"MB": batch, "passes": longest, "even": even, "gain": even / longest},
        source="Jia et al. 2022 (Whale), balancing inside a task graph, by headway's water filling",
    )


def _worth(point: MixedPoint, jobs: Mapping[str, Job], efficiency: float) -> Advice:
    """Lemma 1 with the group as a number of its fastest devices."""
    each = {kind: _sample(job) for kind, job in jobs.items()}
    fastest = min(each, key=lambda kind: each[kind])
    worth = sum(n * each[fastest] / each[kind] for kind, n in point.combination.amounts)
    compute, overhead = jobs[fastest].compute, max(job.overhead for job in jobs.values())
    ratio = overhead / compute
    reached = zou.efficiency(ratio, worth)
    verdict = "at least" if reached >= efficiency else "less than"
    return Advice(
        question="How many of the fastest devices are they worth?",
        answer=f"{format_number(worth)} x {fastest}. Sharing the batch as above they are "
        f"{format_number(zou.speed_up(ratio, worth))} times as fast as one of these, "
        f"{format_share(reached)} of what they are worth, {verdict} the {efficiency:.0%} wanted: "
        f"what does not shrink takes {format_share(ratio)} of the compute.",
        numbers={
            "G": worth,
            "T_C": compute,
            "T_O": overhead,
            "R_O": ratio,
            "alpha_G": reached,
            "speed_up": zou.speed_up(ratio, worth),
            "alpha": efficiency,
        },
        source="Zou et al. 2017, Lemma 1, with G as a sum of c_fastest / c",
    )


def _sample(job: Job) -> float:
    """c: seconds of a sample's passes on one device, at the job's micro-batch."""
    return job.alone[0] / job.microbatch
