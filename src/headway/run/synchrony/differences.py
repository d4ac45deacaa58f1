"""Compressed meetings: what of a worker has changed since the last one, with error feedback.

The mean of all models is the last common model less the mean of the differences to it. These are
small and much alike, so that they bear what gradients bear: they pass through the buckets, methods
and lanes of the gradient exchange, and what a compressor keeps back of a difference is added to
that of the next meeting. Of a worker with several copies of the model the first one exchanges and
tells the others: copies that round for themselves would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.channel.facts import broadcast_facts
from headway.comm.compress.state import STATE_PREFIX, collect_state, distribute_state
from headway.comm.exchange.gradient_exchange import ExchangeObserver, GradientExchange
from headway.comm.lanes.routes import RoutePool
from headway.comm.tuning.autotuning import initial_arrangement, make_exchange
from headway.plans import ExchangePlan, Plan
from headway.run.distributed.process_groups import exchange_pool
from headway.run.distributed.world import World
from headway.run.synchrony.bundle import Bundle


class DifferenceExchange:
    """The sum of all workers' differences, compressed; the constructor is collective.

    Args:
        named: The model's parameters by logical name: of their forms the differences are.
        inside: The group of this worker's ranks; None: it is the only one.

    Attributes:
        description: How differences are exchanged, as of gradients.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        named: Mapping[str, nn.Parameter],
        inside: dist.ProcessGroup | None,
        seed: int,
    ) -> None:
        self.description = ExchangePlan(compress=plan.synchrony.compress)
        self._workers = plan.workers
        inner = plan.ranks // plan.workers
        places = [tuple(range(place, plan.ranks, inner)) for place in range(inner)]
        self._inside, self._first = inside, world.rank - world.rank % inner
        self._exchanges = world.rank == self._first
        # Leaves of their own, on the same memory: backward never reaches them, nor their hooks.
        self._named = {name: nn.Parameter(p.detach()) for name, p in named.items()}
        self._routes: RoutePool = exchange_pool(world, tuple(places))
        self._exchange: GradientExchange = make_exchange(
            self._named,
            self.description,
            initial_arrangement(self._named, self.description),
            self._routes,
            seed=seed,
        )

    def observe(self, observer: ExchangeObserver) -> None:
        """Show all buckets to an observer."""
        self._exchange.observer = observer

    def start(self, difference: Bundle) -> Callable[[], Bundle]:
        """Send this worker's difference; what is returned waits for the sum."""
        if not self._exchanges:
            return lambda: self._told(difference)
        parts = dict(zip(self._named, difference.parts([*self._named.values()]), strict=True))
        self._exchange.begin()
        for bucket in self._exchange.buckets:
            for index, (name, view) in enumerate(zip(bucket.names, bucket.views, strict=True)):
                view.copy_(parts[name])
                bucket.parameters[index].grad = view
                bucket.arrived[index] = True
        self._exchange.send()
        return self._sum

    def _sum(self) -> Bundle:
        self._exchange.receive()
        views = {
            name: view
            for bucket in self._exchange.buckets
            for name, view in zip(bucket.names, bucket.views, strict=True)
        }
        return self._told(Bundle.of([views[name] for name in self._named]))

    def _told(self, total: Bundle) -> Bundle:
        """The first copy's sum, on all copies of the worker."""
        if self._inside is not None:
            for tensor in total.flat:
                dist.broadcast(tensor, self._first, group=self._inside)
        return total

    def state(self, across: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """What all workers keep back, for a checkpoint, equal on all ranks; collective.

        Args:
            across: The ranks at this one's place in each worker.
        """
        found: dict[str, Tensor] = {}
        if self._exchanges:
            kept = collect_state(self._exchange.state(), self._named, across)
            # Under names of their own: what is kept of gradients is no difference.
            found = {f"{_PREFIX}{key.removeprefix(STATE_PREFIX)}": t for key, t in kept.items()}
        if self._inside is None:
            return found
        forms = {name: (tuple(t.shape), t.dtype) for name, t in found.items()}
        for name, (shape, dtype) in broadcast_facts(forms, self._first, self._inside).items():
            tensor = found.setdefault(name, torch.empty(shape, dtype=dtype))
            dist.broadcast(tensor, self._first, group=self._inside)
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` has given; each worker has an even share of the residuals."""
        if not self._exchanges:
            return
        start, workers = _PREFIX.removeprefix(STATE_PREFIX), self._workers
        self._exchange.restore(
            {
                key.removeprefix(start): value
                for key, value in distribute_state(state, workers).items()
                if key.startswith(start)
            }
        )

    def close(self) -> None:
        """End the lane's thread."""
        self._exchange.close()
        self._routes.rest()


_PREFIX = f"{STATE_PREFIX}difference/"
