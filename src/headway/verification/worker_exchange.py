"""What compressed meetings of workers must make of their differences.

The reference of all workers computes each one's difference to the last common model; this compares
it with what the worker has put into its buckets. From what was put in, `reference.exchanges`
computes what must come out on every worker, and what each must keep back. The reference goes on
with what did come out, so that no rounding grows from meeting to meeting: two magnitudes that
differ in the last bit would else let another element be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.plans import Plan
from headway.verification.exchange_recording import (
    ExchangeRecorder,
    RecordedBucket,
    RecordedExchange,
)
from headway.verification.reference.exchanges import (
    BucketInputs,
    ExpectedExchange,
    Row,
    expected_exchange,
)
from headway.verification.replay import (
    FACTOR_TOLERANCE,
    as_parameter,
    memory_row,
    rows_by_name,
    state_after,
    state_of,
)

Kinds = dict[str, dict[str, Tensor]]

SHARE_ROUNDINGS = 64.0
"""Units in the last place by which a model may be off where a difference is made of it: the
tolerance of a parameter is that of its size, and a difference is much smaller."""


def meetings_file(target: Path, rank: int) -> Path:
    """Where a rank writes what it has exchanged when workers met, beside a recording."""
    return target.with_suffix(f".meetings-{rank}.safetensors")


def worker_name(worker: int, name: str) -> str:
    """How a recording calls a tensor of one worker."""
    return f"worker {worker}: {name}"


def by_worker(
    numbers: Mapping[int, Mapping[str, Mapping[str, Tensor]]],
) -> dict[str, dict[str, Tensor]]:
    """The tensors of all workers under their names in a recording, by kind."""
    found: dict[str, dict[str, Tensor]] = {}
    for worker, kinds in numbers.items():
        for kind, tensors in kinds.items():
            named = {worker_name(worker, name): value for name, value in tensors.items()}
            found.setdefault(kind, {}).update(named)
    return found


def meeting_kinds(recorder: ExchangeRecorder, step: int) -> Kinds:
    """What one worker has put in, got out and kept back at the meeting of a step."""
    kinds: Kinds = {"share": {}, "exchange": {}, "residual": {}}
    recorded = recorder.recording()
    for bucket in recorded.buckets:
        if bucket.step != step:
            continue
        for kind, what in (("share", "in"), ("exchange", "out")):
            kinds[kind].update(rows_by_name(bucket, recorded.tensors[f"{bucket.key}/{what}"]))
        for name, value in recorded.state(bucket).items():
            if name.rpartition("/")[2] in _KEPT:
                kinds["residual"][name] = value.double().flatten()
    return kinds


_KEPT = ("residual", "server", "share")


class MeetingLaw:
    """The meetings of a run whose workers have recorded them.

    Args:
        split: The recording of the run.

    Attributes:
        bounds: Of tensors under their keys in a recording, by how much they may be off.
    """

    def __init__(self, plan: Plan, seed: int, split: Path) -> None:
        inner = plan.ranks // plan.workers
        files = [meetings_file(split, worker * inner) for worker in range(plan.workers)]
        self._exchanges = [RecordedExchange.load(file) for file in files]
        self._ranks = tuple(worker * inner for worker in range(plan.workers))
        self._compress, self._seed = plan.synchrony.compress, seed
        self._states: list[dict[str, Tensor]] = [{} for _ in files]
        self._meetings = 0
        self._kinds: list[Kinds] = []
        self.bounds: dict[str, Tensor] = {}

    def taken(self) -> dict[str, dict[str, Tensor]]:
        """What must have been recorded since this was last asked, of all workers by kind."""
        found = by_worker(dict(enumerate(self._kinds)))
        self._kinds = []
        return found

    def meet(
        self, step: int, before: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The sum of the differences of all models to the one before, as it was exchanged."""
        self._kinds = [{"share": {}, "exchange": {}, "residual": {}} for _ in models]
        total = {}
        for name, common in before.items():
            parts = [common - model[name] for model in models]
            total[name] = torch.stack(parts).sum(0)
            for worker, (part, model) in enumerate(zip(parts, models, strict=True)):
                self._kinds[worker]["share"][name] = memory_row(part)
                size = torch.maximum(common.abs(), model[name].abs()) * SHARE_ROUNDINGS
                self._bound(step, "share", worker, name, memory_row(size) * np.finfo(float).eps)
        for bucket in self._exchanges[0].buckets:
            if bucket.step == step:
                for name, row in self._bucket(bucket):
                    total[name] = as_parameter(row, before[name])
        self._states = [
            state_after(state, exchange, step)
            for state, exchange in zip(self._states, self._exchanges, strict=True)
        ]
        self._meetings += 1
        return total

    def _bucket(self, bucket: RecordedBucket) -> list[tuple[str, Tensor]]:
        """Note what must come out of a bucket; returns what has come out."""
        if bucket.compress != self._compress or bucket.ranks != self._ranks:
            return []  # what the plan says has not been done: nothing of this is equal
        rows = [e.tensors[f"{bucket.key}/in"].double().numpy() for e in self._exchanges]
        out = self._exchanges[0].tensors[f"{bucket.key}/out"]
        inputs = BucketInputs(
            bucket=bucket,
            rows=rows,
            before=self._states,
            after=[state_of(exchange, bucket.step) for exchange in self._exchanges],
            seed=self._seed,
            steps=self._meetings,
            reduce="mean",
            hierarchical=False,
        )
        expected = expected_exchange(inputs)
        bound, kept_bound = self._limits(expected)
        for worker, kinds in enumerate(self._kinds):
            for name, row in rows_by_name(bucket, torch.from_numpy(expected.out)):
                kinds["exchange"][name] = row
            limits = rows_by_name(bucket, torch.from_numpy(bound)) if bound is not None else ()
            for name, limit in limits:
                self._bound(bucket.step, "exchange", worker, name, limit)
            for name, kept in expected.kept[worker].items() if expected.kept else ():
                kinds["residual"][name] = torch.from_numpy(kept)
                if kept_bound is not None:
                    limit = torch.full((kept.size,), kept_bound, dtype=torch.float64)
                    self._bound(bucket.step, "residual", worker, name, limit)
        return list(rows_by_name(bucket, out))

    def _limits(self, expected: ExpectedExchange) -> tuple[Row | None, float | None]:
        """By how much what comes out, and what is kept back, may be off."""
        if "powersgd" not in self._compress:
            return expected.bound, None
        largest = float(np.abs(expected.out).max()) or 1.0
        limit = np.inf if expected.free else FACTOR_TOLERANCE * largest
        return np.full_like(expected.out, limit), limit

    def _bound(self, step: int, kind: str, worker: int, name: str, limit: Tensor) -> None:
        # Of its own memory: safetensors saves no views.
        self.bounds[f"{step}/{kind}/{worker_name(worker, name)}"] = limit.clone()
