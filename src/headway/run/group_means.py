"""What a micro-batch's loss weighs where a pipeline updates its weights within a step.

Every update is made of a group of micro-batches, and its loss is their own mean: so a learning rate
means what it means in a serial run whose batch is one group. Groups of several pipelines (copies)
are one group together. Invariant: gradients of a group only need to be added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headway.data import RankBatch
from headway.errors import PlanError, RecipeError
from headway.plan import Plan
from headway.schedule.groups import Groups, common_groups


class GroupMeans:
    """Of one rank.

    Args:
        plan: Without a flush.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[int, Groups] = {}
        self._samples = 0
        self._own: list[int] = []
        self._group: dict[int, int] = {}
        self._sizes: list[int] = []
        self._alone: list[bool] = []
        self._per_sample: dict[int, float] = {}

    def begin(self, batch: RankBatch) -> None:
        """A step of the recipe begins.

        Args:
            batch: Of this rank's pipeline.

        Raises:
            PlanError: Copies of the pipeline have different numbers of micro-batches.
        """
        sizes = sizes_of_copies(self._plan, batch.samples)
        groups = self._groups(len(batch.micros))
        self._samples = batch.samples
        self._own = [len(micro.positions) for micro in batch.micros]
        self._group = {m: number for number, group in enumerate(groups) for m in group}
        self._sizes = [sum(copy[m] for copy in sizes for m in group) for group in groups]
        self._alone = [len(sizes) * len(group) == 1 for group in groups]
        self._per_sample.clear()

    def _groups(self, parts: int) -> Groups:
        if parts not in self._known:
            found = common_groups(self._plan.pipeline.make(self._plan.pipe_degree, parts))
            assert found is not None  # the plan's check
            self._known[parts] = found
        return self._known[parts]

    def factor(self, microbatch: int, count: Tensor | float) -> float:
        """Makes of a share of the whole batch's mean one of the group's mean.

        Args:
            microbatch: Its number.
            count: What its loss is a sum over; samples, or something else, such as words.

        Raises:
            RecipeError: The group has other counts per sample elsewhere, or nobody can know.
        """
        group = self._group[microbatch]
        share = self._samples / self._sizes[group]
        per_sample = float(count) / self._own[microbatch]
        if per_sample == 1.0:
            known = self._per_sample.setdefault(group, 1.0) == 1.0
        elif self._alone[group]:
            known = True
        else:
            first = self._per_sample.setdefault(group, per_sample)
            known = self._plan.data_degree == 1 and first == per_sample
        if not known:
            raise _unknown_count()
        return share / per_sample if per_sample else share


def sizes_of_copies(plan: Plan, samples: int) -> list[list[int]]:
    """For each copy of the pipeline the samples of its micro-batches.

    Args:
        plan: Of a pipeline.
        samples: Of the global batch; fewer than planned where it is ragged.

    Raises:
        PlanError: The copies have different numbers of micro-batches: they would make different
            numbers of steps.
    """
    copies, split = plan.data_degree, plan.batch
    shares = [split.share(copy, copies, samples) for copy in range(copies)]
    sizes = [[len(part) for part in split.microbatches(share)] for share in shares]
    if len({len(copy) for copy in sizes}) > 1:
        raise PlanError(
            "a batch cannot be cut alike for all copies of the pipeline",
            problems=[f"{samples} samples give them {_listed(sizes)} micro-batches; without a "
                      "flush all must make the same steps"],
            fix="Set drop_last = true, so that no epoch ends with a smaller batch.",
        )  # fmt: skip
    return sizes


def check_last_batch(plan: Plan, length: int) -> None:
    """Look at the ragged batch before the first step, not at the end of the first epoch.

    Args:
        plan: Any.
        length: Samples of an epoch.

    Raises:
        PlanError: As `sizes_of_copies`.
    """
    if not plan.flushes and length % plan.batch.samples:
        sizes_of_copies(plan, length % plan.batch.samples)


def _listed(sizes: Sequence[Sequence[int]]) -> str:
    return " and ".join(map(str, sorted({len(copy) for copy in sizes})))


def _unknown_count() -> RecipeError:
    return RecipeError(
        "this loss cannot be used with updates of several micro-batches within a step",
        why="It returns a sum and a count that differs between micro-batches; the count of all is "
        "only known after the gradients have been made.",
        fix="Return the mean over samples, or use pipedream in one pipeline, or a schedule with a "
        "flush.",
    )
