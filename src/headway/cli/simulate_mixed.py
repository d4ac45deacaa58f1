"""`headway simulate` where the cluster has devices of several types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.cli.console import note
from headway.cli.explain_mixed import kinds_of_ranks, question_about
from headway.cli.plan_mixed import describe, in_runs
from headway.cluster import Cluster
from headway.cost.transformer import Machine
from headway.plan import Plan
from headway.plan import explain as in_words
from headway.planner.mixed import MixedSearch, search_mixed
from headway.planner.mixed_plan import ranks_of
from headway.planner.mixed_played import step_of_mixed_plan, step_of_mixed_point
from headway.planner.planned import simplified
from headway.simulator.work import StepWork


class MixedJob:
    """A plan, read or found, on devices of several types.

    Args:
        plan: None: the fastest plan that the search finds.
        recipe: As for `headway train`.
        cluster: With devices of several types.
        memory: Of a device that may be used.
        ranks: Devices, without a plan.
    """

    def __init__(
        self, plan: Plan | None, recipe: str, cluster: Cluster, memory: str | None, ranks: int
    ) -> None:
        self.plan = plan
        self.question = question_about(plan, recipe, cluster, memory, ranks)
        if plan is not None:
            self.kinds = kinds_of_ranks(plan, cluster)
            self.name, words = plan.hash, in_words(plan)
            for sentence in simplified(plan, unlike=True):
                note(f"note: {sentence}")
        else:
            outcome = search_mixed(self.question)
            self.point, self.engine = outcome.best, outcome.search
            self.kinds, self.name = ranks_of(self.point), describe(self.point)
            words = f"the fastest plan that the search finds: {self.name}"
        self.words = f"{words}\nranks in the order of the mesh: {in_runs(self.kinds)}"

    @property
    def machines(self) -> Mapping[str, Machine]:
        return self.question.machines

    def step(self, machines: Mapping[str, Machine]) -> tuple[StepWork, float]:
        """On machines, and its price there. Of a plan that was found degrees, cells and sizes of
        micro-batches stay."""
        question = replace(self.question, machines=machines)
        if self.plan is not None:
            work, priced = step_of_mixed_plan(self.plan, MixedSearch(question), self.kinds)
            return work, priced.seconds
        if machines is self.machines:
            return step_of_mixed_point(self.point, self.engine), self.point.seconds
        engine = MixedSearch(question)
        sharing = engine.sharing(self.point.combination, self.point.sizes)
        again = sharing.fastest(dict.fromkeys(machines, float("inf")))
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_mixed_point(again, engine), again.seconds

    def caps(self, machines: Mapping[str, Machine]) -> Mapping[str, float]:
        """Bytes of a device that may be used, by type."""
        return replace(self.question, machines=machines).caps


def places_of(kinds: tuple[str, ...], cluster: Cluster) -> tuple[int, ...]:
    """For each rank the number of its device in the cluster: of its type the next free one."""
    free: dict[str | None, list[int]] = {}
    for place, kind in enumerate(cluster.devices_of_ranks):
        free.setdefault(kind, []).append(place)
    return tuple(free[kind].pop(0) for kind in kinds)
