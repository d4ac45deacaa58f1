"""The whole decision how a training step is split, as immutable data.

A plan is made above this line (by a planner or by hand) and obeyed below it. It is priced by
`cost`, played by `simulator`, obeyed by `run`, checked by `verification` and drawn by `report`.
Its file form is JSON; its hash names the decision and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from headway.documents import document, read_document, to_type
from headway.errors import DocumentError, PlanError
from headway.plan.batch import BatchSplit
from headway.plan.exchange import Exchange
from headway.plan.layer_split import SPACE, TENSOR, LayerSplit
from headway.plan.mesh import Mesh
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
    split: LayerSplit = LayerSplit()
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
    def group_degree(self) -> int:
        """Ranks that share each sample, because they split layers or samples."""
        return self.mesh.degree(TENSOR) * self.mesh.degree(SPACE)

    @property
    def pipe_degree(self) -> int:
        """Ranks of a pipeline; 1: there is none."""
        return self.mesh.degree(AXIS)

    @property
    def exchange_degree(self) -> int:
        """Ranks over which the exchange sums; 1 where something else has the sums: a pipeline's
        schedule, the sharding of the state."""
        if self.pipe_degree > 1 or self.memory.zero:
            return 1
        return self.data_degree * self.mesh.degree(SPACE)

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same parts of split layers, group by group."""
        found: dict[int, tuple[int, ...]] = {}
        for rank in range(self.ranks):
            place = self.mesh.coordinate(rank).get(TENSOR, 0)
            found[place] = (*found.get(place, ()), rank)
        return tuple(found.values())

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

    def micro_sizes(self, rank: int) -> tuple[int, ...]:
        """Samples of each micro-batch that a rank computes of a full batch, in order.

        Where state is kept in parts a rank that lacks one passes once more with its last one.
        """
        share = self.batch.share(self.data_rank(rank), self.data_degree)
        found = tuple(map(len, self.batch.microbatches(share)))
        if self.pipe_degree == 1 and self.memory.zero and self.data_degree > 1:
            found += found[-1:] * (self.batch.passes(self.data_degree) - len(found))
        return found

    def counts(self, rank: int) -> bool:
        """Whether the loss of a rank counts: of those that share a sample the first one's does."""
        place = self.mesh.coordinate(rank)
        return not place.get(TENSOR, 0) and not place.get(SPACE, 0)

    def to_dict(self) -> dict[str, object]:
        found = dataclasses.asdict(self)
        if self.prediction is None:
            del found["prediction"]
        if self.split == LayerSplit():
            del found["split"]
        else:
            late = {"only": (), "by": (), "head": "auto"}  # plans of before keep their hash
            found["split"] = {k: v for k, v in found["split"].items() if v != late.get(k, ...)}
        if not self.memory.zero:
            del found["memory"]["zero"]
        if self.exchange.carrier is None:
            del found["exchange"]["carrier"]
        elif not self.exchange.carrier.rates:
            del found["exchange"]["carrier"]["rates"]
        if self.exchange.repack:
            del found["exchange"]["repack"]
        if self.pipeline.shared_memory:
            del found["pipeline"]["shared_memory"]
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
    known = (plan.exchange.axis, SHARD, SPACE, TENSOR, AXIS)
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
        f"mesh axis {a.name} of size {a.size}: no mechanism splits along it yet; only "
        f"{', '.join(('data', *known[1:-1]))} and {known[-1]}"
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
    found.extend(plan.split.problems(plan.mesh, plan.exchange))
    found.extend(sharding_problems(plan.memory.zero, plan.mesh, plan.exchange))
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
