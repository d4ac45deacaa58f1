"""Reducers: who sums the gradients of a step over the ranks.

`BucketReducer` sums them in buckets. `LocalReducer` takes what backward has left: summed by FSDP2,
by the table of a pipeline over the copies of its stages (SYNC), or of one rank alone.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from headway.comm.lanes.buckets import BucketTiming
from headway.comm.lanes.routes import RoutePool
from headway.comm.tuning.autotuning import AdaptiveExchange
from headway.parallel.fsdp import ShardedState
from headway.plans import ExchangePlan
from headway.plans.plan import Zero

if TYPE_CHECKING:
    from headway.run.strategy.step_context import StepContext


class Reducer(ABC):
    """Sums gradients over the ranks; one method for each instruction that it takes part in.

    Attributes:
        exchange: The exchange of buckets; None where gradients are summed otherwise.
    """

    exchange: AdaptiveExchange | None = None

    @abstractmethod
    def follow(self, sources: Mapping[str, nn.Parameter]) -> None:
        """Parameters have been frozen or thawed.

        Args:
            sources: Logical name -> where backward leaves the gradient.
        """

    @abstractmethod
    def calling(self) -> AbstractContextManager[None]:
        """Around every call of the loss."""

    @abstractmethod
    def begin(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        """A step begins: forget the last one's gradients.

        Args:
            factor: This rank's gradients are multiplied by it before they are summed.
        """

    @abstractmethod
    def arm(self) -> None:
        """Gradients of the next backward pass may be sent."""

    @abstractmethod
    def send(self) -> None:
        """Send all gradients that have not been sent."""

    @abstractmethod
    def receive(self) -> Sequence[BucketTiming]:
        """Wait for the sums."""

    @abstractmethod
    def scale(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        """Multiply the sums."""

    @abstractmethod
    def close(self) -> None:
        """Finish the exchange in progress and remove the hooks from the model."""


class LocalReducer(Reducer):
    """Gradients stay where backward has left them; FSDP2, if there is any, has summed them there.

    Without FSDP2 there is nothing to sum (one rank), or the pipeline's table does it (SYNC).

    Args:
        weight: Of the gradients of what is not sharded.
        gradient_copies: Ranks that contribute the gradient of the same sample to a sum.
    """

    def __init__(
        self, context: StepContext, zero: Zero = 0, *, weight: float = 1.0, gradient_copies: int = 1
    ) -> None:
        self._context = context
        self._zero = zero
        self._weight = weight
        self._gradient_copies = gradient_copies
        self._state: ShardedState | None = None

    def shard(self, model: nn.Module, optimizer: Optimizer | None, mesh: DeviceMesh) -> None:
        """Shard the model in place; collective.

        Args:
            optimizer: None: it gets the sharded parameters from the caller.
        """
        assert self._zero
        self._state = ShardedState(
            model, optimizer, mesh, self._zero, counted=self._gradient_copies
        )

    def follow(self, sources: Mapping[str, nn.Parameter]) -> None:
        pass  # nothing is registered per parameter

    def calling(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._state is None else self._state.called()

    def begin(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        for parameter in trained:
            # None and not zero: an unused parameter must have no gradient, as in the serial run.
            parameter.grad = None
        if self._state is not None:
            self._state.begin()

    def arm(self) -> None:
        if self._state is not None:
            self._state.arm()

    def send(self) -> None:
        pass  # backward has sent what there is to send

    def receive(self) -> Sequence[BucketTiming]:
        if self._state is not None:
            with self._context.exchanging():
                self._state.sum_whole(self._weight)
        return ()

    def scale(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def close(self) -> None:
        pass


class BucketReducer(Reducer):
    """Gradients are summed in buckets, as the plan's exchange says.

    Args:
        crossing: Model and optimiser, where steps cross their border (priority).
    """

    def __init__(
        self,
        context: StepContext,
        routes: RoutePool,
        description: ExchangePlan,
        *,
        seed: int,
        crossing: tuple[nn.Module, Optimizer] | None,
    ) -> None:
        self._context = context
        self._routes = routes
        self._description = description
        self._seed = seed
        self._crossing = crossing
        context.waiting = self._waiting

    def _waiting(self) -> Sequence[str]:
        return () if self.exchange is None else tuple(self.exchange.now.waiting())

    def follow(self, sources: Mapping[str, nn.Parameter]) -> None:
        state, wanted = {}, self._description
        if self.exchange is not None:
            with self._context.exchanging():
                self.exchange.flush()
            # Residuals of compressors go on by name; so does a program found by measuring.
            state, wanted = self.exchange.state(), self.exchange.wanted
            self.exchange.close()
            self.exchange = None
        if not sources:
            return
        model, optimizer = self._crossing or (None, None)
        self.exchange = AdaptiveExchange(
            sources,
            wanted,
            self._routes,
            seed=self._seed,
            model=model,
            optimizer=optimizer,
            tell=self._context.remarks.append,
            doing=self._context.wait_for,
        )
        self.exchange.restore(state)

    def calling(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        if self.exchange is not None:
            with self._context.exchanging():
                self.exchange.begin()
            # Updates are exchanged as they are: `Strategy.propose` has applied the factor before.
            self.exchange.now.factor = 1.0 if self._description.values == "updates" else factor

    def arm(self) -> None:
        if self.exchange is not None:
            self.exchange.now.arm()

    def send(self) -> None:
        if self.exchange is not None:
            with self._context.exchanging():
                self.exchange.now.send()

    def receive(self) -> Sequence[BucketTiming]:
        if self.exchange is None:
            return ()
        with self._context.exchanging():
            flights = self.exchange.now.receive()
        self.exchange.now.settle()
        return flights

    def scale(self, factor: float, trained: Collection[nn.Parameter]) -> None:
        if self.exchange is not None:
            self.exchange.now.scale(factor)

    def close(self) -> None:
        self.follow({})
        self._routes.rest()
