"""Gradient exchange for the user's own training loop, in place of DistributedDataParallel.

The model stays as it is; `Exchange.step()` takes the place of `optimizer.step()`. As with DDP,
every rank updates with the mean of all ranks' gradients. How they are exchanged is the plan's
choice: compressed, hierarchical, or with priority across steps.

A loop may have several models, each with its own `Exchange`, and several backward passes in a step
(a generator and its discriminator, an actor and its critic). Gradients of one exchange leave during
the backward pass only where the first step had one pass, and where no other exchange is alive:
otherwise nobody knows which pass is the last one before `step()`, and they leave there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.lanes.buckets import BucketTiming
from headway.documents import nearest
from headway.errors import PlanError, UsageError
from headway.keywords import checks_keywords, told_together
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed import replica_sync
from headway.run.distributed.world import World
from headway.run.step.record import StepRecord
from headway.run.step.setup import check_components, find_world
from headway.run.strategy.step_context import TrainingSetup
from headway.run.strategy.strategy import data_parallel_strategy


@checks_keywords
class Exchange:
    """Makes a training loop data-parallel.

        exchange = headway.Exchange(model, optimizer, compress="fp16")
        for x, y in batches_of_this_rank:
            criterion(model(x), y).backward()
            exchange.step()                       # in place of optimizer.step() and zero_grad()

    Args:
        model: Any module; its parameters and buffers become those of rank 0.
        description: The plan's exchange, in place of the choices.
        world: The processes; found in the environment or in torch.distributed if not given.
        choices: Fields of `headway.plans.ExchangePlan`: compress, reduce, collective, priority,
            bucket. `overlap=True` sends gradients during the backward pass from the first step on,
            also beside other exchanges: then each step must have one backward pass.

    Raises:
        PlanError: These choices cannot be combined.
        RecipeError: The optimiser cannot be used; see `headway.run.step.setup.check_components`.
        UsageError: An unknown choice, or both a description and choices.
    """

    _alive: ClassVar[weakref.WeakSet[Exchange]] = weakref.WeakSet()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        description: ExchangePlan | None = None,
        *,
        seed: int = 0,
        world: World | None = None,
        **choices: Any,
    ) -> None:
        self.world = world or find_world()
        self.description = _described(description, choices)
        ranks = self.world.ranks
        problems = self.description.problems(ranks)
        if problems:
            raise PlanError(
                "these exchange options cannot be combined",
                problems=problems,
                fix="Change these options.",
            )
        if self.description.values == "updates":
            raise PlanError(
                "this exchange needs headway's own training step",
                problems=["exchange.values updates: only headway.Executor can undo a local update"],
                fix="Use headway.Executor.",
            )
        check_components(model, optimizer, None, ranks)
        self._optimizer = optimizer
        self._synchronized = False
        self._accumulating = False
        self._joining = False
        self._overlap_asked = choices.get("overlap") is True
        self._one_pass = False
        self._warned = False
        if ranks > 1:
            replica_sync.sync_initial_state(model, self.world)
        self._strategy = data_parallel_strategy(
            TrainingSetup(
                model=model,
                optimizer=optimizer,
                scheduler=None,
                # Of the plan only the exchange matters; one sample for each rank makes it legal.
                plan=data_parallel(ranks, processes=ranks, exchange=self.description),
                world=self.world,
                clip=None,
                seed=seed,
                # The mean of DDP; Adasum needs the ranks' own gradients, unscaled.
                weight=1.0 / ranks if self.description.reduce != "adasum" else 1.0,
            )
        )
        self.steps_done = 0
        self._alive.add(self)
        for each in self._alive:
            each._set_overlap()
        self._last: list[BucketTiming] = []
        self._record = StepRecord(samples=1)
        self._begin()
        # With priority updates may still be under way when the user saves.
        self._guards = [
            model.register_state_dict_pre_hook(lambda *_: self.flush()),
            optimizer.register_state_dict_pre_hook(lambda *_: self.flush()),
        ]

    def _begin(self) -> None:
        self._synchronized = False
        self._record = StepRecord(samples=1)
        self._strategy.begin(self._record, 1, f"step {self.steps_done + 1}")
        self._arm()

    def _arm(self) -> None:
        if self._accumulating:
            return
        self._set_overlap()
        self._strategy.arm()

    def _set_overlap(self) -> None:
        """Let gradients leave during the backward pass where it is known to be the step's last."""
        exchange = self._strategy.exchange
        if exchange is not None:
            known = self._overlap_asked or (self._one_pass and len(self._alive) == 1)
            exchange.now.overlap = self.description.overlap and known
            exchange.now.warn_mixed = self._warn_mixed

    def _others_stepped(self) -> None:
        """Tell the other exchanges of this process that this one has made an update."""
        for other in self._alive:
            if other is not self and other._strategy.exchange is not None:
                other._strategy.exchange.now.phase += 1

    def _warn_mixed(self, name: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the gradient of {name} from before another Exchange's step is still there, and this "
            "backward pass adds to it: detach() what a loss of the other model takes from this "
            "one, or call zero_grad() before this model's own backward pass; to accumulate on "
            "purpose, use `with exchange.no_sync():`",
            stacklevel=2,
        )

    @property
    def flights(self) -> tuple[BucketTiming, ...]:
        """The timing of the last step's buckets; with priority, of the step before it."""
        return tuple(self._last)

    @property
    def remarks(self) -> list[str]:
        """Sentences about changes of the exchange, such as new bucket sizes."""
        return self._strategy.context.remarks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients; the next one outside sends them."""
        exchange = self._strategy.exchange
        self._accumulating = True
        if exchange is not None:
            exchange.now.disarm()
        try:
            yield
        finally:
            self._accumulating = False
            self._arm()

    def zero_grad(self) -> None:
        """Drop the gradients of this step so far, as `optimizer.zero_grad()` does.

        `step` does it, too. It is needed where another model's loss has passed through this one.
        """
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        """Wait for the mean gradients in `parameter.grad`, to clip or read them before `step`.

        Parameters that no rank has used have no gradient.
        """
        if not self._synchronized:
            self._strategy.send()
            self._strategy.receive()
            self._synchronized = True

    def step(self) -> None:
        """Update the parameters with the mean gradients, and begin the next step.

        With priority it returns while gradients are still on their way.

        Raises:
            PeerLost: Another rank vanished.
            Stalled: The exchange ran into its time-out; names who is missing.
        """
        self._step(active=True)

    def _step(self, *, active: bool) -> bool:
        """Returns whether any rank had a batch for this step, which is known only in `join`."""
        going = True
        crosses = self._strategy.crosses and not self._synchronized
        if not self._synchronized:
            self._strategy.send()
        if self._joining:
            going = self._anybody(active)
        if crosses:
            self._strategy.hand_over()
        else:
            if not self._synchronized:
                self._strategy.receive()
            self._optimizer.step()
            # After `synchronize` with priority the lane still has this update to make: not twice.
            self._strategy.skip()
        self._others_stepped()
        if self.steps_done == 0 and self._strategy.exchange is not None:
            self._one_pass = not self._strategy.exchange.now.repeated
        self.steps_done += going
        self._last = self._record.flights
        self._begin()
        return going

    @contextmanager
    def join(self) -> Iterator[None]:
        """Ranks whose loop inside ends early take part in the other ranks' steps.

        The mean is over all ranks, as in DDP: a rank without a batch counts as zero.
        """
        self._joining = True
        try:
            yield
            while self._step(active=False):
                pass
        finally:
            self._joining = False

    def _anybody(self, active: bool) -> bool:
        """Whether any rank still has batches; collective."""
        count = torch.tensor(float(active), device=self.world.device)
        if self.world.ranks > 1:
            with self._strategy.context.exchanging():
                dist.all_reduce(count)
        return bool(count > 0)

    def flush(self) -> None:
        """Wait until every update has been made (priority); call it before you read parameters."""
        self._strategy.flush()

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals and factors of this rank's compressors; empty for exact exchanges."""
        self.flush()
        exchange = self._strategy.exchange
        return exchange.state() if exchange is not None else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned on this rank."""
        exchange = self._strategy.exchange
        if exchange is not None:
            exchange.restore(state)

    def close(self) -> None:
        """Finish the exchange in progress; remove the hooks from model and optimiser."""
        self._alive.discard(self)
        for guard in self._guards:
            guard.remove()
        self._strategy.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error the peers may be gone, and `close` would wait for them.
        if kind is None:
            self.close()


def _described(given: ExchangePlan | None, choices: dict[str, Any]) -> ExchangePlan:
    if given is not None and choices:
        raise UsageError(
            "an Exchange takes a description or choices, not both",
            fix="Write Exchange(model, optimizer, compress='fp16').",
        )
    legal = ExchangePlan.__dataclass_fields__
    if unknown := sorted(choices.keys() - legal.keys()):
        told = [f"there is no choice {name}{nearest(name, list(legal))}" for name in unknown]
        raise told_together("headway.Exchange", told, UsageError)
    return given or ExchangePlan(**choices)
