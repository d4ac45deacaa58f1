"""What went into the exchange of every bucket, what came out, and what compressors kept back.

Recorded on every rank by copies, while the run goes on as it does in training: with priority,
updates are still under way when the next forward pass begins.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.comm.lanes.buckets import Bucket
from headway.documents import parse_json
from headway.plans import ExchangePlan

# An update is held back for so long before it may be read: a forward pass that does not wait for it
# then really meets the old values.
HOLD_SECONDS = 0.003


@dataclass(frozen=True, kw_only=True)
class RecordedBucket:
    """One bucket in one step, as one rank saw it.

    Attributes:
        names: Logical names of its parameters.
        shapes: In their memory order; they lie one after the other.
        flags: Where the bucket's flags begin: behind the gradients.
        compress: As in a plan.
        ranks: That exchange it.
        nodes: The ranks of each node, of these.
        weight: The world's ranks by these ranks, where the reduction is a mean.
    """

    step: int
    number: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    compress: str
    ranks: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    weight: float

    @property
    def key(self) -> str:
        return f"{self.step}/{self.number}"


@dataclass(frozen=True)
class RecordedExchange:
    """All buckets of a rank.

    Attributes:
        tensors: "step/bucket/in", "step/bucket/out" -> gradients as one row, flags left out;
            "step/bucket/kept/..." -> the compressor's state afterwards, by its own names;
            "end/saved/..." -> what a checkpoint would hold after the last step; "end/restored/..."
            -> what this rank has after taking that up.
    """

    buckets: tuple[RecordedBucket, ...]
    tensors: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        facts = json.dumps([asdict(bucket) for bucket in self.buckets])
        save_file(dict(self.tensors), path, metadata={"buckets": facts})

    @staticmethod
    def load(path: Path) -> RecordedExchange:
        with safe_open(path, framework="pt") as file:
            rows = parse_json(file.metadata()["buckets"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return RecordedExchange(tuple(_bucket(row) for row in rows), tensors)

    @property
    def saved(self) -> dict[str, Tensor]:
        return self._below("end/saved/")

    @property
    def restored(self) -> dict[str, Tensor]:
        return self._below("end/restored/")

    def state(self, bucket: RecordedBucket) -> dict[str, Tensor]:
        """What the compressor kept of a bucket after its step."""
        return self._below(f"{bucket.key}/kept/")

    def _below(self, start: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(start): value
            for name, value in self.tensors.items()
            if name.startswith(start)
        }


def _bucket(row: Mapping[str, Any]) -> RecordedBucket:
    lists = ("names", "ranks")
    nested = ("shapes", "nodes")
    return RecordedBucket(
        **{
            **row,
            **{key: tuple(row[key]) for key in lists},
            **{key: tuple(map(tuple, row[key])) for key in nested},
        }
    )


def exchange_file(target: Path, rank: int) -> Path:
    """Where a rank writes its exchange beside a recording."""
    return target.with_suffix(f".exchange-{rank}.safetensors")


@dataclass
class ExchangeRecorder:
    """An `ExchangeObserver` that copies.

    Args:
        description: The exchange's as it is now: its compressor may be chosen by measuring.
        on_applied: With priority, called with a step and a bucket whose update has been made.

    Attributes:
        step: That is being made; to be set before each.
    """

    description: Callable[[], ExchangePlan]
    on_applied: Callable[[int, Bucket], None] | None = None
    step: int = 0
    buckets: list[RecordedBucket] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _steps: dict[Bucket, int] = field(default_factory=dict)

    def departing(self, bucket: Bucket) -> None:
        # An exchange that has been re-arranged counts its steps anew, and with priority a sum may
        # land in the next step.
        self._steps[bucket] = self.step
        facts = self._facts(bucket)
        self.buckets.append(facts)
        self.tensors[f"{facts.key}/in"] = _row(bucket.fused.gradients)

    def landed(self, bucket: Bucket) -> None:
        key = f"{self._steps[bucket]}/{bucket.number}"
        self.tensors[f"{key}/out"] = _row(bucket.fused.gradients)
        for name, value in bucket.method.state().items():
            self.tensors[f"{key}/kept/{name}"] = value.detach().clone().contiguous()
        if self.on_applied is not None:
            time.sleep(HOLD_SECONDS)

    def applied(self, bucket: Bucket) -> None:
        if self.on_applied is not None:
            self.on_applied(self._steps[bucket], bucket)

    def checkpointed(self, saved: Mapping[str, Tensor], restored: Mapping[str, Tensor]) -> None:
        """What a checkpoint holds of all ranks, and what this rank has after taking it up."""
        for place, state in (("saved", saved), ("restored", restored)):
            for name, value in state.items():
                self.tensors[f"end/{place}/{name}"] = value.detach().clone().contiguous()

    def recording(self) -> RecordedExchange:
        """In the order of steps and buckets."""
        return RecordedExchange(
            tuple(sorted(self.buckets, key=lambda b: (b.step, b.number))), self.tensors
        )

    def _facts(self, bucket: Bucket) -> RecordedBucket:
        route, plan = bucket.routes[0], self.description()
        part = plan.part(bucket.names[0])
        return RecordedBucket(
            step=self.step,
            number=bucket.number,
            names=bucket.names,
            shapes=tuple(tuple(piece.shape) for piece in bucket.fused.pieces),
            compress=part.compress if part and part.compress else plan.compress,
            ranks=tuple(route.ranks),
            nodes=route.nodes.members,
            weight=bucket.weight,
        )


def _row(gradients: Tensor) -> Tensor:
    """A copy; safetensors knows no complex numbers: real and imaginary parts in turn."""
    copy = gradients.detach().clone()
    return torch.view_as_real(copy).flatten() if copy.is_complex() else copy
