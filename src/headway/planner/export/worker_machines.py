"""What programs of workers are played on: a plan's workers on a network, as virtual machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from math import prod

from headway.collective.compression import parse_compression
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.model.gradient_buckets import fill_buckets
from headway.collective.model.link_fit import ring_factor
from headway.collective.model.scheme_ranking import FIRST_BUCKET
from headway.collective.nodes import Nodes
from headway.cost.network import HierarchicalNetwork
from headway.planner.explain.step_parts import level_of
from headway.plans import ExchangePlan, Plan
from headway.simulator.ranks import RankGrid, SimulatedRanks, SlowPath, StepFaults
from headway.simulator.synchrony import Cut, VirtualMachines

Shape = tuple[int, ...]
StepSeconds = Callable[[int, int], tuple[float, float]]
"""From worker and step to the seconds of its computation, and those of the optimiser's update."""


def worker_machines(
    plan: Plan,
    network: HierarchicalNetwork,
    step: StepSeconds,
    *,
    model: float,
    state: float,
    shapes: Sequence[Shape] = (),
    paths: Sequence[SlowPath] = (),
    deaths: Mapping[int, int] | None = None,
    cut: Cut | None = None,
) -> VirtualMachines:
    """The workers of a plan on a network.

    Messages between two nodes (what the outermost level in use joins) take turns on the wires of
    the nodes. With servers an update is theirs; else it is a part of a worker's step.

    Args:
        model: Bytes of the parameters.
        state: Of the optimiser, in models.
        shapes: Of the parameters in the order of the model; for what is compressed.
        paths: Links that are slow.
        deaths: Worker -> the first step, from 0, that it does not make.
    """
    each, servers = plan.ranks // plan.workers, plan.synchrony.has_servers
    node = _ranks_of_node(network, plan.ranks)
    met = bytes_of_meeting(plan, model, state, shapes)

    def compute(worker: int, number: int) -> float:
        computing, updating = step(worker, number)
        return computing if servers else computing + updating

    return VirtualMachines(
        compute=compute,
        wire=model / _rate(network, node),
        nodes=tuple(worker * each // node for worker in range(plan.workers)),
        inside=model / _rate(network, 1) if node > 1 else 0.0,
        latency=float(network.send(0.0, node)),
        update=max(step(worker, 0)[1] for worker in range(plan.workers)) if servers else 0.0,
        meeting=_meeting_seconds(plan, network, met / ring_factor(plan.workers), paths),
        slower=_slower(plan, paths),
        deaths=deaths or {},
        cut=cut,
    )


def bytes_of_meeting(plan: Plan, model: float, state: float, shapes: Sequence[Shape]) -> float:
    """What a worker sends when all meet: by a ring its model, and where it is averaged the state.

    Compressed, it is what the buckets of the run send of the difference, by their own arithmetic.

    Args:
        model: As of `worker_machines`, and so are `state` and `shapes`.
    """
    rules, workers = plan.synchrony, plan.workers
    if rules.compress == "none":
        averaged = rules.merge == "mean" and rules.state == "average"
        return ring_factor(workers) * model * (1 + (state if averaged else 0))
    compression = parse_compression(rules.compress)
    width = round(model / max(1, sum(map(prod, shapes))))
    sizes = [width * prod(shape) for shape in shapes]
    limit = ExchangePlan(compress=rules.compress).initial_bucket_bytes
    traffic = [
        bucket_traffic(
            [shapes[n] for n in bucket],
            Nodes.one(workers),
            compression=compression,
            element_bytes=width,
        )
        # The last layer's first, as gradients come.
        for bucket in fill_buckets(sizes, [*reversed(range(len(sizes)))], limit, FIRST_BUCKET)
    ]
    return sum(one.total for one in traffic) / workers


def _ranks_of_node(network: HierarchicalNetwork, ranks: int) -> int:
    place = network.levels.index(level_of(network, ranks))
    return int(network.levels[place - 1].width) if place else 1


def _rate(network: HierarchicalNetwork, stride: int) -> float:
    """Bytes per second of a message between two ranks so far apart, alone."""
    level = level_of(network, stride + 1)
    return (level.message or level.link).rate


def _meeting_seconds(
    plan: Plan, network: HierarchicalNetwork, sent: float, paths: Sequence[SlowPath]
) -> float:
    """In which all workers sum what they have; ranks at the same place in their workers do so side
    by side, each with its part of the model."""
    each = plan.ranks // plan.workers
    grid = RankGrid(data=plan.workers, tensor=each)
    seen = SimulatedRanks(grid, network, StepFaults(paths=tuple(paths))).group(0, [0])
    return float(seen.all_reduce(sent / (each // plan.copies), plan.workers, each))


def _slower(plan: Plan, paths: Sequence[SlowPath]) -> dict[tuple[int, int], float]:
    """How many times as long messages between two workers take."""
    each, workers = plan.ranks // plan.workers, range(plan.workers)
    members = [frozenset(plan.worker_ranks(worker * each)) for worker in workers]
    found: dict[tuple[int, int], float] = {}
    for path in paths:
        for one, other in permutations(workers, 2):
            here, there = members[one], members[other]
            if any(here & path.ends[n] and there & path.ends[1 - n] for n in (0, 1)):
                found[one, other] = found.get((one, other), 1.0) * path.factor
    return found
