"""Who agrees with whom, when, and on what: the taxonomy of distributed training as data.

The words are those of Langer et al. 2020 (A Taxonomy of Parallel Training, TPDS 31(12), sections 3
and 4). *Central*: one optimiser writes each parameter, and what workers give it are gradients; it
runs in servers, or on every rank alike (the replicated server, which is all-reduce). *Decentral*:
every worker has an optimiser and a model of its own, and models are merged now and then. A *worker*
is one place of the mesh axis "worker": a rank, or a group of ranks that is synchronous inside (data
parallel copies, a pipeline, ranks that keep state together).

Most fields mean something in one family only. A value elsewhere is an error, not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Literal

from headway.collective.compression import parse_compression
from headway.documents import document
from headway.keywords import checks_keywords
from headway.units import counted

WORKER_AXIS = "worker"
"""The outermost axis of the mesh; its places agree as `Synchrony` says, not step by step."""

Kind = Literal["synchronous", "bounded", "soft_bounded", "asynchronous"]
Merge = Literal["gradients", "mean", "elastic", "neighbour", "pairwise", "push_sum", "penalty"]
Topology = Literal[
    "replicated", "single", "sharded", "colocated", "master", "tree", "ring", "torus",
    "exponential", "hypercube", "mesh", "proxy_tree", "array",
]  # fmt: skip
Transfer = Literal[
    "all_reduce", "scatter_reduce", "reduce", "binomial_tree", "sequential", "ad_hoc", "neighbour",
    "gossip",
]  # fmt: skip
Remedy = Literal[
    "none", "staleness_rate", "delay_compensation", "eager_push", "prioritize", "negative_momentum"
]
SERVERS: tuple[Topology, ...] = ("single", "sharded", "colocated", "proxy_tree")
"""Topologies in which servers hold the parameters."""
GRAPHS: tuple[Topology, ...] = ("ring", "torus", "exponential", "hypercube", "mesh")
"""Topologies in which workers talk to each other directly."""

_KINDS: dict[Merge, tuple[Kind, ...]] = {
    "gradients": ("synchronous", "bounded", "asynchronous"),
    "mean": ("synchronous",),
    "elastic": ("synchronous", "bounded", "asynchronous"),
    "neighbour": ("synchronous",),
    "pairwise": ("asynchronous",),
    "push_sum": ("soft_bounded", "asynchronous"),
    "penalty": ("soft_bounded",),
}
_TOPOLOGIES: dict[Merge, tuple[Topology, ...]] = {
    "gradients": ("replicated", *SERVERS, "array"),
    "mean": ("replicated", "master"),
    "elastic": ("master", "tree"),
    "neighbour": GRAPHS,
    "pairwise": GRAPHS,
    "push_sum": GRAPHS,
    "penalty": ("master",),
}
MERGES: dict[Merge, str] = {
    "gradients": "gradients are given to one optimiser",
    "mean": "the mean of all models (local SGD)",
    "elastic": "models and a centre pull at each other (EASGD)",
    "neighbour": "a weighted mean with the neighbours' models (D-PSGD)",
    "pairwise": "the mean with one neighbour's model (AD-PSGD)",
    "push_sum": "weighted models are sent to one at random (GoSGD)",
    "penalty": "a penalty in the loss (MPCA-SGD)",
}
"""What each merge is, in words."""
_NEAREST_MERGES: dict[Merge, str] = {
    "penalty": 'MPCA-SGD, whose penalty changes the loss; the nearest is "elastic" with kind '
    '"asynchronous" (EASGD)'
}
_NEAREST_REMEDIES: dict[Remedy, str] = {
    "prioritize": 'servers take pushes as they come; the nearest is "staleness_rate", which gives '
    "stale ones less weight",
    "negative_momentum": "asynchrony acts like momentum; the nearest is a smaller momentum of the "
    'optimiser, or "delay_compensation"',
}
_NEAREST_TOPOLOGIES: dict[Topology, str] = {
    "proxy_tree": 'the nearest is "colocated"; with a delay_bound and remedy "eager_push" each '
    "worker has a cache",
    "array": "the nearest is split.tensor without copies of the model, with no topology: each rank "
    "then updates the parts of layers that it has",
}


@checks_keywords
@document
class Synchrony:
    """Who agrees with whom, when, and on what; the default is all ranks at every step.

    Attributes:
        kind: "synchronous"; "bounded": a worker waits for others that are too far behind;
            "asynchronous": nobody waits; "soft_bounded": a bound that adapts (gossip).
        merge: On what: "gradients" (central), or models (decentral): their "mean" (local SGD,
            DiLoCo), "elastic" (EASGD), "neighbour" (D-PSGD), "pairwise" (AD-PSGD), "push_sum"
            (GoSGD), "penalty" (MPCA-SGD).
        topology: Who holds or meets whom; None: what is usual, see `place`.
        transfer: How it is carried; None: what follows from the rest, see `carriage`.
        servers: With topology "sharded", the ranks that hold a share of the parameters.
        reduce: What n pushes, one of each worker, make of gradients of their mean losses: "mean",
            as one synchronous step; "sum", n times as much (Downpour as published).
        fetch_every: Steps between two fetches of a Downpour worker, which meanwhile applies its own
            gradients.
        push_every: Steps whose gradients it sums before it pushes them.
        delay_bound: Of kind "bounded": the most steps that a worker may be ahead of the slowest one
            when it begins a step (stale synchronous parallel).
        value_bound: In its place: the largest change of a parameter, as a number, that a worker may
            not know of.
        read: "fresh": a fetch gets the newest parameters; "snapshot": those after all pushes of
            steps up to the bound and the worker's own, and no others, so that a run can be repeated
            without a record; "ahead": the newest when the step before began, fetched while that one
            is computed: without the worker's own last push.
        on_violation: "wait" until the bound holds, or "reject": drop what is too stale.
        backup_workers: A synchronous step ends without the slowest so many.
        remedy: Against staleness: "staleness_rate" divides the rate by it; "delay_compensation"
            corrects gradients (DC-ASGD); "eager_push": servers send before they are asked (ESSP).
        compensation: The factor lambda of "delay_compensation".
        local_steps: Steps of a worker between two merges (tau).
        warm_up: Steps at the beginning that are synchronous (post-local SGD).
        state: What becomes of the workers' optimisers when models are averaged: "average" theirs as
            well, "keep" one's own, or "reset".
        outer: The optimiser that takes the mean's change of the model for a gradient: "momentum"
            (slow momentum) or "nesterov" (DiLoCo); "none": the mean itself.
        outer_rate: Its learning rate.
        outer_momentum: Its momentum.
        alpha: Of "elastic": how far a worker moves towards the centre.
        beta: How far the centre moves towards a worker.
        probability: Of "push_sum": that a worker sends after a step.
        period_up: Of "elastic" with topology "tree": local steps between messages to the parent.
        period_down: The same, to the children.
        weights: Of "neighbour": the mixing matrix W, row by row, in place of the topology's own.
        compress: With merge "mean", a compressor for what each worker sends at a meeting: the
            difference between the model after the last meeting and its own.
        copies: Data-parallel copies of the model inside each worker, which agree at every step;
            with `memory.zero` they keep the model together.
    """

    kind: Kind = "synchronous"
    merge: Merge = "gradients"
    topology: Topology | None = None
    transfer: Transfer | None = None
    servers: int | None = None
    reduce: Literal["mean", "sum"] = "mean"
    fetch_every: int = 1
    push_every: int = 1
    delay_bound: int | None = None
    value_bound: float | None = None
    read: Literal["fresh", "snapshot", "ahead"] = "fresh"
    on_violation: Literal["wait", "reject"] = "wait"
    backup_workers: int = 0
    remedy: Remedy = "none"
    compensation: float = 0.04
    local_steps: int = 1
    warm_up: int = 0
    state: Literal["average", "keep", "reset"] = "average"
    outer: Literal["none", "momentum", "nesterov"] = "none"
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    alpha: float = 0.125
    beta: float = 0.125
    probability: float = 0.1
    period_up: int = 10
    period_down: int = 100
    weights: tuple[tuple[float, ...], ...] = ()
    compress: str = "none"
    copies: int = 1

    def __str__(self) -> str:
        """What differs from the default: "kind=bounded, delay_bound=4"."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.given)

    @property
    def given(self) -> tuple[str, ...]:
        """The fields that differ from the default."""
        return tuple(
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        )

    @property
    def exact(self) -> bool:
        """Whether a step equals that of the serial run, up to rounding."""
        return (
            self.kind == "synchronous"
            and self.central
            and not self.backup_workers
            and self.reduce == "mean"
            and self.compress == "none"
        )

    @property
    def by_all_reduce(self) -> bool:
        """Whether every step ends in a sum over all ranks: what a plan does by default."""
        return self.central and self.place == "replicated"

    @property
    def central(self) -> bool:
        """Whether one optimiser writes each parameter."""
        return self.merge == "gradients"

    @property
    def has_servers(self) -> bool:
        return self.central and self.place in SERVERS

    @property
    def in_rounds(self) -> bool:
        """Whether all workers (or all neighbours) meet after the same steps, so that what a run
        computes does not depend on who was faster."""
        return self.kind == "synchronous" and not self.has_servers

    @property
    def survives(self) -> bool:
        """Whether workers go on where one dies on which they do not depend."""
        free = not (self.by_all_reduce or self.in_rounds)
        return free and (self.kind != "synchronous" or self.backup_workers > 0)

    @property
    def place(self) -> Topology:
        """The topology, also where it is not given."""
        if self.topology is not None:
            return self.topology
        if self.central:
            return "replicated" if self.kind == "synchronous" else "colocated"
        usual: dict[Merge, Topology] = {
            "mean": "replicated",
            "elastic": "master",
            "neighbour": "ring",
            "pairwise": "ring",
            "push_sum": "mesh",
            "penalty": "master",
        }
        return usual[self.merge]

    @property
    def carriage(self) -> Transfer:
        """The transfer, also where it is not given."""
        if self.transfer is not None:
            return self.transfer
        if self.merge == "push_sum":
            return "gossip"
        if self.merge == "neighbour":
            return "neighbour"
        return "all_reduce" if self.place == "replicated" else "ad_hoc"

    def carried_out_by_nothing(self) -> Iterator[str]:
        """What has a word and no program, with the nearest that has one; one line each."""
        for name, nearest in (
            ("merge", _NEAREST_MERGES.get(self.merge)),
            ("remedy", _NEAREST_REMEDIES.get(self.remedy)),
            ("topology", _NEAREST_TOPOLOGIES.get(self.place)),
        ):
            if nearest:
                yield f'synchrony.{name} "{getattr(self, name)}": {nearest}'
        usual = replace(self, transfer=None).carriage
        if self.carriage != usual and (self.merge, self.carriage) != ("push_sum", "ad_hoc"):
            yield (
                f'synchrony.transfer "{self.carriage}": the nearest is "{usual}", which is what '
                "happens without it; sums are the same"
            )

    def problems(self, workers: int, ranks: int, copies: int) -> Iterator[str]:
        """Every problem, one line each; none if it is legal.

        Args:
            workers: The size of the mesh axis "worker".
            ranks: Of the plan.
            copies: Of the model inside a worker, on the axes data and shard.
        """
        yield from self.contradictions()
        yield from self._servers(workers, ranks)
        if self.merge == "elastic" and self.kind == "synchronous" and self.beta * workers > 1:
            yield (
                f"synchrony.beta is {self.beta:g} with {workers} workers that meet at once: the "
                f"centre would move beyond their mean; at most {1 / workers:g}"
            )
        if self.weights:
            yield from mixing_problems(self.weights, workers)
        if self.merge in ("neighbour", "pairwise") and not self.weights and workers > 1:
            yield from _graph_problems(self, workers)
        if self.by_all_reduce and workers > 1:
            yield (
                f"mesh axis {WORKER_AXIS} has size {workers}, and synchrony lets all ranks agree "
                "at every step; name a kind, a merge or servers, or use the axis data"
            )
        if not self.by_all_reduce and copies != self.copies:
            yield (
                f"synchrony.copies is {self.copies}; the mesh has {copies} of the "
                f'model inside a worker: the workers of ({self}) stand on the axis "{WORKER_AXIS}"'
            )

    def contradictions(self) -> Iterator[str]:
        """The problems that it has with any number of workers, one line each."""
        yield from self._numbers()
        yield from self._family()
        yield from self._needless()
        if self.merge == "elastic" and self.beta > self.alpha:
            yield (
                f"synchrony.alpha is {self.alpha:g} below beta {self.beta:g}: the centre would "
                "move further than the workers; let alpha be at least beta"
            )
        if self.merge == "mean" and self.compress != "none" and self.state == "average":
            yield (
                f'synchrony.compress "{self.compress}" with state "average": the optimisers\' '
                "moments have no common value to which a difference could be sent; let state be "
                '"keep" or "reset"'
            )

    def _numbers(self) -> Iterator[str]:
        """Values that are out of range wherever they stand."""
        least: dict[str, float] = {
            "fetch_every": 1, "push_every": 1, "local_steps": 1, "period_up": 1, "period_down": 1,
            "warm_up": 0, "delay_bound": 0, "backup_workers": 0, "servers": 1, "compensation": 0,
            "copies": 1,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                yield f"synchrony.{name} is {value:g}; at least {bound:g}"
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 0 < value <= 0.5:
                yield f"synchrony.{name} is {value:g}; above 0 and at most 0.5"
        if not 0 < self.probability <= 1:
            yield f"synchrony.probability is {self.probability:g}; above 0 and at most 1"
        if not 0 < self.outer_rate < math.inf:
            yield f"synchrony.outer_rate is {self.outer_rate:g}; above 0"
        if not 0 <= self.outer_momentum < 1:
            yield f"synchrony.outer_momentum is {self.outer_momentum:g}; at least 0 and below 1"
        if self.value_bound is not None and not 0 < self.value_bound < math.inf:
            yield f"synchrony.value_bound is {self.value_bound:g}; above 0"
        try:
            parse_compression(self.compress)
        except ValueError as error:
            yield f"synchrony.compress: {error}"

    def _family(self) -> Iterator[str]:
        """Kind, topology and transfer against what is merged."""
        what = f'merge "{self.merge}" ({MERGES[self.merge]})'
        if self.kind not in (kinds := _KINDS[self.merge]):
            yield f'synchrony.kind "{self.kind}" with {what}: it can be {_listed(kinds)}'
        if self.place not in (places := _TOPOLOGIES[self.merge]):
            yield f'synchrony.topology "{self.place}" with {what}: it can be {_listed(places)}'
        elif self.central and self.place == "replicated" and self.kind != "synchronous":
            yield (
                f'synchrony.topology "replicated" with kind "{self.kind}": copies of the server '
                f"would differ; it can be {_listed(SERVERS)}"
            )
        together = ("all_reduce", "scatter_reduce", "binomial_tree")
        if (
            self.transfer in together
            and self.kind != "synchronous"
            and self.place not in ("master", "colocated")
        ):
            yield (
                f'synchrony.transfer "{self.transfer}" with kind "{self.kind}": all workers take '
                'part in it at once; leave it out, or let it be "ad_hoc"'
            )
        if self.kind == "bounded" and self.central:
            bounds = [n for n in ("delay_bound", "value_bound") if getattr(self, n) is not None]
            if not bounds:
                yield (
                    'synchrony.kind "bounded" without a bound: give delay_bound (steps) or '
                    "value_bound"
                )
            if len(bounds) == 2:
                yield "synchrony has a delay_bound and a value_bound: leave one of them out"

    def _needless(self) -> Iterator[str]:
        """Values that mean nothing beside the others."""
        bounded = self.kind == "bounded" and self.central
        delayed = bounded and self.delay_bound is not None
        stale = self.has_servers and self.kind != "synchronous"
        means: dict[str, tuple[bool, str]] = {
            "servers": (self.place == "sharded", 'topology "sharded"'),
            "reduce": (self.central, 'merge "gradients"'),
            "fetch_every": (stale and self.kind == "asynchronous", 'kind "asynchronous"'),
            "push_every": (stale and self.kind == "asynchronous", 'kind "asynchronous"'),
            "delay_bound": (bounded, 'kind "bounded" and merge "gradients"'),
            "value_bound": (bounded, 'kind "bounded" and merge "gradients"'),
            "read": (
                delayed or (self.read == "ahead" and stale and self.kind == "asynchronous"),
                "a delay_bound" + ' or kind "asynchronous"' * (self.read == "ahead"),
            ),
            "on_violation": (delayed, "a delay_bound"),
            "backup_workers": (
                self.has_servers and self.kind == "synchronous",
                f'kind "synchronous" and a topology of servers ({_listed(SERVERS)})',
            ),
            "remedy": (stale, 'servers and kind "bounded" or "asynchronous"'),
            "compensation": (
                self.remedy == "delay_compensation",
                'remedy "delay_compensation"',
            ),
            "local_steps": (not self.central, "a merge of models: mean, elastic, neighbour, ..."),
            "warm_up": (self.merge == "mean", 'merge "mean"'),
            "state": (self.merge == "mean", 'merge "mean"'),
            "outer": (self.merge == "mean", 'merge "mean"'),
            "outer_rate": (self.outer != "none", "an outer optimiser"),
            "outer_momentum": (self.outer != "none", "an outer optimiser"),
            "alpha": (self.merge == "elastic", 'merge "elastic"'),
            "beta": (self.merge == "elastic", 'merge "elastic"'),
            "probability": (self.merge == "push_sum", 'merge "push_sum"'),
            "period_up": (self.place == "tree", 'topology "tree"'),
            "period_down": (self.place == "tree", 'topology "tree"'),
            "weights": (self.merge == "neighbour", 'merge "neighbour"'),
            "compress": (not self.by_all_reduce, "workers; here it is exchange.compress"),
            "copies": (not self.by_all_reduce, "workers that do not agree at every step"),
        }
        for name in self.given:
            applies, where = means.get(name, (True, ""))
            if not applies:
                yield (
                    f"synchrony.{name} is {_shown(getattr(self, name))}: it means something only "
                    f"with {where}; leave it out"
                )
        if self.remedy == "eager_push" and not delayed:
            yield 'synchrony.remedy "eager_push" is for a delay_bound'
        if self.read == "snapshot" and self.on_violation == "reject":
            yield 'synchrony.read "snapshot" never finds anything to reject; leave one of them out'
        yield from self._ahead()
        if self.place == "tree" and self.local_steps != 1:
            yield (
                f'synchrony.local_steps is {self.local_steps} with topology "tree", whose periods '
                "are period_up and period_down"
            )

    def _ahead(self) -> Iterator[str]:
        """What needs to know what a worker computes with, beside parameters fetched ahead."""
        if self.read != "ahead":
            return
        for name in ("fetch_every", "push_every"):
            if getattr(self, name) != 1:
                yield f'synchrony.read "ahead" with {name} {getattr(self, name)}: leave one out'
        if self.remedy in ("delay_compensation", "eager_push"):
            yield f'synchrony.read "ahead" with remedy "{self.remedy}": leave one of them out'
        if self.delay_bound == 0:
            yield (
                'synchrony.read "ahead" with delay_bound 0: the next step is asked for before this '
                "one is pushed; at least 1"
            )

    def _servers(self, workers: int, ranks: int) -> Iterator[str]:
        if self.place == "sharded" and self.servers is None:
            yield 'synchrony.topology "sharded" needs servers, the number of shares'
        if self.servers is not None and self.servers > ranks:
            yield f"synchrony.servers is {self.servers}; at most one for each of {ranks} ranks"
        if 0 < workers <= self.backup_workers:
            yield (
                f"synchrony.backup_workers is {self.backup_workers} of "
                f"{counted(workers, 'worker')}: nobody would be left; at most {workers - 1}"
            )


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _listed(words: Sequence[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def mixing_problems(weights: Sequence[Sequence[float]], workers: int) -> Iterator[str]:
    """Why a matrix cannot mix the models of some workers; none if it is doubly stochastic.

    Rows and columns must add up to 1 within 1e-9: else the mean of the models is not kept (Lian et
    al. 2017, assumption 1.2).
    """
    sizes = [len(row) for row in weights]
    if len(weights) != workers or set(sizes) != {workers}:
        yield (
            f"synchrony.weights has {len(weights)} rows of {', '.join(map(str, sorted({*sizes})))} "
            f"entries for {counted(workers, 'worker')}; {workers} x {workers}"
        )
        return
    for row, entries in enumerate(weights):
        for column, entry in enumerate(entries):
            if not 0 <= entry < math.inf:
                yield f"synchrony.weights[{row}][{column}] is {entry:g}; at least 0"
    for what, lines in (("row", weights), ("column", list(zip(*weights, strict=True)))):
        for number, line in enumerate(lines):
            if not abs(math.fsum(line) - 1) <= 1e-9:
                yield (
                    f"synchrony.weights: {what} {number} adds up to {math.fsum(line):.9g}, not 1: "
                    "the matrix is not doubly stochastic, and the mean of the models would drift"
                )


def _graph_problems(synchrony: Synchrony, workers: int) -> Iterator[str]:
    """Graphs that have no place for so many workers."""
    place = synchrony.place
    power = workers & (workers - 1) == 0
    if place == "hypercube" and not power:
        yield (
            f'synchrony.topology "hypercube" with {workers} workers: their number must be a power '
            'of two; "exponential" takes any'
        )
    if place == "torus" and not any(
        workers % side == 0 for side in range(2, math.isqrt(workers) + 1)
    ):
        yield (
            f'synchrony.topology "torus" with {workers} workers: their number must be a product of '
            'two numbers above 1; "ring" takes any'
        )
