"""Synthetic run directories: what `run/` writes, without running anything.

`write_run` makes a run of two attempts: the first is killed in step 57 of 120 after a checkpoint at
step 50, the second resumes there and completes. All numbers follow from the step and the rank, so
that tests can compute what they expect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = 1_760_000_000.0
NASTY = "<script>alert('x')</script> & \"quoted\" $x_1$ {{ 7 * 7 }}"
PLAN = {
    "mesh": {"axes": [{"name": "data", "size": 2}]},
    "batch": {"samples": 64, "microbatch": 16},
    "layouts": [],
    "pipeline": {},
    "exchange": {
        "axis": "data",
        "collective": "all_reduce",
        "bucket": "25 MiB",
        "overlap": True,
    },
    "synchrony": {"kind": "synchronous"},
    "memory": {"precision": "float32"},
    "format": 1,
}
RECIPE = {
    "name": "transformer-bytes",
    "reference": "headway.workloads.transformer:demo",
    "batch": "64 samples",
    "stop": "120 steps",
    "seed": "0",
    "tokens_per_sample": "128",
}
ENVIRONMENT = {
    "headway": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "platform": "Linux x86_64",
    "processor": "an ordinary processor",
    "cores": 2,
    "memory_bytes": 24 * 2**30,
    "device": "cpu",
    "backend": "gloo",
    "hosts": ["node-0"],
    "started": "2025-10-09T08:53:20+00:00",
}
FAILURE = {
    "rank": 1,
    "step": 57,
    "kind": "WorkerFailed",
    "what": "an exception in one rank",
    "where": "rank 1, step 57",
    "why": f"ValueError: {NASTY}",
    "fix": "Read the trace.",
    "code": "HW-3003",
    "exit_code": 3,
    "secondary": False,
    "time": BEGAN + 24.0,
    "trace": "Traceback (most recent call last):\n  ...\nValueError: a planned failure",
}


def loss_at(step: int) -> float:
    """A loss that falls from 5.5 to about 2, with some noise."""
    return 2.0 + 3.5 * math.exp(-step / 40) + 0.08 * math.sin(step * 12.9898)


def write_run(
    directory: Path,
    *,
    steps: int = 120,
    ranks: int = 2,
    restart: tuple[int, int] | None = (57, 50),
    complete: bool = True,
    traced: tuple[int, ...] = (1, 20, 60, 100),
    buckets: int = 0,
) -> Path:
    """Write a run directory.

    Args:
        directory: Is created.
        steps: Steps of the whole run.
        ranks: Number of ranks.
        restart: (last step before the kill, step of the checkpoint it resumes from), or None.
        complete: The run wrote its stop event.
        traced: Steps with spans.
        buckets: Buckets of the exchange that the run tells of; 0: it tells nothing.
    """
    (directory / "ranks").mkdir(parents=True)
    plan = {**PLAN, "mesh": {"axes": [{"name": "data", "size": ranks}]}}
    for name, document in (("recipe", RECIPE), ("plan", plan), ("environment", ENVIRONMENT)):
        (directory / f"{name}.json").write_text(json.dumps(document, indent=2))
    lives = [(0, 0, steps)] if restart is None else [(0, 0, restart[0]), (1, restart[1], steps)]
    events: list[dict[str, Any]] = []
    for attempt, first, last in lives:
        events += _life(attempt, first, last, ranks, traced, buckets)
    if complete:
        events.append({"event": "showcase", "step": steps, "text": f"def main():\n    {NASTY}"})
        events.append(
            {"event": "stop", "attempt": attempt, "time": _time(attempt, steps), "step": steps}
            | {"reason": "complete"}
        )
    write_lines(directory / "events.jsonl", events)
    for rank in range(ranks):
        rows = [
            row
            for attempt, first, last in lives
            for step in range(first + 1, last + 1)
            for row in _rank_rows(attempt, step, rank, step in traced)
        ]
        write_lines(directory / "ranks" / f"rank-{rank:05d}.jsonl", rows)
    if restart is not None:
        (directory / "failures").mkdir()
        path = directory / "failures" / "attempt-0-rank-00001.json"
        path.write_text(json.dumps(FAILURE))
    return directory


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _time(attempt: int, step: int) -> float:
    return BEGAN + 0.41 * step + 10.0 * attempt


def exchange_at(step: int, buckets: int) -> list[dict[str, Any]]:
    """Buckets of 4 MiB that become ready one after the other; the last is waited for."""
    return [
        {
            "bucket": number,
            "parameters": [f"blocks.{number}.{part}" for part in ("weight", "bias", NASTY)],
            "bytes": 4 * 2**20,
            "wire_bytes": 4 * 2**20 + step,
            "ready": 0.1 + 0.02 * number,
            "sent": 0.11 + 0.02 * number,
            "received": 0.15 + 0.02 * number,
            "applied": None,
            "needed": 0.2,
            "waited": 0.03 if number == buckets - 1 else 0.0,
        }
        for number in range(buckets)
    ]


def _life(
    attempt: int, first: int, last: int, ranks: int, traced: tuple[int, ...], buckets: int
) -> Iterator[dict[str, Any]]:
    began = {"attempt": attempt, "time": _time(attempt, first), "step": first}
    if first:
        yield {"event": "resume", **began, "checkpoint": first}
    equation = f"64 samples = {ranks} ranks x 2 micro-batches x {32 // ranks} samples"
    yield {"event": "start", **began, "ranks": ranks, "batch": equation}
    if attempt == 0:
        yield {"event": "warning", **began, "text": f"4 processes on 2 cores {NASTY}"}
    for step in range(first + 1, last + 1):
        seconds = 0.41 + 0.03 * math.sin(step * 7.3) + (0.4 if step == first + 1 else 0.0)
        here = {"attempt": attempt, "time": _time(attempt, step), "step": step}
        yield {
            "event": "step",
            **here,
            # A superseded step must be recognisable: attempt 0 logged another loss.
            "loss": loss_at(step) + (0.5 if attempt == 0 and step > 50 else 0.0),
            "samples": 64,
            "epoch": step // 100,
            "position": step * 64 % 6400,
            "seconds": seconds,
            "rate": 64 / seconds,
            "lr": 1e-3 * min(1.0, step / 20) * max(0.1, 1 - step / 200),
            "norm": 1.2 * math.exp(-step / 60) + 0.2,
            **(
                {"exposed": 0.03, "overlap": 0.75, "wire_bytes": buckets * 2**22} if buckets else {}
            ),
        }
        if buckets and step in traced:
            yield {"event": "exchange", **here, "buckets": exchange_at(step, buckets)}
        if step % 25 == 0:
            loss = loss_at(step) + 0.15
            yield {"event": "validation", **here, "loss": loss, "samples": 1000, "seconds": 1.2}
        if step % 50 == 0:
            yield {"event": "checkpoint", **here, "bytes": 12_900_000, "held_seconds": 0.05}


def _rank_rows(attempt: int, step: int, rank: int, traced: bool) -> Iterator[dict[str, Any]]:
    yield {
        "event": "rank_step",
        "attempt": attempt,
        "step": step,
        "seconds": 0.41,
        "compute": 0.30 - 0.02 * rank,
        "exposed": 0.05 + 0.02 * rank,
        "data": 0.01,
        "update": 0.03,
        "memory_bytes": 900 * 2**20 + rank * 40 * 2**20 + min(step, 30) * 2**20,
    }
    if not traced:
        return
    begin = _time(attempt, step) + 0.002 * rank
    late = 0.01 * min(rank, 4)
    for lane, kind, label, start, end in (
        ("data", "data", "batch", 0.0, 0.01),
        ("compute", "forward", "micro-batch 0", 0.01, 0.06),
        ("compute", "backward", "micro-batch 0", 0.06, 0.16 + late),
        ("compute", "forward", "micro-batch 1", 0.16 + late, 0.21 + late),
        ("compute", "backward", f"micro-batch 1 {NASTY}", 0.21 + late, 0.31 + late),
        ("exchange", "exchange", "bucket 0: 4.2 MiB", 0.25, 0.29),
        ("exchange", "exchange", "bucket 1: 25 MiB", 0.29, 0.36),
        ("compute", "wait", "buckets", 0.31 + late, 0.36),
        ("compute", "update", "AdamW", 0.36, 0.39),
        ("checkpoint", "checkpoint", "write", 0.1, 0.33),
    ):
        yield {
            "event": "span",
            "attempt": attempt,
            "step": step,
            "rank": rank,
            "lane": lane,
            "kind": kind,
            "label": label,
            "start": begin + start,
            "end": begin + end,
            "node": f"step {step}",
        }
