"""Builds a plan's exchange, and re-arranges its buckets and sending order from measurements.

`make_exchange` turns the plan's description and a `BucketArrangement` into buckets, methods and a
lane. It depends on these two and on the parameters' names, shapes and types only, so all ranks
build the same.

`AdaptiveExchange` finds arrangements. In a few steps it notes when gradients become ready and when
parameters are first used; small all-reduces measure the link; from both, `headway.collective` finds
buckets (MG-WFBP, Shi et al. 2019) or chunks and their planned order. It is repeated now and then,
because links change. All ranks measure in the same steps and use the slowest rank's times.

`compress = "auto"`: each candidate compresses one matrix on a route of one rank, where nothing has
to be sent, and `headway.collective` ranks them with the measured numbers. An inexact exchange is
chosen only where it gains more than it costs in exactness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.channel.facts import broadcast_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.compression import (
    UNCOMPRESSED,
    Compression,
    CompressorSpeed,
    MsTopKCompression,
    parse_compression,
)
from headway.collective.model.bucket_cost import (
    ExchangeNetwork,
    ExchangeScheme,
    bucket_traffic,
    compressed_link,
)
from headway.collective.model.gradient_buckets import chunk_spans, merge_buckets, split_by_key
from headway.collective.model.link_fit import LinkFit, link_drifted
from headway.collective.model.overlap import LinkLoad
from headway.collective.model.priority_order import chunk_size, planned_order
from headway.collective.model.scheme_ranking import (
    CANDIDATE_COMPRESSORS,
    FIRST_BUCKET,
    TYPICAL_COMPRESSOR_SPEEDS,
    GradientLayer,
    SchemeChoice,
    rank_schemes,
)
from headway.collective.nodes import Nodes
from headway.comm.algorithms.adasum import Adasum
from headway.comm.algorithms.hierarchical import HierarchicalAllReduce
from headway.comm.algorithms.method import (
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    Route,
    ScratchBuffers,
    complete,
)
from headway.comm.compress.factory import make_method
from headway.comm.compress.sparsification import HierarchicalTopK
from headway.comm.exchange.gradient_exchange import (
    ExchangeObserver,
    GradientExchange,
    StepExchange,
)
from headway.comm.exchange.priority_exchange import BucketUpdater, PriorityExchange
from headway.comm.lanes.all_reduce_program import all_reduce_program_chooser, check_same_programs
from headway.comm.lanes.bucket_lanes import InlineLane, MultiRoundLane, SingleRoundLane
from headway.comm.lanes.buckets import (
    Bucket,
    BucketNames,
    fuse_parameters,
    make_bucket,
)
from headway.comm.lanes.routes import RankPartition, RoutePool
from headway.comm.tuning.repacking import LinkMonitor, max_over_ranks
from headway.errors import PlanError
from headway.plans import ExchangePlan
from headway.plans.exchange_scheme import scheme_of


def make_exchange_method(
    description: ExchangePlan, compression: Compression, *, seed: int, scratch: ScratchBuffers
) -> ExchangeMethod:
    """The method of one bucket, for a legal exchange.

    Args:
        scratch: Shared by methods that run one after the other.
    """
    hierarchical = description.collective == "hierarchical"
    if description.reduce == "adasum":
        return Adasum(hierarchical=hierarchical, scratch=scratch)
    if not hierarchical:
        return make_method(compression, seed=seed)
    if not compression.elementwise:
        sampled = isinstance(compression, MsTopKCompression)
        return HierarchicalTopK(compression.amount, sampled=sampled, scratch=scratch)
    return HierarchicalAllReduce(make_method(compression, seed=seed), scratch=scratch)


# From the plan's description to a running exchange: buckets, methods, lane.


@dataclass(frozen=True)
class BucketKey:
    """What the parameters of one bucket have in common."""

    compression: Compression
    partition: RankPartition | None

    @staticmethod
    def of(name: str, description: ExchangePlan) -> BucketKey:
        part = description.part(name)
        text = part.compress if part and part.compress else description.compress
        return BucketKey(parse_compression(text), part.ranks if part else None)


def _bucket_keys(names: Iterable[str], description: ExchangePlan) -> dict[str, Hashable]:
    return {name: BucketKey.of(name, description) for name in names}


@dataclass(frozen=True)
class BucketArrangement:
    """What is found by measuring, the same on all ranks.

    Attributes:
        layout: Logical names per bucket; of a priority exchange in forward order.
        chunk_bytes: Size of chunks; None: buckets are sent whole.
        order: Indices of the chunks (bucket by bucket) in sending order; None: the last first.
        urgency: Bucket numbers, the most urgent first; None: in order of their number.
    """

    layout: BucketNames
    chunk_bytes: int | None = None
    order: tuple[int, ...] | None = None
    urgency: tuple[int, ...] | None = None


def initial_arrangement(
    parameters: Mapping[str, nn.Parameter], description: ExchangePlan
) -> BucketArrangement:
    """Before anything has been measured: registration stands for forward order."""
    keys = _bucket_keys(parameters, description)
    if not description.priority:
        layout = fuse_parameters(
            # Backward makes the last layer's gradients first.
            dict(reversed(list(parameters.items()))),
            keys,
            bucket_bytes=description.initial_bucket_bytes,
            first_bytes=FIRST_BUCKET,
        )
        return BucketArrangement(layout)
    chunk = description.initial_chunk_bytes
    return BucketArrangement(fuse_parameters(parameters, keys, bucket_bytes=chunk), chunk)


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    layout: BucketNames,
    description: ExchangePlan,
    routes: RoutePool,
    *,
    seed: int,
) -> tuple[Bucket, ...]:
    """The buckets of a layout; collective where routes have to be made."""
    kinds = [BucketKey.of(names[0], description) for names in layout]
    scratch = ScratchBuffers()
    methods = [
        make_exchange_method(description, kind.compression, seed=seed, scratch=scratch)
        for kind in kinds
    ]
    inline = is_inline(description, methods, kinds)
    found = []
    for number, (names, kind, method) in enumerate(zip(layout, kinds, methods, strict=True)):
        chosen = (
            # The training thread itself drives these, so that they may use the world's own group.
            (routes.own(),)
            if inline
            else routes.get(
                description.credit,
                kind.partition,
                hierarchical=description.collective == "hierarchical",
            )
        )
        bucket = make_bucket(number, names, parameters, method, chosen)
        if description.reduce == "mean":
            bucket.weight = routes.size / chosen[0].size
        _count_bytes(bucket, description, kind.compression, routes)
        found.append(bucket)
    return tuple(found)


def _count_bytes(
    bucket: Bucket, description: ExchangePlan, compression: Compression, routes: RoutePool
) -> None:
    """What this rank will send for the bucket, by the plan's own arithmetic."""
    route = bucket.routes[0]
    traffic = bucket_traffic(
        [piece.shape for piece in bucket.fused.pieces],
        route.nodes,
        reduce=description.reduce,
        collective=description.collective,
        compression=compression,
        carrier=description.carrier,
        element_bytes=bucket.fused.buffer.element_size(),
    )
    bucket.wire_bytes = round(traffic.by_rank(route.rank))
    bucket.open(0)  # renews the timing, which holds the bytes
    if routes.pace is not None:
        home = routes.nodes.inside(route.rank)
        # An emulated link slows down what leaves the node, and nothing else.
        leaving = (n for (a, b), n in traffic.sent.items() if a == route.rank and b not in home)
        bucket.shape_traffic(routes.pace, sum(leaving))


