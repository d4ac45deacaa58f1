"""Step programs of every family of plans: `programs.py OUT.json`.

compile_step is internal: what has to be adapted after a move is in the marked block, nothing else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# ==== INTERNAL IMPORTS: adapt here after the move ===============================================
from headway.plans import (
    ExchangePart,
    ExchangePlan,
    LayerSplit,
    ModuleSplit,
    PipelinePlan,
    data_parallel,
    explain,
    pipelined,
)
from headway.plans.plan import unsupported_by_executor
from headway.run.executor import compile_step


def program_of(plan, microbatches, clip, passes):
    """The instructions as texts: "forward 0"."""
    found = compile_step(plan, microbatches, clip=clip, passes=passes)
    return [str(one) for one in found.instructions]


def facts_of(plan):
    """What of a plan is no program."""
    return {
        "hash": plan.hash,
        "dict": plan.to_dict(),
        "exact": plan.exact,
        "flushes": plan.flushes,
        "lacking": list(unsupported_by_executor(plan)),
        "explain": explain(plan).splitlines(),
    }


def sizes_of(plan, rank):
    return list(plan.micro_sizes(rank))


def passes_of(plan):
    return plan.batch.passes(plan.data_degree)


def table_of(plan):
    """Of a pipeline: actions of each rank, as a table that `headway schedule` writes."""
    from headway.schedule.csv_format import to_csv

    return to_csv(plan.pipeline.make(plan.pipe_degree, plan.batch.parts)).splitlines()


# ==== END OF INTERNAL IMPORTS ===================================================================


def families():
    """Name -> a function that makes the plan."""
    for processes in (1, 2, 4):
        for number in (1, 3):
            yield (
                f"data {processes} x {number}",
                lambda p=processes, n=number: data_parallel(
                    12 * p, processes=p, microbatch=12 // n
                ),
            )
    exchanges = {
        "fp16": {"compress": "fp16"},
        "bf16": {"compress": "bf16"},
        "topk": {"compress": "topk:0.01"},
        "mstopk": {"compress": "mstopk:0.01"},
        "adaptive": {"compress": "adaptive:0.01"},
        "randomk": {"compress": "randomk:0.05"},
        "powersgd": {"compress": "powersgd:2"},
        "sign": {"compress": "sign"},
        "int8": {"compress": "int8"},
        "auto": {"compress": "auto", "bucket": "auto"},
        "adasum": {"reduce": "adasum"},
        "adasum updates": {"reduce": "adasum", "values": "updates"},
        "sum": {"reduce": "sum"},
        "hierarchical": {"collective": "hierarchical"},
        "hierarchical topk": {"collective": "hierarchical", "compress": "topk:0.01"},
        "hierarchical adasum": {"collective": "hierarchical", "reduce": "adasum"},
        "ring": {"collective": "ring"},
        "direct": {"collective": "direct"},
        "halving-doubling": {"collective": "halving-doubling"},
        "servers": {"collective": "servers"},
        "priority": {"priority": True},
        "priority fp16 chunks": {
            "priority": True,
            "compress": "fp16",
            "chunk": "1 MiB",
            "credit": 3,
        },
        "no overlap": {"overlap": False, "bucket": "1 MiB"},
        "parts": {
            "parts": (
                ExchangePart(parameters="*.bias", compress="fp16"),
                ExchangePart(parameters="head.*", ranks=((0, 1), (2, 3))),
            )
        },
    }
    for name, changes in exchanges.items():
        for processes in (1, 4):
            yield (
                f"exchange {name} on {processes}",
                lambda p=processes, c=changes: data_parallel(
                    24, processes=p, microbatch=3, exchange=ExchangePlan(**c)
                ),
            )
    for zero in (1, 2, 3):
        yield (
            f"zero {zero} on 2",
            lambda z=zero: data_parallel(12, processes=2, microbatch=2, zero=z),
        )
        yield (
            f"zero {zero} on 4 ragged",
            lambda z=zero: data_parallel(13, processes=4, microbatch=2, zero=z),
        )
        yield (
            f"hybrid {zero} 2 x 2",
            lambda z=zero: data_parallel(16, processes=4, microbatch=2, zero=z, shards=2),
        )
    yield "shares 2 1", lambda: data_parallel(12, processes=2, microbatch=2, shares=(2, 1))
    yield (
        "shares 2 1 zero 3",
        lambda: data_parallel(12, processes=2, microbatch=2, shares=(2, 1), zero=3),
    )
    splits = {
        "tensor 1-D": LayerSplit(tensor=(2,)),
        "tensor 1-D parts": LayerSplit(tensor=(1, 4, 1)),
        "tensor 2-D": LayerSplit(tensor=(2, 2)),
        "tensor 2.5-D": LayerSplit(tensor=(2, 2, 2), form="summa"),
        "tensor 3-D": LayerSplit(tensor=(2, 2, 2)),
        "tensor by": LayerSplit(
            tensor=(4,), by=(ModuleSplit(modules="blocks.*.mlp", tensor=(2, 2)),), whole=("head",)
        ),
        "spatial 2": LayerSplit(spatial=(2, 1, 1)),
        "spatial 2 x 2": LayerSplit(spatial=(2, 2, 1), head="samples"),
        "tensor and spatial": LayerSplit(tensor=(2,), spatial=(2,)),
    }
    for name, split in splits.items():
        yield name, lambda s=split: data_parallel(16, processes=s.ranks, microbatch=4, split=s)
        yield (
            f"{name} x data 2",
            lambda s=split: data_parallel(
                16,
                processes=2 * s.ranks,
                microbatch=4,
                split=s,
                exchange=ExchangePlan(compress="fp16"),
            ),
        )
        yield (
            f"{name} x data 2 zero 3",
            lambda s=split: data_parallel(16, processes=2 * s.ranks, microbatch=4, split=s, zero=3),
        )
        yield (
            f"{name} x pipe 2",
            lambda s=split: pipelined(
                16, processes=2 * s.ranks, stages=2, split=s, pipeline=PipelinePlan(microbatches=4)
            ),
        )
    schedules = {
        "gpipe": {}, "1f1b": {}, "gems": {}, "interleaved": {"virtual": 2},
        "breadth-first": {"virtual": 2}, "zb-h1": {}, "interleaved-zero-bubble": {}, "zbv": {},
        "dualpipe": {}, "dualpipe-v": {}, "pipedream": {}, "pipedream-2bw": {}, "chimera": {},
        "chimera-doubling": {}, "chimera-halving": {}, "chimera-split": {},
    }  # fmt: skip
    for name, changes in schedules.items():
        for copies in (1, 2):
            yield (
                f"pipe {name} 4 x data {copies}",
                lambda n=name, c=copies, g=changes: pipelined(
                    16 * c,
                    processes=4 * c,
                    stages=4,
                    pipeline=PipelinePlan(schedule=n, microbatches=8, **g),
                ),
            )
    yield "pipe 1f1b defaults", lambda: pipelined(12, processes=2, stages=2)
    yield (
        "pipe 1f1b post recompute",
        lambda: pipelined(
            12, processes=2, stages=2, pipeline=PipelinePlan(sync="post", recompute="blocks")
        ),
    )
    for zero in (1, 2, 3):
        yield (
            f"pipe chimera x data 2 zero {zero}",
            lambda z=zero: pipelined(
                32,
                processes=8,
                stages=4,
                zero=z,
                pipeline=PipelinePlan(schedule="chimera", microbatches=8),
            ),
        )
    yield (
        "pipe 1f1b shares",
        lambda: pipelined(
            24, processes=4, stages=2, shares=(3, 1), pipeline=PipelinePlan(microbatches=2)
        ),
    )
    yield (
        "pipe pipedream zero 1",
        lambda: pipelined(
            16,
            processes=2,
            stages=2,
            zero=1,
            pipeline=PipelinePlan(schedule="pipedream", microbatches=4),
        ),
    )
    yield "bfloat16", lambda: data_parallel(12, processes=2, precision="bfloat16")
    # plans that cannot exist: their problems
    yield (
        "illegal: adasum fp16",
        lambda: data_parallel(
            12, processes=2, exchange=ExchangePlan(reduce="adasum", compress="fp16", priority=True)
        ),
    )
    yield "illegal: few samples", lambda: data_parallel(4, processes=5)
    yield (
        "illegal: zero int8",
        lambda: data_parallel(
            12, processes=2, zero=2, exchange=ExchangePlan(compress="int8", priority=True)
        ),
    )
    yield "illegal: shards", lambda: data_parallel(12, processes=4, zero=1, shards=3)
    yield "illegal: grid", lambda: data_parallel(12, processes=6, split=LayerSplit(tensor=(2, 3)))
    yield "illegal: stages", lambda: pipelined(12, processes=4, stages=3)
    yield (
        "illegal: chimera 3",
        lambda: pipelined(12, processes=3, stages=3, pipeline=PipelinePlan(schedule="chimera")),
    )


def recorded(make):
    try:
        plan = make()
        plan.check()
    except Exception as error:
        return {"error": type(error).__name__, "code": getattr(error, "code", ""),
                "text": str(error).splitlines()}  # fmt: skip
    found = facts_of(plan)
    ranks = {}
    for rank in range(plan.ranks):
        sizes = sizes_of(plan, rank)
        ranks[rank] = {
            "sizes": sizes,
            "counts": plan.counts(rank),
            "plain": program_of(plan, len(sizes), False, passes_of(plan)),
            "clipped": program_of(plan, len(sizes), True, passes_of(plan)),
            "without work": program_of(plan, 0, True, passes_of(plan)),
            "ragged": program_of(plan, 1, False, 2),
        }
    found["ranks"] = ranks
    if plan.pipe_degree > 1:
        found["table"] = table_of(plan)
    return found


def main() -> None:
    found = {name: recorded(make) for name, make in families()}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    wrong = {n: f["text"][0] for n, f in found.items() if "error" in f and "illegal" not in n}
    print(f"programs: {len(found)} families, {len(wrong)} refused: {wrong}")


if __name__ == "__main__":
    main()
