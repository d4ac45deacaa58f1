"""Measuring and re-arranging: bucket sizes and sending order from what was observed.

In a few steps the times are noted at which gradients become ready and parameters are first used;
the link is measured by small all-reduces; from both, the same on all ranks, `collective` finds
buckets (MG-WFBP) or chunks and their planned order. It is done again now and then, because links
change. Invariant: all ranks measure in the same steps and use the slowest rank's times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.collective.chunks import cut
from headway.collective.fusion import merge_buckets
from headway.collective.link import LinkFit, drifted
from headway.collective.order import Load, chunk_size, planned_order
from headway.collective.predict import Scheme
from headway.collective.service import Network, Speed, seen_link
from headway.comm.buckets import fuse
from headway.comm.carried import chooser
from headway.comm.choose import choose_compressor
from headway.comm.crossing import CrossingExchange
from headway.comm.exchange import GradientExchange
from headway.comm.repack import LinkWatch
from headway.comm.routes import Routes
from headway.comm.setup import (
    ELEMENTWISE,
    Arrangement,
    Key,
    first_arrangement,
    make_exchange,
    respect_keys,
    sums_of,
)
from headway.comm.speeds import measure_speeds
from headway.plan import Exchange

PROFILED_STEPS = (2, 3)
"""The first steps that are measured; the very first one pays for allocations."""
REFIT_STEPS = 50
"""Least number of steps between two measurements of the link."""
REFIT_SHARE = 0.005
"""Largest share of the time that measuring may take: short steps are measured less often."""
_PIECE = 1_048_576
_STREAM_SECONDS = 0.2
_LONGEST_STREAM = 16
_SMALL = 4_096
_SMALL_PROBES = 5
_MIDDLE = 262_144
_DRIFT = 0.2


@dataclass(frozen=True)
class Profile:
    """Seconds, the largest of all ranks, by logical name.

    Attributes:
        ready: When backward has made the gradient, after the start of the step.
        needed: When the forward pass first uses the parameter, after its start.
    """

    ready: Mapping[str, float]
    needed: Mapping[str, float]

    def drifted(self, other: Profile) -> bool:
        """Whether the times of a step have changed by more than a fifth."""
        old, new = max(self.ready.values()), max(other.ready.values())
        return max(old, new) > (1 + _DRIFT) * min(old, new)


class AdaptiveExchange:
    """The current exchange of a set of parameters, re-arranged when measuring shows something.

    Args:
        parameters: Logical name -> parameter, in order of registration; those that are trained.
        description: The plan's.
        routes: Of this process.
        seed: Of random compressors.
        model: With `optimizer`, and `priority` in the description: steps are crossed.
        optimizer: Whose steps the exchange makes.
        tell: Called with a sentence when the exchange has been re-arranged.
        doing: See `GradientExchange.doing`.

    Attributes:
        now: The current exchange.
        on_made: Called with a new exchange when it takes the place of the current one.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        description: Exchange,
        routes: Routes,
        *,
        seed: int = 0,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        tell: Callable[[str], None] = lambda _: None,
        doing: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.parameters = dict(parameters)
        self._wanted = description
        automatic = description.compress == "auto"
        self.description = replace(description, compress="none") if automatic else description
        self._routes = routes
        self._seed = seed
        self._crossing = (model, optimizer) if description.priority else (None, None)
        self._tell = tell
        self._doing = doing
        self.link: LinkFit | None = None
        self._profile: Profile | None = None
        self._speeds: dict[str, Speed] = {}
        self._step = 0
        self._refit = REFIT_STEPS
        self.on_made: Callable[[GradientExchange], None] = lambda _: None
        self._arrangement = first_arrangement(self.parameters, self.description)
        self._links = LinkWatch.of(self.description, routes, tell, doing)
        if self.description.carried:
            routes.choose_by(chooser(self.description))  # an earlier exchange may have re-packed
        self.now = self._make()

    @property
    def crossing(self) -> CrossingExchange | None:
        """The current exchange, where it crosses the step's border."""
        return self.now if isinstance(self.now, CrossingExchange) else None

    @property
    def wanted(self) -> Exchange:
        """What was asked for, with the program of now."""
        return self._wanted

    @property
    def measures(self) -> bool:
        """Whether anything is left to be found by measuring."""
        wanted = self._wanted
        return wanted.bucket == "auto" or wanted.priority or wanted.compress == "auto"

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
        self.on_made(made)
        return made

    def _remake(self) -> None:
        """Put a new exchange, as it is described now, in the place of the current one."""
        state = self.now.state()
        self.now.close()
        self.now = self._make()
        self.now.restore(state)

    def begin(self) -> None:
        """A step begins; now and then the exchange is measured and re-arranged, on all ranks."""
        self._follow_links()
        if self.measures:
            if self._profiled(self._step):
                self.flush()
                if not self._profiled(self._step + 1):
                    self._measure()
            if self._profiled(self._step + 1):
                self.flush()
                self.now.profile = {}
        self._step += 1
        self.now.begin()

    def _follow_links(self) -> None:
        """Find out, now and then, whether links have drifted; carry the sums otherwise then."""
        if self._links is None or not self._links.step(self.now.buckets):
            return
        self.flush()
        sums = sums_of(self.now.buckets, self.description, self._arrangement.chunk_bytes)
        sizes = [elements * width for elements, width in sums]
        found = self._links.follow(self.description, sizes, sums[0][1])
        if found is None:
            return
        collective, carrier = found.collective, found.carrier
        self._wanted = replace(self._wanted, collective=collective, carrier=carrier)
        self.description = found
        self._routes.choose_by(chooser(found))
        self._remake()

    def _profiled(self, step: int) -> bool:
        return step in PROFILED_STEPS or step == self._refit

    def flush(self) -> None:
        """Wait until all updates of earlier steps have been made."""
        if self.crossing is not None:
            self.crossing.flush()

    def _measure(self) -> None:
        """Re-arrange what has changed; the next time is far enough away to be worth this one."""
        start = perf_counter()
        profile = self._shared_profile()
        self._rearrange(profile)
        took = torch.tensor([perf_counter() - start], dtype=torch.float64, device=self._device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        step = max(profile.ready.values())
        worth = float(took) / (REFIT_SHARE * step) if step else 0.0
        self._refit = self._step + max(REFIT_STEPS, math.ceil(worth))

    def _rearrange(self, profile: Profile) -> None:
        self.now.profile = None
        carried = self.description.carried  # by groups that send otherwise than the world's
        link = probe_link(self._device, self._routes.own().group if carried else None)
        same = (
            self.link is not None
            and self._profile is not None
            and not drifted(self.link, link, _DRIFT)
            and not self._profile.drifted(profile)
        )
        if same:
            return
        self.link, self._profile = link, profile
        before = self.description
        reason = self._choose(profile, link)
        decided = [arrange(self.parameters, self.description, profile, link)]
        dist.broadcast_object_list(decided, src=0)  # numbers are alike; libraries may not be
        (found,) = decided
        if found == self._arrangement and before == self.description:
            return
        self._arrangement = found
        self._remake()
        self._tell(
            f"exchange re-arranged after step {self._step}: {len(found.layout)} buckets; "
            f"{link.explain()}{reason}"
        )

    def _choose(self, profile: Profile, link: LinkFit) -> str:
        """Choose the compressor, if that was wanted; returns what is to be said about it."""
        if self._wanted.compress != "auto":
            return ""
        self._speeds = self._speeds or measure_speeds(self._device)
        best = choose_compressor(
            self.parameters,
            self._wanted,
            profile.ready,
            link,
            self._routes.nodes,
            current=self.description.compress,
            speeds=self._speeds,
        )
        decided = [best.scheme.compress]
        dist.broadcast_object_list(decided, src=0)
        self.description = replace(self._wanted, compress=decided[0])
        return f"; compress = {decided[0]}: {best.reason}"

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def _shared_profile(self) -> Profile:
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
        rows = times.tolist()
        names = list(self.parameters)
        return Profile(
            {name: row[0] for name, row in zip(names, rows, strict=True)},
            {name: row[1] for name, row in zip(names, rows, strict=True)},
        )

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint, by logical name."""
        return self.now.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` returned."""
        self.now.restore(state)

    def close(self) -> None:
        """Take all hooks off and end the lane."""
        self.now.close()


def arrange(
    parameters: Mapping[str, nn.Parameter],
    description: Exchange,
    profile: Profile,
    link: LinkFit,
) -> Arrangement:
    """Buckets, chunks and order for measured times."""
    names = list(parameters)
    sizes = [parameters[name].numel() * parameters[name].element_size() for name in names]
    ready = [profile.ready[name] for name in names]
    if not description.priority and description.bucket != "auto":
        return first_arrangement(parameters, description)
    # Compressed gradients see a faster link, with more latency for each further round.
    link = seen_link(
        Scheme(
            compressor=description.compression.name if description.compression else "none",
            amount=description.compression.amount if description.compression else 0.0,
        ),
        [tuple(p.shape) for p in parameters.values()],
        Network.flat(link),
        next(iter(parameters.values())).element_size(),
    )
    if not description.priority:
        merged = merge_buckets(sizes, ready, link)
        layout = tuple(tuple(names[i] for i in bucket) for bucket in merged)
        return Arrangement(respect_keys(layout, description))
    chunk = description.chunk_bytes or chunk_size(link, largest=max(sizes))
    # Larger buckets would be as fast in the model, but do not forgive a link that is slower.
    forward = {name: parameters[name] for name in sorted(names, key=profile.needed.__getitem__)}
    keys: dict[str, Hashable] = {name: Key.of(name, description) for name in names}
    layout = fuse(forward, keys, bucket_bytes=chunk)
    return _ordered(parameters, layout, description, profile, link, chunk)


def _ordered(
    parameters: Mapping[str, nn.Parameter],
    layout: tuple[tuple[str, ...], ...],
    description: Exchange,
    profile: Profile,
    link: LinkFit,
    chunk: int,
) -> Arrangement:
    """Chunks in their planned order."""
    loads = []
    for number, bucket in enumerate(layout):
        size = sum(parameters[n].numel() * parameters[n].element_size() for n in bucket)
        whole = Key.of(bucket[0], description).compression.name not in ELEMENTWISE
        loads += [
            Load(
                name=number,
                num_bytes=stop - start,
                ready=max(profile.ready[name] for name in bucket),
                needed=min(profile.needed[name] for name in bucket),
            )
            for start, stop in (((0, size),) if whole else cut(size, chunk))
        ]
    order = planned_order(loads, link, credit=description.credit)
    urgency = sorted(
        range(len(layout)), key=lambda n: (min(profile.needed[name] for name in layout[n]), n)
    )
    return Arrangement(layout, chunk, order, tuple(urgency))


def probe_link(device: torch.device, group: dist.ProcessGroup | None = None) -> LinkFit:
    """Measure all-reduces over a group, by default the world's; collective, called by the training
    thread.

    The rate is that of a stream of pieces, several in flight: shaped links (clouds have them, too)
    let a burst pass faster, which a step's traffic uses up in its first moments.
    """
    first = _seconds(1, _PIECE, device, group)
    count = min(max(round(_STREAM_SECONDS / first), 2), _LONGEST_STREAM)
    per_byte = _seconds(count, _PIECE, device, group) / (count * _PIECE)
    middle = min(_seconds(1, _MIDDLE, device, group) for _ in range(3))
    small = min(_seconds(1, _SMALL, device, group) for _ in range(_SMALL_PROBES))
    latency = max(small - per_byte * _SMALL, 0.0)
    # Slower than the fit: unsteady. Faster: the burst of a shaped link, which is as it should be.
    error = max(middle / (latency + per_byte * _MIDDLE) - 1, 0.0)
    return LinkFit(latency, per_byte, error, dist.get_world_size())


def _seconds(
    count: int, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Of `count` all-reduces at once, on the slowest rank."""
    buffers = [torch.zeros(num_bytes // 4, device=device) for _ in range(count)]
    start = perf_counter()
    works = [dist.all_reduce(buffer, async_op=True, group=group) for buffer in buffers]
    for work in works:
        assert work is not None
        work.wait()
    took = torch.tensor([perf_counter() - start], dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)
