"""The run to be verified: the executor on several ranks, recorded on rank 0.

After each step the ranks compare checksums of what they hold: ranks that drift apart are a
difference even where rank 0 is right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from headway.data import as_source
from headway.errors import NotEqual
from headway.plans import Plan
from headway.run.distributed import replica_sync
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import build_model
from headway.run.step.setup import recipe_plan
from headway.run.strategy.parameters import HeldParameters
from headway.verification.exchange_law import ExchangeLawMonitor, save_laws
from headway.verification.recording import Recorder, VerifyJob, build_training_state
from headway.verification.reference import save_cut


def record_split(place: LaunchEnv, job: VerifyJob, target: Path) -> None:
    """Run the recipe by its plan in float64; rank 0 saves the recording to `target`.

    Raises:
        NotEqual: Two ranks hold different parameters after a step.
    """
    with World.join(place, device="cpu", timeout_seconds=job.timeout_seconds) as world:
        record_in_world(world, job, target)


def record_in_world(world: World, job: VerifyJob, target: Path) -> None:
    """As `record_split`, in a world that is there already."""
    recipe = job.load()
    plan = _whole(recipe_plan(recipe, job.plan, world.ranks))
    trained = build_training_state(recipe, to_float64(build_model(recipe)))
    run = Executor(
        trained.model,
        trained.optimizer,
        loss=recipe.loss,
        plan=replace(plan, memory=replace(plan.memory, precision="float64")),
        scheduler=trained.scheduler,
        clip=recipe.clip,
        seed=recipe.seed,
        world=world,
    )
    recorder = Recorder(trained)
    watch = (
        ExchangeLawMonitor(plan.exchange) if not plan.exchange.exact and world.ranks > 1 else None
    )
    source = as_source(recipe.data())
    cursor = job.start(recipe, len(source))
    with run.loader(source, cursor=cursor, drop_last=recipe.drop_last) as loader:
        # The range first: else zip would read one more batch before it notices the end.
        for step, batch in zip(range(1, job.steps + 1), loader, strict=False):
            run.cut(batch)  # split layers have no exchange before
            exchange = run.strategy.exchange
            if watch and exchange:
                watch.before_step(exchange.now)
                # A re-arranged exchange has new methods: these are watched as well.
                exchange.on_made = watch.before_step
            loss = run.step(batch)
            # With priority an update takes the gradients away with it.
            run.strategy.show()
            recorder.take(step, loss, run.strategy.tensors_by_kind())
            if watch and exchange:
                watch.after_step(step, exchange.now)
            run.strategy.hide()
            _same_everywhere(run.strategy.parameters, world, step)
    # Not `run.close`, which would gather the model and leave the caller's world.
    run.strategy.close()
    if world.rank == 0:
        recorder.recording().save(target)
        if watch:
            save_laws(watch.laws, laws_file(target))
        if not plan.flushes and run.pipeline and run.pipeline.stages:
            save_cut(run.pipeline.stages, target)


def _whole(plan: Plan) -> Plan:
    """Buckets of an inexact exchange in one piece: laws are about whole ones."""
    if plan.exchange.exact:
        return plan
    return replace(plan, exchange=replace(plan.exchange, chunk="1 TiB"))


def laws_file(target: Path) -> Path:
    """Where the laws of an inexact exchange are written beside a recording."""
    return target.with_suffix(".laws.json")


def _same_everywhere(parameters: HeldParameters, world: World, step: int) -> None:
    """Ranks that hold a parameter hold the same numbers."""
    if world.ranks == 1:
        return
    own = replica_sync.checksums(parameters.named, parameters.away)
    everywhere: list[dict[str, int]] = [{}] * world.ranks
    dist.all_gather_object(everywhere, own)
    first: dict[str, tuple[int, int]] = {}
    for rank, sums in enumerate(everywhere):
        for name, found in sums.items():
            holder, expected = first.setdefault(name, (rank, found))
            if found != expected:
                raise NotEqual(
                    f"the ranks hold different numbers in parameter {name}",
                    where=f"step {step}, {world.ranks} processes",
                    why=f"Checksums of ranks {holder} and {rank} differ.",
                )
