"""A strategy: from backward's gradients to updated parameters.

A strategy has a reducer (who sums gradients), parameters (what a rank holds of them) and an updater
(when the optimiser steps). It has one method for each instruction of a step program that follows
the forward passes. A new way to split a model is a new value of one of the three; see `select`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headway.comm.compress.state import collect_state, distribute_state
from headway.comm.exchange.gradient_exchange import DeltaUpdate, GradientExchange
from headway.comm.tuning.autotuning import AdaptiveExchange
from headway.data import RankBatch
from headway.errors import Diverged
from headway.run.step.randomness import RandomDraws
from headway.run.step.record import StepRecord
from headway.run.strategy.parameters import HeldParameters, Numbers
from headway.run.strategy.reducer import Reducer
from headway.run.strategy.step_context import StepContext, StepReduction, TrainingSetup
from headway.run.strategy.training_state import TrainingState
from headway.run.strategy.updater import Updater

if TYPE_CHECKING:
    from headway.run.pipeline.step import PipelineRunner


class Strategy:
    """Of one rank, for as long as an executor lives.

    Args:
        divide: Splits or cuts the model by the first batch; returns the random draws of the whole
            model if it has looked for them. None: the model stays as it is.

    Attributes:
        pipeline: Runs all micro-batches; None: the model is not cut, the executor does.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        context: StepContext,
        *,
        parameters: HeldParameters,
        reducer: Reducer,
        updater: Updater,
        pipeline: PipelineRunner | None = None,
        divide: Callable[[RankBatch | None], RandomDraws | None] | None = None,
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        self.updater = updater
        self.pipeline = pipeline
        self._setup = setup
        self._context = context
        self._divide = divide
        self._trained: Mapping[str, nn.Parameter] = {}
        self._deltas = (
            DeltaUpdate(setup.optimizer) if setup.plan.exchange.values == "updates" else None
        )
        self._tally: StepReduction | None = None
        self._counts = setup.plan.counts(context.world.rank)

    @property
    def exchange(self) -> AdaptiveExchange | None:
        """None where gradients are not summed in buckets, or nothing is trained."""
        return self.reducer.exchange

    @property
    def crosses(self) -> bool:
        """Whether steps cross their border: the exchange makes the update (priority)."""
        return self.exchange is not None and self.exchange.crossing is not None

    @property
    def remarks(self) -> list[str]:
        """Sentences for the journal: what has been re-arranged."""
        return self._context.remarks

    @property
    def exchanging(self) -> Callable[[], AbstractContextManager[None]]:
        """See `StepContext.exchanging`."""
        return self._context.exchanging

    # -- between steps ---------------------------------------------------------------------------

    def prepare(self, batch: RankBatch | None) -> RandomDraws | None:
        """Split or cut the model by its first batch; collective. Nothing at later batches.

        Args:
            batch: Only that of rank 0 is looked at, and of those that share its samples.

        Returns:
            The random draws of the whole model, where this has looked for them.

        Raises:
            PlanError: The model cannot be split so.
        """
        if self._divide is None:
            return None
        draws = self._divide(batch)
        self._divide = None
        self.follow()
        return draws

    def follow(self) -> None:
        """Exchange the gradients of what is trained now; some may have been frozen or thawed."""
        self.parameters.follow()
        trained = {name: p for name, p in self.parameters.named.items() if p.requires_grad}
        known = self._trained
        if trained.keys() == known.keys() and all(p is known[n] for n, p in trained.items()):
            return
        self._trained = trained
        sources = self.parameters.sources
        self.reducer.follow({name: sources[name] for name in trained})

    def flush(self) -> None:
        """Wait until every update has been made; needed before parameters are read elsewhere."""
        if self.exchange is not None:
            with self.exchanging():
                self.exchange.flush()

    def make_whole(self) -> None:
        """Put the whole model on rank 0, until `parameters.let_go`; collective."""
        self.flush()
        self.parameters.make_whole()

    def numbers(self) -> Numbers:
        """What a step has left, complete on rank 0: see `TrainingState.numbers`; collective."""
        setup, layout = self._setup, self.parameters.layers
        trained = TrainingState(setup.model, setup.optimizer, setup.scheduler, layout=layout)
        return self.parameters.complete(trained.numbers())

    def close(self) -> None:
        """Finish what is under way; take the hooks off the model."""
        self.flush()
        self.reducer.close()
        self._trained = {}
        self.parameters.close()

    def tensors(self) -> dict[str, Tensor]:
        """What compressors have kept back, for a checkpoint; collective."""
        if self.exchange is None or self._setup.plan.exchange.exact:
            return {}
        with self.exchanging():
            return collect_state(self.exchange.state(), self._trained)

    def take_up(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with what `tensors` returned, among other tensors of a checkpoint."""
        state = distribute_state(saved, self._context.world.ranks)
        if not state:
            return
        if self.exchange is None or self._setup.plan.exchange.exact:
            self.remarks.append(
                "the checkpoint holds gradients that a compressor had kept back; this exchange "
                "has no compressor, so they are lost"
            )
        else:
            self.exchange.restore(state)

    # -- the instructions ------------------------------------------------------------------------

    def begin(self, record: StepRecord, samples: int, doing: str) -> None:
        """A step begins: forget the last one's gradients.

        Args:
            record: Is filled; its `samples` are those of the global batch.
            samples: Of this rank.
            doing: "step 12".
        """
        context = self._context
        context.record, context.samples, context.doing = record, samples, doing
        self.follow()
        self.reducer.begin(self._factor(), self._trained.values())
        self.parameters.clear()

    def tally(
        self, shares: Sequence[Tensor], counts: Sequence[Tensor | float], *, vote: bool
    ) -> None:
        """Start to sum over the ranks: loss, count, votes to stop."""
        with self.exchanging():
            self._tally = StepReduction(
                shares if self._counts else (),
                counts if self._counts else (),
                vote=vote,
                device=self._context.world.device,
                together=self._context.world.ranks > 1,
            )

    def arm(self) -> None:
        """Gradients of the next backward pass may leave."""
        self.reducer.arm()

    def send(self) -> None:
        """Hand over all gradients that have not left."""
        self.reducer.send()

    def receive(self) -> None:
        """Wait for the sums."""
        self._context.record.flights.extend(self.reducer.receive())

    def scale(self) -> None:
        """Refuse a loss that is not finite; divide by the global count where it is not N."""
        factor = self._read_tally()
        # Parts of split layers get their gradients here: a pipeline has no instruction "receive".
        self.parameters.collect(self._trained, reuse=self.exchange is not None)
        if factor != 1.0:
            self.reducer.scale(factor, self._trained.values())

    def clip(self) -> None:
        """Limit the global norm."""
        assert self._setup.clip is not None
        self._note_norm(self.parameters.clip(self._trained, self._setup.clip))

    def _note_norm(self, norm: float) -> None:
        self._context.record.norm = norm
        if not math.isfinite(norm):
            raise self._diverged(f"the norm of the gradients is {norm}")

    def update(self) -> None:
        """The optimiser's and the scheduler's step."""
        self.updater.update()
        self._schedule()

    def settle(self) -> None:
        """All but the optimiser's step, which a pipeline's table has made."""
        self._read_tally()
        self._schedule()

    def release(self) -> None:
        """Hand the update over to the exchange, once the loss is known to be finite."""
        self.hand_over(self._read_tally())

    def hand_over(self, factor: float = 1.0) -> None:
        """Let the exchange make the update; the next forward pass may begin."""
        if self.exchange is not None:
            assert self.exchange.crossing is not None
            with self.exchanging():
                self._context.record.flights.extend(self.exchange.crossing.release(factor))
        self._schedule()

    def show(self) -> None:
        """Put the gradients of the last update into `parameter.grad`, where priority took them."""
        if self.exchange is not None and self.exchange.crossing is not None:
            self.flush()
            self.exchange.now.settle()

    def hide(self) -> None:
        """Undo `show`; the next step must not add to them."""
        if self.exchange is not None and self.exchange.crossing is not None:
            for parameter in self._trained.values():
                parameter.grad = None

    def skip(self) -> None:
        """The update has been made by somebody else: with `priority`, the lane must not make it."""
        if self.exchange is not None and self.exchange.crossing is not None:
            with self.exchanging():
                self.exchange.crossing.discard()

    def propose(self) -> None:
        """Make this rank's own update, and put it where the gradients were."""
        assert self._deltas is not None
        factor = self._read_tally() * self._factor()
        self._deltas.propose(self._current, self._trained.values(), factor)

    def adopt(self) -> None:
        """Make the combined update."""
        assert self._deltas is not None
        self._deltas.adopt(self._current)
        self._schedule()

    # -- small parts -----------------------------------------------------------------------------

    @property
    def _current(self) -> GradientExchange | None:
        return None if self.exchange is None else self.exchange.now

    def _schedule(self) -> None:
        if self._setup.scheduler is not None:
            self._setup.scheduler.step()

    def _factor(self) -> float:
        """By which this rank's gradients, shares of the global mean, enter the exchange."""
        match self._setup.plan.exchange.reduce:
            case "sum":
                return self._setup.share * self._context.world.ranks
            case "adasum" if self._context.samples:  # of the ranks' own means
                return self._setup.share * self._context.record.samples / self._context.samples
        return self._setup.share

    def _read_tally(self) -> float:
        """What the sums must be multiplied by, where the global count is only known now.

        Raises:
            Diverged: The loss is not finite.
        """
        assert self._tally is not None
        record = self._context.record
        with self.exchanging():
            share, count, record.votes = self._tally.read()
        record.loss = share * (record.samples / count) if count else math.nan
        if not math.isfinite(record.loss):
            self.skip()
            raise self._diverged(f"the loss is {record.loss}")
        return record.samples / count

    def _diverged(self, what: str) -> Diverged:
        return self.updater.diverged(what, self._context.doing)
