"""Which reducer, parameters and updater a plan needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from headway.data import RankBatch
from headway.optim import fit_exchange
from headway.parallel.tensor.grid import ProcessGrid
from headway.parallel.tensor.model.parameters import ParameterPlacement
from headway.parallel.tensor.model.split_inference import SplitDecisions
from headway.plans import Plan
from headway.plans.layer_split import SPACE
from headway.plans.plan import SHARD_AXIS, check_executable
from headway.run.distributed.process_groups import broadcast_from_rank0, exchange_routes
from headway.run.pipeline.step import PipelineRunner
from headway.run.step.forward_pass import ForwardPass
from headway.run.step.memory import give_back_freed_memory, meta_copy
from headway.run.step.randomness import RandomDraws
from headway.run.strategy.parameters import ShardedParameters, WholeParameters
from headway.run.strategy.reducer import BucketReducer, FsdpReducer, LocalReducer, Reducer
from headway.run.strategy.split_layers import SplitLayers, infer_plan_split
from headway.run.strategy.stage_parameters import StageParameters
from headway.run.strategy.step_context import StepContext, TrainingSetup
from headway.run.strategy.strategy import Strategy
from headway.run.strategy.updater import StageUpdater, StepUpdater, check_clip

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def make_strategy(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    """By where gradients are summed: by stages, by parts of layers or of the state, by buckets.

    Collective; the model is sharded in place where its state is.

    Raises:
        PlanError: There is no mechanism for the plan, or none to limit the norm with it.
    """
    plan = setup.plan
    check_executable(plan)
    check_clip(plan, setup.clip)
    if plan.pipe_degree > 1:
        return _pipeline_parallel(setup, forward)
    if plan.split.tensor:
        return _tensor_parallel(setup, forward)
    return _sharded(setup) if plan.memory.zero and plan.ranks > 1 else data_parallel(setup)


def data_parallel(setup: TrainingSetup) -> Strategy:
    """Every rank has the whole model; gradients are summed in buckets."""
    context = StepContext(setup.world)
    return Strategy(
        setup,
        context,
        parameters=WholeParameters(setup.model, context),
        reducer=_bucket_reducer(setup, context),
        updater=StepUpdater(setup.optimizer),
    )


def _bucket_reducer(setup: TrainingSetup, context: StepContext) -> Reducer:
    """Collective where there is something to sum."""
    plan = setup.plan
    routes = exchange_routes(plan, setup.world) if plan.exchange_degree > 1 else None
    _fit_optimizer(setup)
    if routes is None:
        return LocalReducer()
    # With priority steps cross their border, but a clipped norm needs all gradients together.
    crosses = plan.exchange.priority and setup.clip is None
    crossing = (setup.model, setup.optimizer) if crosses else None
    return BucketReducer(context, routes, plan.exchange, seed=setup.seed, crossing=crossing)


def _fit_optimizer(setup: TrainingSetup) -> None:
    fit_exchange(setup.optimizer, setup.plan.exchange, ranks=setup.plan.exchange_degree)


# -- the state in parts: FSDP2 -------------------------------------------------------------------


def _sharded(setup: TrainingSetup) -> Strategy:
    context, plan, model = StepContext(setup.world), setup.plan, setup.model
    reducer = FsdpReducer(
        context, plan.memory.zero, weight=setup.share, counted=plan.mesh.degree(SPACE)
    )
    form = meta_copy(model)
    with setup.world.explained("sharding the model's state"):
        reducer.shard(model, setup.optimizer, state_mesh(plan, setup.world))
    give_back_freed_memory()
    _fit_optimizer(setup)
    return Strategy(
        setup,
        context,
        parameters=ShardedParameters(model, context, form=form),
        reducer=reducer,
        updater=StepUpdater(setup.optimizer),
    )


def state_mesh(plan: Plan, world: World) -> DeviceMesh:
    """The ranks that keep the state together: a line, or copies x parts; collective.

    Those that share a sample keep it together with the others; with parts of their own (hybrid)
    they are among the copies.
    """
    parts = plan.mesh.degree(SHARD_AXIS)
    lines: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        lines.setdefault(plan.mesh.coordinate(rank).get(SHARD_AXIS, 0), []).append(rank)
    if parts == 1:
        ranks, names = torch.tensor(lines[0], dtype=torch.int), ("data",)
        return DeviceMesh(world.device.type, ranks, mesh_dim_names=names)
    grid = torch.tensor([lines[part] for part in range(parts)], dtype=torch.int).T.contiguous()
    return DeviceMesh(world.device.type, grid, mesh_dim_names=("data", SHARD_AXIS))


# -- split layers, with whole or sharded state ---------------------------------------------------


def _tensor_parallel(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    """The model is split at its first batch."""
    context, plan, model = StepContext(setup.world), setup.plan, setup.model
    layers = SplitLayers.of(plan, setup.world)
    parameters = ShardedParameters(model, context, layers=layers)
    zero = plan.memory.zero if plan.data_degree > 1 else 0
    dims = (plan.exchange.axis, SHARD_AXIS) if zero else ()
    data_dims = tuple(name for name in dims if plan.mesh.degree(name) > 1)
    buckets = _bucket_reducer(setup, context)
    fsdp = FsdpReducer(context, zero, weight=setup.share) if zero else None

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
        updater=StepUpdater(setup.optimizer),
        divide=divide,
    )


def _placement(
    layers: SplitLayers, grid: ProcessGrid, data_dims: tuple[str, ...]
) -> ParameterPlacement:
    """On a grid; with sharded state on the data axes as well, of which the last one cuts."""
    if not data_dims:
        return ParameterPlacement.of(grid)
    names = tuple(grid.held_on.mesh_dim_names or ()) + data_dims
    inner = (*(Replicate() for _ in data_dims[1:]), Shard(0))
    return ParameterPlacement(grid, layers.meshes[grid.plan][names], inner)


# -- stages --------------------------------------------------------------------------------------


def _pipeline_parallel(setup: TrainingSetup, forward: ForwardPass) -> Strategy:
    """The model is cut at its first batch; the schedule's SYNC sums over the copies of stages."""
    context, plan, world = StepContext(setup.world), setup.plan, setup.world
    layers = SplitLayers.of(plan, world) if plan.split.tensor else None
    parameters = StageParameters(setup.model, setup.optimizer, plan, context, layers)
    _fit_optimizer(setup)
    updater = StepUpdater(setup.optimizer) if plan.flushes else StageUpdater(setup.optimizer)
    pipeline = PipelineRunner(
        forward,
        plan,
        world,
        seed=setup.seed,
        remark=context.remarks.append,
        weights=parameters,
        updater=updater,
    )
    return Strategy(
        setup,
        context,
        parameters=parameters,
        reducer=LocalReducer(),
        updater=updater,
        pipeline=pipeline,
        divide=pipeline.cut,
    )