def is_inline(
    description: ExchangePlan, methods: list[ExchangeMethod], kinds: list[BucketKey]
) -> bool:
    """Whether the training thread itself can drive the exchange."""
    return (
        not description.priority
        and _has_one_round(description, methods)
        and all(kind.partition is None for kind in kinds)
    )


def _has_one_round(description: ExchangePlan, methods: list[ExchangeMethod]) -> bool:
    return description.collective != "hierarchical" and all(
        method.elementwise and not method.blocking for method in methods
    )


def make_exchange(
    parameters: Mapping[str, nn.Parameter],
    description: ExchangePlan,
    arrangement: BucketArrangement,
    routes: RoutePool,
    *,
    seed: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> GradientExchange:
    """Build one; collective.

    Args:
        parameters: Logical name -> parameter, in order of registration.
        model: With `optimizer`: the exchange crosses the step's border.
    """
    buckets = make_buckets(parameters, arrangement.layout, description, routes, seed=seed)
    methods = [bucket.method for bucket in buckets]
    kinds = [BucketKey.of(bucket.names[0], description) for bucket in buckets]
    inline = is_inline(description, methods, kinds)
    on_gpu = any(bucket.fused.buffer.is_cuda for bucket in buckets)
    if description.carried and not on_gpu:
        sizes = all_reduce_sizes(buckets, description, arrangement.chunk_bytes)
        check_same_programs(description, buckets[0].routes[0].size, sizes)
    if inline and not (description.carried and on_gpu):
        return StepExchange(buckets, InlineLane(buckets), overlap=description.overlap)
    if on_gpu:
        raise PlanError(
            "this exchange cannot run here",
            problems=["its thread and its programs handle gradients in host memory only, no GPU's"],
            fix="Leave out priority, ranks of parts, every collective but all_reduce, and "
            "compressors other than fp16 and bf16, or use --device cpu.",
        )
    sequence = _sending_order(buckets, description, arrangement)
    kind = SingleRoundLane if _has_one_round(description, methods) else MultiRoundLane
    threads = torch.get_num_threads()
    make_lane = partial(kind, buckets, sequence, credit=description.credit, threads=threads)
    if model is None or optimizer is None:
        return StepExchange(buckets, make_lane(), overlap=description.overlap)
    urgency = arrangement.urgency or tuple(range(len(buckets)))
    applier = BucketUpdater({number: place for place, number in enumerate(urgency)})
    lane = make_lane(landed=applier.landed, idle=applier.apply_one)
    return PriorityExchange(buckets, lane, applier, model=model, optimizer=optimizer)


def all_reduce_sizes(
    buckets: tuple[Bucket, ...], description: ExchangePlan, chunk_bytes: int | None
) -> list[tuple[int, int]]:
    """Elements, and bytes of an element as it travels, of all sums of a step."""
    return [
        (
            chunk.buffer.numel(),
            BucketKey.of(bucket.names[0], description).compression.wire_element_bytes(
                bucket.fused.buffer.element_size()
            ),
        )
        for bucket in buckets
        for chunk in bucket.chunks(chunk_bytes)
    ]


def _sending_order(
    buckets: tuple[Bucket, ...], description: ExchangePlan, arrangement: BucketArrangement
) -> list[tuple[int, FusedBuffer]]:
    """The chunks in sending order, each with the number of its bucket."""
    chunks = [
        (bucket.number, chunk)
        for bucket in buckets
        for chunk in bucket.chunks(arrangement.chunk_bytes)
    ]
    if arrangement.order is not None:
        return [chunks[index] for index in arrangement.order]
    # A priority layout is in forward order: the last layers' gradients come first.
    return chunks[::-1] if description.priority else chunks


# Measuring and re-arranging: bucket sizes and sending order from what was observed.


# The first steps that are measured; step 1 also pays for allocations.
PROFILED_STEPS = (2, 3)
REFIT_STEPS = 50
"""Least number of steps between two measurements of the link."""
# Largest share of the time that measuring may take: short steps are measured less often.
REFIT_SHARE = 0.005
_PROBE_BYTES = 1_048_576
_STREAM_SECONDS = 0.2
_LONGEST_STREAM = 16
_SMALL_PROBE_BYTES = 4_096
_SMALL_PROBES = 5
_MEDIUM_PROBE_BYTES = 262_144
_DRIFT_SHARE = 0.2


@dataclass(frozen=True)
class GradientTimings:
    """Seconds, the largest of all ranks, by logical name.

    Attributes:
        ready: When backward has made the gradient, after the start of the step.
        needed: When the forward pass first uses the parameter, after its start.
    """

    ready: Mapping[str, float]
    needed: Mapping[str, float]

    def drifted(self, other: GradientTimings) -> bool:
        """Whether the times of a step have changed by more than a fifth."""
        old, new = max(self.ready.values()), max(other.ready.values())
        return max(old, new) > (1 + _DRIFT_SHARE) * min(old, new)


class AdaptiveExchange:
    """The current exchange of a set of parameters, re-arranged when measuring shows something.

    Args:
        parameters: Logical name -> parameter, in order of registration; those that are trained.
        model: With `optimizer`, and `priority` in the description: steps are crossed.
        tell: Called with a sentence when the exchange has been re-arranged.
        doing: See `GradientExchange.doing`.

    Attributes:
        now: The current exchange.
        wanted: The plan's exchange, with the all-reduce program that is used now.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        description: ExchangePlan,
        routes: RoutePool,
        *,
        seed: int = 0,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        tell: Callable[[str], None] = lambda _: None,
        doing: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.parameters = dict(parameters)
        self.wanted = description
        automatic = description.compress == "auto"
        self._measures = automatic or description.bucket == "auto" or description.priority
        # "auto" sends everything until something has been measured.
        self.description = replace(description, compress="none") if automatic else description
        self._routes = routes
        self._seed = seed
        self._crossing = (model, optimizer) if description.priority else (None, None)
        self._tell = tell
        self._doing = doing
        self.link: LinkFit | None = None
        self._profile: GradientTimings | None = None
        self._speeds: dict[str, CompressorSpeed] = {}
        self._step = 0
        self._refit = REFIT_STEPS
        self._observer: ExchangeObserver | None = None
        self._arrangement = initial_arrangement(self.parameters, self.description)
        self._links = LinkMonitor.of(self.description, routes, tell, doing)
        if self.description.carried:
            # An earlier exchange may have repacked.
            routes.choose_by(all_reduce_program_chooser(self.description))
        self.now = self._make()

    @property
    def crossing(self) -> PriorityExchange | None:
        """The current exchange, where it crosses the step's border."""
        return self.now if isinstance(self.now, PriorityExchange) else None

    def _make(self) -> GradientExchange:
        model, optimizer = self._crossing
        made = make_exchange(
            self.parameters,
            self.description,
            self._arrangement,
            self._routes,
            seed=self._seed,
            model=model,
            optimizer=optimizer,
        )
        made.doing = self._doing
        made.observer = self._observer
        return made

    def observe(self, observer: ExchangeObserver) -> None:
        """Show all buckets to an observer, also after they have been re-arranged."""
        self._observer = self.now.observer = observer

    def rearrange(self, arrangement: BucketArrangement) -> None:
        """Take other buckets from the next step on; on all ranks, between two steps."""
        self.flush()
        self._arrangement = arrangement
        self._remake()

    def _remake(self) -> None:
        """Replace the current exchange by one for the present description and arrangement."""
        state = self.now.state()
        # First the old hooks come off, because a gradient belongs into one bucket only.
        self.now.close()
        self.now = self._make()
        self.now.restore(state)

    def begin(self) -> None:
        """A step begins; now and then the exchange is measured and re-arranged, on all ranks."""
        self._follow_links()
        if self._measures:
            if self._profiled(self._step):
                self.flush()
                if not self._profiled(self._step + 1):
                    self._measure()
            # After a flush the forward hooks note when each parameter is first used.
            if self._profiled(self._step + 1):
                self.flush()
                self.now.profile = {}
        self._step += 1
        self.now.begin()

    def _follow_links(self) -> None:
        """Measure the links now and then; where they have drifted, use another program."""
        if self._links is None or not self._links.step(self.now.buckets):
            return
        self.flush()
        sums = all_reduce_sizes(self.now.buckets, self.description, self._arrangement.chunk_bytes)
        sizes = [elements * width for elements, width in sums]
        found = self._links.follow(self.description, sizes, sums[0][1])
        if found is None:
            return
        collective, carrier = found.collective, found.carrier
        self.wanted = replace(self.wanted, collective=collective, carrier=carrier)
        self.description = found
        self._routes.choose_by(all_reduce_program_chooser(found))
        self._remake()

    def _profiled(self, step: int) -> bool:
        return step in PROFILED_STEPS or step == self._refit

    def flush(self) -> None:
        """Wait until all updates of earlier steps have been made."""
        if self.crossing is not None:
            self.crossing.flush()

    def _measure(self) -> None:
        """Measure, re-arrange, and schedule the next measurement so that its cost stays small."""
        start = perf_counter()
        profile = self._shared_profile()
        self._rearrange(profile)
        (took,) = max_over_ranks(perf_counter() - start, device=self._device)
        step = max(profile.ready.values())
        worth = took / (REFIT_SHARE * step) if step else 0.0
        self._refit = self._step + max(REFIT_STEPS, math.ceil(worth))

    def _rearrange(self, profile: GradientTimings) -> None:
        self.now.profile = None
        # A chosen program runs on groups of its own, which send otherwise than the world's.
        group = self._routes.own().group if self.description.carried else None
        link = probe_link(self._device, group)
        same = (
            self.link is not None
            and self._profile is not None
            and not link_drifted(self.link, link, _DRIFT_SHARE)
            and not self._profile.drifted(profile)
        )
        if same:
            return
        self.link, self._profile = link, profile
        before = self.description
        reason = self._choose(profile, link)
        decided = arrange_buckets(self.parameters, self.description, profile, link)
        # All ranks have the same numbers, but their math libraries may round differently.
        found: BucketArrangement = broadcast_facts(decided)
        if found == self._arrangement and before == self.description:
            return
        self._arrangement = found
        self._remake()
        self._tell(
            f"exchange re-arranged after step {self._step}: {len(found.layout)} buckets; "
            f"{link.explain()}{reason}"
        )

    def _choose(self, profile: GradientTimings, link: LinkFit) -> str:
        """Choose the compressor where the plan says "auto"; returns the reason for the message."""
        if self.wanted.compress != "auto":
            return ""
        self._speeds = self._speeds or measure_speeds(self._device)
        best = choose_compressor(
            self.parameters,
            self.wanted,
            profile.ready,
            link,
            self._routes.nodes,
            current=self.description.compress,
            speeds=self._speeds,
        )
        decided = broadcast_facts(best.scheme.compress)
        self.description = replace(self.wanted, compress=decided)
        return f"; compress = {decided}: {best.reason}"

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def _shared_profile(self) -> GradientTimings:
        """The slowest rank's times; a gradient that never came is ready at the very end."""
        ready = self.now.profile or {}
        end = max(ready.values(), default=0.0)
        crossing = self.crossing
        needed = crossing.waits.needed if crossing is not None else {}
        times = torch.tensor(
            [[ready.get(name, end), needed.get(name, 0.0)] for name in self.parameters],
            dtype=torch.float64,
            device=self._device,
        )
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        ready, needed = (
            dict(zip(self.parameters, column, strict=True)) for column in times.t().tolist()
        )
        return GradientTimings(ready, needed)

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint, by logical name."""
        return self.now.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` returned."""
        self.now.restore(state)

    def close(self) -> None:
        """Take all hooks off and end the lane."""
        self.now.close()


def arrange_buckets(
    parameters: Mapping[str, nn.Parameter],
    description: ExchangePlan,
    profile: GradientTimings,
    link: LinkFit,
) -> BucketArrangement:
    """Buckets, chunks and order for measured times."""
    names = list(parameters)
    sizes = [parameters[name].numel() * parameters[name].element_size() for name in names]
    ready = [profile.ready[name] for name in names]
    if not description.priority and description.bucket != "auto":
        return initial_arrangement(parameters, description)
    # Compressed gradients see a faster link, with more latency for each further round.
    link = compressed_link(
        ExchangeScheme(compression=description.compression or UNCOMPRESSED),
        [tuple(p.shape) for p in parameters.values()],
        ExchangeNetwork.flat(link),
        next(iter(parameters.values())).element_size(),
    )
    if not description.priority:
        keys = [BucketKey.of(name, description) for name in names]
        merged = split_by_key(merge_buckets(sizes, ready, link), keys)
        return BucketArrangement(tuple(tuple(names[i] for i in bucket) for bucket in merged))
    chunk = description.chunk_bytes or chunk_size(link, largest=max(sizes))
    # Larger buckets would be as fast in the model, but do not forgive a link that is slower.
    forward = {name: parameters[name] for name in sorted(names, key=profile.needed.__getitem__)}
    layout = fuse_parameters(forward, _bucket_keys(names, description), bucket_bytes=chunk)
    return _planned_chunk_order(parameters, layout, description, profile, link, chunk)


def _planned_chunk_order(
    parameters: Mapping[str, nn.Parameter],
    layout: tuple[tuple[str, ...], ...],
    description: ExchangePlan,
    profile: GradientTimings,
    link: LinkFit,
    chunk: int,
) -> BucketArrangement:
    loads = []
    for number, bucket in enumerate(layout):
        size = sum(parameters[n].numel() * parameters[n].element_size() for n in bucket)
        whole = not BucketKey.of(bucket[0], description).compression.elementwise
        loads += [
            LinkLoad(
                name=number,
                num_bytes=stop - start,
                ready=max(profile.ready[name] for name in bucket),
                needed=min(profile.needed[name] for name in bucket),
            )
            for start, stop in (((0, size),) if whole else chunk_spans(size, chunk))
        ]
    order = planned_order(loads, link, credit=description.credit)
    urgency = sorted(
        range(len(layout)), key=lambda n: (min(profile.needed[name] for name in layout[n]), n)
    )
    return BucketArrangement(layout, chunk, order, tuple(urgency))


# `compress = "auto"`: measures compressors and chooses the fastest on the measured link.


# The matrix has 4 MiB: what a call costs beside its work is lost in it.
_SIDE = 1024
_ROUNDS = 3


def measure_speeds(device: torch.device) -> dict[str, CompressorSpeed]:
    """Speeds of all compressors; measures the candidates, in about 0.1 s. Collective.

    One number is measured; how it divides between encoding and decoding is taken from typical
    figures. All ranks use the speeds of the slowest.
    """
    route = _single_rank_route(device)
    measured = [
        candidate
        for candidate in CANDIDATE_COMPRESSORS
        if candidate.name in TYPICAL_COMPRESSOR_SPEEDS
    ]
    slowdowns = (_slowdown(candidate, route, device) for candidate in measured)
    factors = max_over_ranks(*slowdowns, device=device)
    slowest: dict[str, float] = {}
    for candidate, factor in zip(measured, factors, strict=True):
        slowest[candidate.name] = max(slowest.get(candidate.name, 0.0), factor)
    return TYPICAL_COMPRESSOR_SPEEDS | {
        name: CompressorSpeed(
            TYPICAL_COMPRESSOR_SPEEDS[name].encode * factor,
            TYPICAL_COMPRESSOR_SPEEDS[name].decode * factor,
        )
        for name, factor in slowest.items()
    }


def _slowdown(compression: Compression, route: Route, device: torch.device) -> float:
    """How many times slower this machine is than the typical one."""
    method = make_method(compression, seed=0)
    buffer = torch.randn(_SIDE * _SIDE + 1, device=device)
    buffer[-1] = 1.0
    fused = FusedBuffer(buffer, (GradientSlice("probe", 0, _SIDE * _SIDE, (_SIDE, _SIDE)),))
    # Not timed: the first exchange of a layout allocates.
    complete(method, fused, route)
    times = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        complete(method, fused, route)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    typical = TYPICAL_COMPRESSOR_SPEEDS[compression.name]
    # The shortest, because other programs only ever add to a time.
    return min(times) / (fused.gradients.nbytes * (typical.encode + typical.decode))


def _single_rank_route(device: torch.device) -> Route:
    rank = dist.get_rank()
    with drop_later_connections():
        group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return Route((rank,), rank, group, Nodes(((rank,),)))


def choose_compressor(
    parameters: Mapping[str, nn.Parameter],
    description: ExchangePlan,
    ready: Mapping[str, float],
    link: LinkFit,
    nodes: Nodes,
    *,
    current: str,
    speeds: Mapping[str, CompressorSpeed],
) -> SchemeChoice:
    """The best candidate; of the plan's exchange only the compressor changes.

    Args:
        parameters: Logical name -> parameter, in order of registration.
        ready: Seconds after the start of a step at which each gradient is there.
        current: The compressor that is used now.
    """
    # Gradients that error feedback has kept back are only sent by a compressor that has it, too.
    candidates = [
        candidate
        for candidate in CANDIDATE_COMPRESSORS
        if candidate.feedback or not parse_compression(current).feedback
    ]
    return rank_schemes(
        _measured_layers(parameters, description, ready),
        ExchangeNetwork(link, nodes),
        base=scheme_of(description),
        candidates=candidates,
        speeds=speeds,
    )[0]


def _measured_layers(
    parameters: Mapping[str, nn.Parameter], description: ExchangePlan, ready: Mapping[str, float]
) -> list[GradientLayer]:
    """One layer per parameter; what passes before the first gradient is the forward pass."""
    forward = min(ready.values()) / len(parameters)
    clock, backward = min(ready.values()), dict.fromkeys(parameters, 0.0)
    for name in sorted(ready, key=ready.__getitem__):
        backward[name], clock = ready[name] - clock, ready[name]
    layers = []
    for name, parameter in parameters.items():
        part = description.part(name)
        layers.append(
            GradientLayer(
                name=name,
                shapes=(tuple(parameter.shape),),
                forward=forward,
                backward=backward[name],
                element_bytes=parameter.element_size(),
                compression=parse_compression(part.compress) if part and part.compress else None,
            )
        )
    return layers


# The link: a stream of all-reduces for its rate, small ones for its latency.


def probe_link(device: torch.device, group: dist.ProcessGroup | None = None) -> LinkFit:
    """Measure all-reduces over a group, by default the world's; collective, called by the training
    thread."""
    # The rate is that of a stream of pieces, several in flight: shaped links (clouds have them,
    # too) let a burst pass faster, which a step's traffic uses up in its first moments.
    first = _seconds(1, _PROBE_BYTES, device, group)
    count = min(max(round(_STREAM_SECONDS / first), 2), _LONGEST_STREAM)
    per_byte = _seconds(count, _PROBE_BYTES, device, group) / (count * _PROBE_BYTES)
    middle = min(_seconds(1, _MEDIUM_PROBE_BYTES, device, group) for _ in range(3))
    small = min(_seconds(1, _SMALL_PROBE_BYTES, device, group) for _ in range(_SMALL_PROBES))
    latency = max(small - per_byte * _SMALL_PROBE_BYTES, 0.0)
    # Slower than the fit means unsteady; faster is the burst of a shaped link, which is no error.
    error = max(middle / (latency + per_byte * _MEDIUM_PROBE_BYTES) - 1, 0.0)
    return LinkFit(latency, per_byte, error, dist.get_world_size())


def _seconds(
    count: int, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """The time of `count` simultaneous all-reduces, on the slowest rank."""
    buffers = [torch.zeros(num_bytes // 4, device=device) for _ in range(count)]
    start = perf_counter()
    works = [dist.all_reduce(buffer, async_op=True, group=group) for buffer in buffers]
    for work in works:
        assert work is not None
        work.wait()
    (took,) = max_over_ranks(perf_counter() - start, device=device)
    return took
