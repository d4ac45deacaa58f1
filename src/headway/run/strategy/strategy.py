"""A strategy: from backward's gradients to updated parameters.

A strategy has a reducer (who sums gradients) and parameters (what a rank holds of them). It has one
method for each instruction of a step program that follows the forward passes. A new way to split a
model is a new value of one of the two; `make_strategy` chooses them. `BucketReducer` sums gradients
in buckets; `LocalReducer` takes what backward has left: summed by FSDP2, by the table of a pipeline
over the copies of its stages (SYNC), or of one rank alone.

The optimiser steps at the end of a step (`Strategy.update`); under a schedule without a flush a
STEP in the table updates one stage by the gradients of its group (`update_stage`). Sources:
PipeDream (Narayanan et al., SOSP 2019), PipeDream-2BW (Narayanan et al., ICML 2021).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

from headway.channel.process_memory import give_back_freed_memory
from headway.comm.compress.state import STATE_PREFIX, collect_state, distribute_state
from headway.comm.exchange.gradient_exchange import DeltaUpdate, GradientExchange
from headway.comm.lanes.buckets import BucketTiming
from headway.comm.lanes.routes import RoutePool
from headway.comm.tuning.autotuning import AdaptiveExchange
from headway.data import RankBatch, StepFact
from headway.errors import Diverged, PlanError
from headway.optim import fit_exchange
from headway.parallel.fsdp import ShardedState
from headway.parallel.split_layers import ParameterPlacement, SplitDecisions
from headway.parallel.tensor import ProcessGrid
from headway.plans import ExchangePlan, Plan
from headway.plans.layer_split import SPACE
from headway.plans.plan import SHARD_AXIS, Zero, check_executable
from headway.run.distributed.device_mesh import state_mesh
from headway.run.distributed.process_groups import exchange_routes
from headway.run.distributed.world import broadcast_from_rank0
from headway.run.pipeline.step import PipelineRunner
from headway.run.step.forward_pass import ForwardPass
from headway.run.step.memory import meta_copy
from headway.run.step.randomness import RandomDraws
from headway.run.step.record import StepRecord
from headway.run.strategy.parameters import (
    HeldParameters,
    ShardedParameters,
    StageParameters,
    TableParameters,
    TensorsByKind,
    WholeParameters,
)
from headway.run.strategy.split_layers import SplitLayers, infer_plan_split
from headway.run.strategy.split_tables import TableLayout
from headway.run.strategy.step_context import StepContext, StepReduction, TrainingSetup
from headway.run.strategy.training_state import TrainingState, parameter_of
from headway.run.synchrony.differences import DifferenceExchange
from headway.run.synchrony.free_run import FreeRun
from headway.run.synchrony.replica import ModelReplica
from headway.run.synchrony.rounds import RoundsRun, WorkerPlace
from headway.run.synchrony.worker_group import AnyFreeRun, GroupRun


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

    def shard(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: DeviceMesh,
        left: Collection[nn.Parameter] = (),
    ) -> None:
        """Shard the model in place; collective.

        Args:
            optimizer: None: it gets the sharded parameters from the caller.
            left: Parameters that stay as they are.
        """
        assert self._zero
        self._state = ShardedState(
            model, optimizer, mesh, self._zero, counted=self._gradient_copies, left=left
        )

    def follow(self, sources: Mapping[str, nn.Parameter]) -> None:
        pass  # nothing is registered per parameter

    def calling(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state is None else self._state.called()

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
        return nullcontext()

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


def update_stage(optimizer: Optimizer, parameters: Iterable[nn.Parameter], last: bool) -> None:
    """Update a stage by the gradients of its group, at a STEP of a table without a flush.

    Args:
        last: The stage's last STEP in the table: its gradients stay until the next step of the
            recipe, for the user to look at.
    """
    stage = set(parameters)
    everything = (p for group in optimizer.param_groups for p in group["params"])
    # An optimiser updates whatever has a gradient: set those of other stages aside.
    aside = {p: p.grad for p in everything if p.grad is not None and p not in stage}
    for parameter in aside:
        parameter.grad = None
    optimizer.step()
    if not last:
        for parameter in stage:
            parameter.grad = None
    for parameter, gradient in aside.items():
        parameter.grad = gradient


def check_clip(plan: Plan, clip: float | None) -> None:
    """Refuse to clip gradients under a plan without a flush.

    Raises:
        PlanError: The norm over all stages is never known: each stage updates itself.
    """
    if clip is not None and not plan.flushes:
        raise PlanError(
            "the gradients of this plan cannot be clipped",
            problems=[
                f"clip is {clip:g}, the limit of the norm over all stages; "
                f"{plan.pipeline.schedule} updates each stage by itself, without a flush"
            ],
            fix="Leave out clip, or use a schedule with a flush, such as 1f1b.",
        )


class Strategy:
    """From the gradients of one rank to its updated parameters.

    Args:
        divide: Splits or cuts the model by the first batch; returns the random draws of the whole
            model if it has probed them. None: the model stays as it is.

    Attributes:
        pipeline: Runs all micro-batches; None: the model is not cut, the executor runs them.
        rounds: Makes the updates of a worker that meets others now and then; None: all ranks agree
            at every step.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        context: StepContext,
        *,
        parameters: HeldParameters,
        reducer: Reducer,
        pipeline: PipelineRunner | None = None,
        divide: Callable[[RankBatch | None], RandomDraws | None] | None = None,
        rounds: RoundsRun | AnyFreeRun | None = None,
    ) -> None:
        self.rounds = rounds
        self.parameters = parameters
        self.reducer = reducer
        self.pipeline = pipeline
        self._setup = setup
        self.context = context
        self._divide = divide
        self._trained: Mapping[str, nn.Parameter] = {}
        self._deltas = (
            DeltaUpdate(setup.optimizer) if setup.plan.exchange.values == "updates" else None
        )
        self._tally: StepReduction | None = None
        self._fact: StepFact | None = None
        self._count = 0.0
        self._counts = setup.plan.counts(context.world.rank)

    @property
    def plan(self) -> Plan:
        return self._setup.plan

    @property
    def exchange(self) -> AdaptiveExchange | None:
        """None where gradients are not summed in buckets, or nothing is trained."""
        return self.reducer.exchange

    @property
    def crosses(self) -> bool:
        """Whether the exchange makes the update, while the next step begins (priority)."""
        return self.exchange is not None and self.exchange.crossing is not None

    # -- between steps ---------------------------------------------------------------------------

    def prepare(self, batch: RankBatch | None) -> RandomDraws | None:
        """Split or cut the model by its first batch; does nothing later. Collective.

        Args:
            batch: Only that of rank 0, and of ranks that share its samples, is used.

        Returns:
            The random draws of the whole model, where this has probed them.

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
        """Exchange the gradients of all parameters that are trainable now."""
        self.parameters.follow()
        trained = {name: p for name, p in self.parameters.named.items() if p.requires_grad}
        known = self._trained
        # By identity as well: a split model has other parameters under the same names.
        if trained.keys() == known.keys() and all(p is known[n] for n, p in trained.items()):
            return
        self._trained = trained
        sources = self.parameters.sources
        self.reducer.follow({name: sources[name] for name in trained if name in sources})

    def flush(self) -> None:
        """Wait until every update has been made; call it before parameters are read."""
        if self.exchange is not None:
            with self.context.exchanging():
                self.exchange.flush()

    def gather_whole(self) -> None:
        """Gather the whole model on rank 0, until `parameters.release_whole`; collective."""
        self.flush()
        self.parameters.gather_whole()

    def tensors_by_kind(self) -> TensorsByKind:
        """The tensors of a step, complete on rank 0: see `TrainingState.tensors_by_kind`."""
        setup, layout = self._setup, self.parameters.layers
        trained = TrainingState(setup.model, setup.optimizer, setup.scheduler, layout=layout)
        found = self.parameters.complete(trained.tensors_by_kind())
        if layout is not None and layout.growing is not None:
            with self.context.exchanging():
                rows = layout.growing.numbers(setup.optimizer)
            found = {
                kind: {**found.get(kind, {}), **rows.get(kind, {})} for kind in {**found, **rows}
            }
        return self.rounds.with_state(found) if isinstance(self.rounds, GroupRun) else found

    def close(self) -> None:
        """Finish the exchange in progress and remove the hooks from the model."""
        self.flush()
        if self.rounds is not None:
            self.rounds.close()
        self.reducer.close()
        self._trained = {}
        self.parameters.close()

    def exchange_state(self) -> dict[str, Tensor]:
        """Residuals of the compressors, for a checkpoint; collective."""
        if self.rounds is not None:
            with self.context.exchanging():
                found = self.rounds.state()
            return {name: self._logical(name, tensor) for name, tensor in found.items()}
        if self.exchange is None or self._setup.plan.exchange.exact:
            return {}
        with self.context.exchanging():
            return collect_state(self.exchange.state(), self._trained)

    def restore_exchange(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the residuals that are among the tensors of a checkpoint."""
        if self.rounds is not None:
            layout = self.parameters.layers
            if layout is not None:
                kept = (name for name in saved if name.startswith(STATE_PREFIX))
                saved = {name: layout.held(parameter_of(name), saved[name]) for name in kept}
            self.rounds.restore(saved)
            return
        state = distribute_state(saved, self.context.world.ranks)
        if not state:
            return
        if self.exchange is None or self._setup.plan.exchange.exact:
            self.context.remarks.append(
                "the checkpoint holds residuals of a compressor; this exchange has no compressor, "
                "so they are lost"
            )
        else:
            self.exchange.restore(state)

    def _logical(self, name: str, tensor: Tensor) -> Tensor:
        """What has the shape of a parameter, as a checkpoint has it; `name` is its name there."""
        layout = self.parameters.layers
        return tensor if layout is None else layout.logical(parameter_of(name), tensor)

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint can be made now: of workers that do not meet, not at every step."""
        rounds = self.rounds
        return rounds is None or isinstance(rounds, RoundsRun) or rounds.can_save

    def mean_model(self) -> dict[str, Tensor]:
        """The mean of the models of workers that meet in rounds, by logical name; collective."""
        assert isinstance(self.rounds, RoundsRun)
        with self.context.exchanging():
            found = self.rounds.mean()
        layout = self.parameters.layers
        if layout is None:
            return dict(found)
        return {name: layout.logical(name, tensor) for name, tensor in found.items()}

    def share_buffers(self) -> None:
        """Before a checkpoint: give ranks that have one model the buffers of one; collective."""
        apart = isinstance(self.rounds, GroupRun) and not self.rounds.met
        if not isinstance(self.rounds, RoundsRun) and not apart:
            self.parameters.share_buffers()
        elif self.context.inside is not None:
            self.parameters.share_buffers(self.context.inside)

    # -- the instructions ------------------------------------------------------------------------

    def begin(self, record: StepRecord, samples: int, doing: str) -> None:
        """Begin a step: drop the gradients of the last one."""
        context = self.context
        context.record, context.samples, context.doing = record, samples, doing
        self.follow()
        self.reducer.begin(self._factor(), self._trained.values())
        self.parameters.clear()

    def tally(
        self,
        shares: Sequence[Tensor],
        counts: Sequence[Tensor | float],
        *,
        vote: bool,
        fact: StepFact | None = None,
    ) -> None:
        """Start to sum over the ranks: loss, count, votes to stop, and what must be the same."""
        self._fact = fact
        with self.context.exchanging():
            self._tally = StepReduction(
                shares if self._counts else (),
                counts if self._counts else (),
                vote=vote,
                device=self.context.world.device,
                together=self.context.world.ranks > self._setup.plan.workers,
                group=self.context.inside,
                same=fact.numbers if fact else (),
            )

    def arm(self) -> None:
        """Send each gradient as soon as the next backward pass has made it."""
        self.reducer.arm()

    def send(self) -> None:
        """Send all gradients that have not been sent."""
        self.reducer.send()

    def receive(self) -> None:
        """Wait for the sums."""
        self.context.record.flights.extend(self.reducer.receive())

    def scale(self) -> None:
        """Refuse a loss that is not finite; divide by the global count where it is not N."""
        factor = self._read_tally()
        # Parts of split layers get their gradients here: a pipeline has no instruction "receive".
        self.parameters.collect(self._trained, reuse=self.exchange is not None)
        if factor != 1.0:
            summed = self.parameters.sources
            self.reducer.scale(factor, [p for n, p in self._trained.items() if n in summed])
            self.parameters.scale(factor)

    def clip(self) -> None:
        """Limit the global norm of the gradients."""
        assert self._setup.clip is not None
        norm = self.parameters.clip(self._trained, self._setup.clip)
        self.context.record.norm = norm
        if not math.isfinite(norm):
            raise self._diverged(f"the norm of the gradients is {norm}")

    @property
    def count(self) -> float:
        """What the loss of the last step is a mean over: samples, tokens."""
        return self._count

    def passes_over(self, step: int) -> bool:
        """Whether a step, from 0, is left out, as the other workers have closed it; then it is."""
        if not isinstance(self.rounds, AnyFreeRun) or not self.rounds.is_closed(step):
            return False
        self.rounds.pass_over()
        self.leave_out()
        return True

    def leave_out(self) -> None:
        """Go on to the next step without making this one; learning rates go on, too."""
        self._count = 0.0
        self._schedule()

    def agree(self) -> None:
        """Make the worker's own update, and meet the others where it is time."""
        assert self.rounds is not None
        record = self.context.record
        with self.context.exchanging():
            self.rounds.step(self._count)
            record.votes = self.rounds.vote(record.votes > 0)
        record.agreement = self.rounds.agreement_record()
        self._schedule()

    def finish(self) -> None:
        """After the last step: all workers end with one model; collective."""
        if self.rounds is not None:
            with self.context.exchanging():
                self.rounds.finish()

    def update(self) -> None:
        """Step the optimiser and the scheduler."""
        self._setup.optimizer.step()
        self._schedule()

    def settle(self) -> None:
        """Step the scheduler only: the pipeline's table has made the updates."""
        self._read_tally()
        self._schedule()

    def release(self) -> None:
        """Let the exchange make the update, once the loss is known to be finite."""
        self.hand_over(self._read_tally())

    def hand_over(self, factor: float = 1.0) -> None:
        """Let the exchange make the update, without reading the step reduction."""
        if self.exchange is not None:
            assert self.exchange.crossing is not None
            with self.context.exchanging():
                self.context.record.flights.extend(self.exchange.crossing.release(factor))
        self._schedule()

    def show(self) -> None:
        """Put the gradients of the last update back into `parameter.grad` (priority)."""
        if self.exchange is not None and self.exchange.crossing is not None:
            self.flush()
            self.exchange.now.settle()

    def hide(self) -> None:
        """Undo `show`: the next step must not add to these gradients."""
        if self.exchange is not None and self.exchange.crossing is not None:
            for parameter in self._trained.values():
                parameter.grad = None

    def skip(self) -> None:
        """Discard the update that the exchange would make: the caller has made it (priority)."""
        if self.exchange is not None and self.exchange.crossing is not None:
            with self.context.exchanging():
                self.exchange.crossing.discard()

    def propose(self) -> None:
        """Make this rank's own update and exchange it in place of the gradients."""
        assert self._deltas is not None
        factor = self._read_tally() * self._factor()
        self._deltas.propose(self._current, self._trained.values(), factor)

    def adopt(self) -> None:
        """Make the combined update."""
        assert self._deltas is not None
        self._deltas.adopt(self._current)
        self._schedule()

    @property
    def _current(self) -> GradientExchange | None:
        return None if self.exchange is None else self.exchange.now

    def _schedule(self) -> None:
        if self._setup.scheduler is None:
            return
        with warnings.catch_warnings():
            if isinstance(self.rounds, AnyFreeRun):
                # It is: where the parameters are held, and with the rates that this one sets.
                text = "Detected call of `lr_scheduler.step.*` before `optimizer.step"
                warnings.filterwarnings("ignore", text)
            self._setup.scheduler.step()

    def _factor(self) -> float:
        # This rank's gradients are shares of the global mean; "sum" wants all ranks' sum of means.
        match self._setup.plan.exchange.reduce:
            case "sum":
                return self._setup.share * self.context.world.ranks
            case "adasum" if self.context.samples:  # combines the ranks' own means
                return self._setup.share * self.context.record.samples / self.context.samples
        return self._setup.share

    def _read_tally(self) -> float:
        """The factor from the sums to the mean over the global count, which is known only now.

        Raises:
            Diverged: The loss is not finite.
            DataError: The ranks do not have the same batch; before the update.
        """
        assert self._tally is not None
        record = self.context.record
        with self.context.exchanging():
            share, count, record.votes = self._tally.read()
        if self._tally.differ and self._fact is not None:
            self.skip()
            self._fact.compare()
        self._count = count
        if self.rounds is not None and not count:
            return 0.0  # a ragged batch has left this worker without samples, and without a loss
        # `share` is sum / N, so that this is sum / count; a count of 0 has no mean.
        record.loss = share * (record.samples / count) if count else math.nan
        if not math.isfinite(record.loss):
            self.skip()  # else the lane would apply these gradients while the error is raised
            raise self._diverged(f"the loss is {record.loss}")
        return record.samples / count

    def _diverged(self, what: str) -> Diverged:
        """The error of a loss or a norm that is not finite."""
        if self._setup.plan.flushes:
            why = "The update was not made: parameters are those of the step before."
            fix = "Lower the learning rate, clip the gradients, or check this batch's data."
        else:
            why = (
                "The schedule has no flush: stages have been updated, and no checkpoint was saved."
            )
            fix = (
                "Lower the learning rate, or check this batch's data; then rerun with --resume, "
                "from the last checkpoint."
            )
        return Diverged(what, where=self.context.doing, why=why, fix=fix)


