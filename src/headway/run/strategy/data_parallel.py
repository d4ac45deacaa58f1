"""Data parallelism, and the interface of all strategies: exchange, scale, clip, update.

One method for each instruction that follows the forward passes. In a world of one rank there is no
exchange, and the same instructions do what remains.

`StepReduction` sums loss, count and votes to stop over all ranks in one small all-reduce. It starts
as soon as the last forward pass has the loss and overlaps with the backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.comm.compress.state import collect_state, distribute_state
from headway.comm.exchange.delta_update import DeltaUpdate
from headway.comm.exchange.gradient_exchange import GradientExchange
from headway.comm.tuning.autotuning import AdaptiveExchange
from headway.errors import Diverged, Stalled
from headway.optim import fit_exchange
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.run.distributed import replica_sync
from headway.run.distributed.process_groups import exchange_routes
from headway.run.distributed.world import World
from headway.run.step.record import StepRecord
from headway.run.strategy.training_state import LogicalLayout, TrainingState


class StepReduction:
    """Loss, count and votes of one step.

    Args:
        shares: Of this rank's micro-batches: loss sum divided by the samples of the global batch.
        counts: What the loss of each micro-batch is a sum over.
        vote: Whether this rank wants to stop after the step.
    """

    def __init__(
        self,
        shares: Sequence[Tensor],
        counts: Sequence[Tensor | float],
        *,
        vote: bool,
        device: torch.device,
        together: bool,
    ) -> None:
        self._sums = torch.stack(
            [
                _total(shares, device),
                _total(counts, device),
                torch.tensor(float(vote), dtype=torch.float64, device=device),
            ]
        )
        self._work = dist.all_reduce(self._sums, async_op=True) if together else None
        self._read: tuple[float, float, int] | None = None

    def read(self) -> tuple[float, float, int]:
        """Wait; returns the loss share, the count, and the number of votes of all ranks."""
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            share, count, votes = self._sums.tolist()
            self._read = share, count, round(votes)
        return self._read


def _total(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value in values:
        total += value.detach() if isinstance(value, Tensor) else value
    return total


# The executor's hands on the gradients: exchange, tally, scaling, clipping, update.


_MOST_BUCKETS = 4


class DataParallelStrategy:
    """From backward's gradients to updated parameters.

    Args:
        clip: Largest global norm of the gradients.
        weight: Gradients are multiplied by it before they are summed.

    Attributes:
        remarks: Sentences for the journal: what has been re-arranged.
        layout: Where parameters are held otherwise than they are saved; None: nowhere.
    """

    layout: LogicalLayout | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        plan: Plan,
        world: World,
        clip: float | None,
        seed: int,
        weight: float = 1.0,
    ) -> None:
        self.remarks: list[str] = []
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plan = plan
        self._world = world
        self._clip = clip
        self._seed = seed
        self._weight = weight / plan.mesh.degree(SPACE)  # all of them hold the whole loss
        self._place()
        self._all = dict(model.named_parameters())
        self._parameters: dict[str, nn.Parameter] = {}
        self._exchange: AdaptiveExchange | None = None
        self._routes = exchange_routes(plan, world) if plan.exchange_degree > 1 else None
        self._updates = DeltaUpdate(optimizer) if plan.exchange.values == "updates" else None
        fit_exchange(optimizer, plan.exchange, ranks=plan.exchange_degree)
        self._tally: StepReduction | None = None
        self._record, self._own = StepRecord(), 0
        self._counts = plan.counts(world.rank)
        self._doing = ""

    @property
    def exchange(self) -> AdaptiveExchange | None:
        """None in a world of one rank, or where nothing is trained."""
        return self._exchange

    @property
    def crosses(self) -> bool:
        """Whether steps cross their border; a clipped norm needs all gradients together."""
        return self._plan.exchange.priority and self._clip is None and self._routes is not None

    # -- between steps ---------------------------------------------------------------------------

    def follow(self) -> None:
        """Exchange the gradients of what is trained now; some may have been frozen or thawed."""
        trainable = {name: p for name, p in self._all.items() if p.requires_grad}
        if trainable.keys() == self._parameters.keys():
            return
        state, wanted = dict[str, Tensor](), self._plan.exchange
        if self._exchange is not None:
            self.flush()
            state, wanted = self._exchange.state(), self._exchange.wanted
            self._exchange.close()
            self._exchange = None
        self._parameters = trainable
        if self._routes is None or not trainable:
            return
        self._exchange = AdaptiveExchange(
            self._sources(),
            wanted,
            self._routes,
            seed=self._seed,
            model=self._model if self.crosses else None,
            optimizer=self._optimizer if self.crosses else None,
            tell=self.remarks.append,
            doing=self._wait_for,
        )
        self._exchange.restore(state)

    def flush(self) -> None:
        """Wait until every update has been made; needed before parameters are read elsewhere."""
        if self._exchange is not None:
            with self.exchanging():
                self._exchange.flush()

    @property
    def whole(self) -> nn.Module:
        """The model; after `make_whole` it is whole on rank 0."""
        return self._model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimiser has, by logical name; whole, or in parts."""
        return self._all

    def _sources(self) -> Mapping[str, nn.Parameter]:
        """Where backward leaves the gradients of what is trained."""
        return self._parameters

    def _place(self) -> None:
        """Make what is needed before the parameters are looked at; collective."""

    def calling(self) -> contextlib.AbstractContextManager[None]:
        """Around every call of the loss."""
        return contextlib.nullcontext()

    @property
    def away(self) -> frozenset[Tensor]:
        """Parameters and buffers that other ranks hold, and this one does not."""
        return frozenset()

    def make_whole(self) -> None:
        """Put the whole model on rank 0, until `let_go`; collective."""
        self.flush()

    def let_go(self) -> None:
        """Undo `make_whole`."""

    def share_buffers(self) -> None:
        """One rank's buffers for all (running statistics differ between shares); collective."""
        replica_sync.broadcast_buffers(self._model, self._world)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        """What a step has left, complete on rank 0: see `TrainingState.numbers`; collective."""
        return TrainingState(self._model, self._optimizer, self._scheduler).numbers()

    def close(self) -> None:
        """Finish what is under way; take the hooks off the model."""
        if self._exchange is not None:
            self.flush()
            self._exchange.close()
            self._exchange = None
            self._parameters = {}
        if self._routes is not None:
            self._routes.rest()

    def tensors(self) -> dict[str, Tensor]:
        """What compressors have kept back, for a checkpoint; collective."""
        if self._exchange is None or self._plan.exchange.exact:
            return {}
        with self.exchanging():
            return collect_state(self._exchange.state(), self._parameters)

    def take_up(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with what `tensors` returned, among other tensors of a checkpoint."""
        state = distribute_state(saved, self._world.ranks)
        if not state:
            return
        if self._exchange is None or self._plan.exchange.exact:
            self.remarks.append(
                "the checkpoint holds gradients that a compressor had kept back; this exchange "
                "has no compressor, so they are lost"
            )
        else:
            self._exchange.restore(state)

    # -- the instructions ------------------------------------------------------------------------

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        """A step begins: forget the last one's gradients.

        Args:
            record: Is filled; its `samples` are those of the global batch.
            own: Samples of this rank.
            doing: "step 12".
        """
        self._record, self._own, self._doing = record, own, doing
        self.follow()
        if self._exchange is None:
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        with self.exchanging():
            self._exchange.begin()
        self._exchange.now.factor = 1.0 if self._updates else self._factor()

    def tally(
        self, shares: Sequence[Tensor], counts: Sequence[Tensor | float], *, vote: bool
    ) -> None:
        """Start to sum over the ranks: loss, count, votes to stop."""
        with self.exchanging():
            self._tally = StepReduction(
                shares if self._counts else (),
                counts if self._counts else (),
                vote=vote,
                device=self._world.device,
                together=self._world.ranks > 1,
            )

    def arm(self) -> None:
        """Gradients of the next backward pass may leave."""
        if self._exchange is not None:
            self._exchange.now.arm()

    def send(self) -> None:
        """Hand over all gradients that have not left."""
        if self._exchange is not None:
            with self.exchanging():
                self._exchange.now.send()

    def receive(self) -> None:
        """Wait for the sums."""
        if self._exchange is None:
            return
        with self.exchanging():
            self._record.flights.extend(self._exchange.now.receive())
        self._exchange.now.settle()

    def scale(self) -> None:
        """Refuse a loss that is not finite; divide by the global count where it is not N."""
        factor = self._read_tally()
        if factor == 1.0:
            return
        if self._exchange is not None:
            self._exchange.now.scale(factor)
            return
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip(self) -> None:
        """Limit the global norm."""
        assert self._clip is not None
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._clip)
        self._note_norm(float(norm))

    def _limit(self, square: float, gradients: Iterable[Tensor]) -> None:
        """Scale gradients down to the largest norm.

        Args:
            square: Of the norm of all of them, over all ranks.
        """
        assert self._clip is not None
        norm = math.sqrt(square)
        self._note_norm(norm)
        factor = self._clip / (norm + 1e-6)  # torch's
        if factor < 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

    def _note_norm(self, norm: float) -> None:
        self._record.norm = norm
        if not math.isfinite(norm):
            raise self._diverged(f"the norm of the gradients is {norm}")

    def update(self) -> None:
        """The optimiser's and the scheduler's step."""
        self._optimizer.step()
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
        if self._exchange is not None:
            assert self._exchange.crossing is not None
            with self.exchanging():
                self._record.flights.extend(self._exchange.crossing.release(factor))
        self._schedule()

    def show(self) -> None:
        """Put the gradients of the last update into `parameter.grad`, where priority took them."""
        if self._exchange is not None and self._exchange.crossing is not None:
            self.flush()
            self._exchange.now.settle()

    def hide(self) -> None:
        """Undo `show`; the next step must not add to them."""
        if self._exchange is not None and self._exchange.crossing is not None:
            for parameter in self._parameters.values():
                parameter.grad = None

    def skip(self) -> None:
        """The update has been made by somebody else: with `priority`, the lane must not make it."""
        if self._exchange is not None and self._exchange.crossing is not None:
            with self.exchanging():
                self._exchange.crossing.discard()

    def propose(self) -> None:
        """Make this rank's own update, and put it where the gradients were."""
        assert self._updates is not None
        factor = self._read_tally() * self._factor()
        self._updates.propose(self._current, self._parameters.values(), factor)

    def adopt(self) -> None:
        """Make the combined update."""
        assert self._updates is not None
        self._updates.adopt(self._current)
        self._schedule()

    def _wait_for(self, text: str, *arguments: object) -> None:
        self._world.doing(f"{text} of {self._doing}", *arguments)

    # -- small parts -----------------------------------------------------------------------------

    @property
    def _current(self) -> GradientExchange | None:
        return None if self._exchange is None else self._exchange.now

    def _schedule(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

    def _factor(self) -> float:
        """By which this rank's gradients, shares of the global mean, enter the exchange."""
        match self._plan.exchange.reduce:
            case "sum":
                return self._weight * self._world.ranks
            case "adasum" if self._own:  # of the ranks' own means
                return self._weight * self._record.samples / self._own
        return self._weight

    def _read_tally(self) -> float:
        """What the sums must be multiplied by, where the global count is only known now.

        Raises:
            Diverged: The loss is not finite.
        """
        assert self._tally is not None
        with self.exchanging():
            share, count, self._record.votes = self._tally.read()
        self._record.loss = share * (self._record.samples / count) if count else math.nan
        if not math.isfinite(self._record.loss):
            if self._exchange is not None and self._exchange.crossing is not None:
                self._exchange.crossing.discard()
            raise self._diverged(f"the loss is {self._record.loss}")
        return self._record.samples / count

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            what,
            where=self._doing,
            why="The update was not made: parameters are those of the step before.",
            fix="Lower the learning rate, clip the gradients, or look at this batch's data.",
        )

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Explains torch's errors of a broken exchange; a stall also says what buckets wait for."""
        try:
            with self._world.explained(f"the exchange of {self._doing}"):
                yield
        except Stalled as error:
            if self._exchange is not None:
                waiting = itertools.islice(self._exchange.now.waiting(), _MOST_BUCKETS)
                error.why = "\n  ".join([error.why, *(f"here {line}" for line in waiting)])
            raise