def make_strategy(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    """The reducer and the parameters that a plan needs; collective.

    The model is sharded in place under ZeRO; it is split or cut at its first batch.

    Raises:
        PlanError: The executor does not support the plan or the model, or cannot clip gradients.
    """
    plan = setup.plan
    check_executable(plan)
    check_clip(plan, setup.clip)
    if plan.pipe_degree > 1:
        return _pipeline_parallel(setup, forward)
    if plan.split.tensor:
        return _tensor_parallel(setup, forward)
    if plan.places_tables:
        return _with_split_tables(setup, forward)
    # With a single rank in each worker there is nobody to keep the state together with.
    if plan.memory.zero and plan.ranks > plan.workers:
        return _sharded(setup)
    return data_parallel_strategy(setup)


def data_parallel_strategy(setup: TrainingSetup) -> Strategy:
    """The strategy of ranks that have the whole model and sum gradients in buckets."""
    context = StepContext(setup.world)
    parameters = WholeParameters(setup.model, context)
    return Strategy(
        setup,
        context,
        parameters=parameters,
        reducer=_bucket_reducer(setup, context),
        rounds=_rounds(setup, context, parameters),
    )


def _rounds(
    setup: TrainingSetup, context: StepContext, parameters: HeldParameters
) -> RoundsRun | AnyFreeRun | None:
    """The meetings of this rank's worker with others; None: all agree at every step. Collective."""
    plan = setup.plan
    if plan.synchrony.by_all_reduce:
        return None
    place = WorkerPlace.of(plan, setup.world)
    context.inside = place.inside
    if not plan.synchrony.in_rounds:
        if not plan.has_leaders:
            buffers = dict(setup.model.named_buffers())
            return FreeRun(
                plan, place, setup.world, parameters.named, setup.optimizer, buffers=buffers
            )
        return GroupRun(
            plan,
            place,
            setup.world,
            setup.model,
            parameters,
            setup.optimizer,
            apart=not isinstance(parameters, WholeParameters),
        )
    differences = None
    if plan.synchrony.compress != "none":
        differences = DifferenceExchange(
            plan, setup.world, parameters.named, place.inside, setup.seed
        )
    return RoundsRun(
        plan, place, lambda: ModelReplica(parameters.updated, setup.optimizer), differences
    )


def _bucket_reducer(setup: TrainingSetup, context: StepContext) -> Reducer:
    plan = setup.plan
    routes = exchange_routes(plan, setup.world) if plan.exchange_degree > 1 else None
    _fit_optimizer(setup)
    if routes is None:
        return LocalReducer(context)
    # With priority steps cross their border, but a clipped norm needs all gradients together.
    crosses = plan.exchange.priority and setup.clip is None
    crossing = (setup.model, setup.optimizer) if crosses else None
    return BucketReducer(context, routes, plan.exchange, seed=setup.seed, crossing=crossing)


def _fit_optimizer(setup: TrainingSetup) -> None:
    # Norms are divided over all ranks, which have one model only where all agree at every step.
    # Nor does a rank have all tables.
    plan = setup.plan
    ranks = plan.exchange_degree if plan.synchrony.by_all_reduce and not plan.split.tables else 1
    fit_exchange(setup.optimizer, setup.plan.exchange, ranks=ranks)


def _sharded(setup: TrainingSetup) -> Strategy:
    context, plan, model = StepContext(setup.world), setup.plan, setup.model
    reducer = LocalReducer(
        context, plan.memory.zero, weight=setup.share, gradient_copies=plan.mesh.degree(SPACE)
    )
    # Before FSDP2 replaces the parameters: a whole model is later made of this copy.
    form = meta_copy(model)
    with setup.world.explained("sharding the model's state"):
        reducer.shard(model, setup.optimizer, _state_mesh(setup))
    give_back_freed_memory()
    _fit_optimizer(setup)
    parameters = ShardedParameters(model, context, form=form)
    return Strategy(
        setup,
        context,
        parameters=parameters,
        reducer=reducer,
        rounds=_rounds(setup, context, parameters),
    )


def _tensor_parallel(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    context, plan, model = StepContext(setup.world), setup.plan, setup.model
    layers = SplitLayers.of(plan, setup.world)
    parameters = ShardedParameters(model, context, layers=layers)
    # With a single share of the batch there is nobody to keep the state together with.
    zero = plan.memory.zero if plan.copies > 1 else 0
    dims = (plan.exchange.axis, SHARD_AXIS) if zero else ()
    data_dims = tuple(name for name in dims if plan.mesh.degree(name) > 1)
    buckets = _bucket_reducer(setup, context)
    fsdp = LocalReducer(context, zero, weight=setup.share) if zero else None

    def look(batch: RankBatch | None) -> tuple[SplitDecisions, RandomDraws]:
        assert batch is not None
        data = forward.prepare(batch.micros[0].data)
        decisions = infer_plan_split(plan, model, forward.loss, data)
        return decisions, forward.probe(data, forward.loss)

    def divide(batch: RankBatch | None) -> RandomDraws:
        # The draws are those of the unsplit model: rank 0 looks for them before it is split.
        found = broadcast_from_rank0(setup.world.rank, lambda: look(batch), context.exchanging())
        decisions, draws = found

        def split() -> list[str]:
            # FSDP2 gathers weights ahead, and a part that is away cannot be gathered further.
            remarks = layers.apply(
                model,
                decisions,
                ahead=not zero,
                placement=lambda grid: _placement(layers, grid, data_dims),
            )
            if fsdp is not None:
                fsdp.shard(model, None, layers.meshes[layers.grid.plan][data_dims])
            return remarks

        parameters.divide(setup.optimizer, split)
        return draws

    return Strategy(
        setup,
        context,
        parameters=parameters,
        reducer=fsdp or buckets,
        divide=divide,
        rounds=_rounds(setup, context, parameters),
    )


def _with_split_tables(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    context, plan, model = StepContext(setup.world), setup.plan, setup.model
    tables = TableLayout(plan, model, setup.optimizer, setup.world)
    parameters = TableParameters(model, context, tables)
    buckets = _bucket_reducer(setup, context)
    fsdp = LocalReducer(context, plan.memory.zero, weight=setup.share) if plan.memory.zero else None

    def look(batch: RankBatch | None) -> RandomDraws:
        assert batch is not None
        with tables.tried(model):
            return forward.probe(
                forward.prepare(batch.micros[0].data), tables.watched(forward.loss)
            )

    def shard(left: Collection[nn.Parameter]) -> None:
        assert fsdp is not None
        fsdp.shard(model, setup.optimizer, _state_mesh(setup), left)

    def divide(batch: RankBatch | None) -> RandomDraws:
        # While rank 0 has the whole model: alone, without the others' lookups.
        world = setup.world
        if world.alone:
            draws = look(batch)
        else:
            draws = broadcast_from_rank0(world.rank, lambda: look(batch), context.exchanging())
        parameters.divide(shard if fsdp else None)
        return draws

    return Strategy(setup, context, parameters=parameters, reducer=fsdp or buckets, divide=divide)


def _state_mesh(setup: TrainingSetup) -> DeviceMesh:
    world = setup.world
    # A process group that the user's program has made keeps its own time-out.
    timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
    return state_mesh(setup.plan, world.device, timeout)


def _placement(
    layers: SplitLayers, grid: ProcessGrid, data_dims: tuple[str, ...]
) -> ParameterPlacement:
    """The placement of parameters on a grid and, with sharded state, on the data axes."""
    if not data_dims:
        return ParameterPlacement.of(grid)
    names = tuple(grid.held_on.mesh_dim_names or ()) + data_dims
    inner = (*(Replicate() for _ in data_dims[1:]), Shard(0))
    return ParameterPlacement(grid, layers.meshes[grid.plan][names], inner)


def _pipeline_parallel(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    context, plan, world = StepContext(setup.world), setup.plan, setup.world
    layers = SplitLayers.of(plan, world) if plan.split.tensor else None
    parameters = StageParameters(setup.model, setup.optimizer, plan, context, layers)
    _fit_optimizer(setup)
    pipeline = PipelineRunner(
        forward,
        plan,
        world,
        seed=setup.seed,
        remark=context.remarks.append,
        weights=parameters,
        update_stage=partial(update_stage, setup.optimizer),
    )
    return Strategy(
        setup,
        context,
        parameters=parameters,
        reducer=LocalReducer(context),
        pipeline=pipeline,
        divide=pipeline.cut,
        rounds=_rounds(setup, context, parameters),
    )
