"""Chimera's choice of replicas, stages and micro-batch size: greedy B, then the least T.

Every (W, D) with W D = P is tried; for each the largest micro-batch that fits is taken (it uses a
device best), and the performance model orders what is left. Invariant: every candidate fits in
memory and uses every sample of the mini-batch. Source: Li and Hoefler, SC 2021, section 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.cluster.link import Link
from headway.cost.pipeline import Shape, StepPrice, StepTimes, price_step, simulate_step
from headway.errors import PlanError
from headway.units import format_bytes

ADAM = 4
"""State of a layer in its weights: weights, gradients, and two moments of Adam."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers, as the choice sees it.

    Attributes:
        layers: How many.
        forward: Seconds of the forward of one layer for one sample.
        launch: Seconds that the forward of one stage costs beyond, whatever its size: why larger
            micro-batches are better.
        activation: Bytes that go from a layer to the next, per sample.
        held: Bytes that a layer keeps for its backward, per sample.
        gradient: Bytes of the gradients of a layer.
        state: Bytes of a layer's weights, gradients and optimiser state together.
    """

    layers: int
    forward: float
    activation: float
    held: float
    gradient: float
    state: float
    launch: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the choice is made for.

    Attributes:
        workers: P.
        batch: Samples of a mini-batch.
        memory: Bytes of one worker.
        link: Between any two workers.
        pipes: 2f.
        mode: Beyond N = D. "doubling" implies recomputation.
        recompute: Backward computes the forward again: B = 3F instead of 2F.
    """

    workers: int
    batch: int
    memory: float
    link: Link
    pipes: int = 2
    mode: str = "direct"
    recompute: bool = False

    @property
    def recomputes(self) -> bool:
        return self.recompute or self.mode == "doubling"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to split a job.

    Attributes:
        replicas: W.
        microbatch: B, samples.
        shape: D, N, pipes and mode.
        times: Of the parts of a step.
        memory: Bytes of the worker that needs most.
        price: By the performance model.
    """

    replicas: int
    microbatch: int
    shape: Shape
    times: StepTimes
    memory: float
    price: StepPrice

    def simulated(self) -> float:
        """T by execution of the table."""
        return simulate_step(self.shape, self.times)


def rabenseifner(ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of an all-reduce: 2 log2(r) alpha + 2 (r-1)/r beta L (Rabenseifner's algorithm).

    Args:
        ranks: r, at least 1.
        num_bytes: L.
        link: alpha and 1 / beta.
    """
    if ranks == 1:
        return 0.0
    return 2 * math.log2(ranks) * link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.rate


def choose(workload: Workload, setting: Setting) -> tuple[Candidate, ...]:
    """All candidates, the fastest first; of equal ones the one with fewer stages.

    D is even, divides the layers, and allows the pipes. B is the largest that divides a replica's
    samples, fits in memory, and leaves at least D micro-batches; if none leaves so many, the
    largest number of micro-batches (B = 1) is taken, if it fits.

    The model can prefer another candidate than `Candidate.simulated` does where a little idle time
    lets an all-reduce start early: execution then hides it behind compute too, the model does not.

    Raises:
        PlanError: Nothing fits; says for each D why.
    """
    found, problems = [], refused(workload, setting)
    for stages in _depths(setting):
        size = greedy_microbatch(workload, setting, stages)
        if size is not None and not _impossible(workload, setting, stages):
            found.append(_candidate(workload, setting, stages, size))
    if not found:
        raise PlanError(
            f"no Chimera pipeline for {setting.workers} workers with "
            f"{format_bytes(setting.memory)} each",
            problems=problems or [f"{setting.workers} workers: an even number is needed"],
            fix="Give more memory, recompute activations, or take another number of workers.",
        )
    return tuple(sorted(found, key=lambda c: (c.price.seconds, c.shape.stages)))


def refused(workload: Workload, setting: Setting) -> list[str]:
    """For each even D that divides P and is no candidate, why not."""
    problems = []
    for stages in _depths(setting):
        problem = _impossible(workload, setting, stages)
        if not problem and greedy_microbatch(workload, setting, stages) is None:
            least = format_bytes(_memory(workload, setting, stages, 1))
            problem = f"{stages} stages: {least} are needed at B = 1"
        if problem:
            problems.append(problem)
    return problems


def _depths(setting: Setting) -> list[int]:
    return [d for d in range(2, setting.workers + 1, 2) if setting.workers % d == 0]


def _impossible(workload: Workload, setting: Setting, stages: int) -> str:
    """Why there cannot be so many stages; empty: there can."""
    replicas = setting.workers // stages
    if workload.layers % stages:
        return f"{stages} stages: they do not divide {workload.layers} layers"
    if stages % setting.pipes:
        return f"{stages} stages: {setting.pipes} pipes do not divide them"
    if setting.batch % replicas:
        return f"{stages} stages: {replicas} replicas do not divide {setting.batch} samples"
    return ""


def greedy_microbatch(workload: Workload, setting: Setting, stages: int) -> int | None:
    """B for D stages, see `choose`; None: not even B = 1 fits."""
    share = setting.batch * stages // setting.workers
    sizes = [b for b in range(1, share // stages + 1) if share % b == 0] or [1]
    fitting = [b for b in sizes if _memory(workload, setting, stages, b) <= setting.memory]
    return max(fitting, default=None)


def _memory(workload: Workload, setting: Setting, stages: int, microbatch: int) -> float:
    """Bytes of the fullest worker: copies of 2f stages, and the most live activations."""
    layers = workload.layers / stages
    number = setting.batch * stages // setting.workers // microbatch
    held = workload.held * layers * microbatch
    weights = setting.pipes * layers * workload.state
    if not setting.recomputes:
        return weights + min(number, stages) * held
    live = min(number, 2 * stages if setting.mode == "doubling" else stages)
    return weights + live * workload.activation * microbatch + held


def _candidate(workload: Workload, setting: Setting, stages: int, microbatch: int) -> Candidate:
    replicas = setting.workers // stages
    layers = workload.layers // stages
    forward = workload.launch + workload.forward * layers * microbatch
    times = StepTimes(
        forward=forward,
        backward=forward * (3 if setting.recomputes else 2),
        wire=workload.activation * microbatch / setting.link.rate,
        latency=setting.link.latency,
        sync=rabenseifner(setting.pipes * replicas, workload.gradient * layers, setting.link),
    )
    number = setting.batch // replicas // microbatch
    shape = Shape(stages, number, setting.pipes, setting.mode)
    return Candidate(
        replicas=replicas,
        microbatch=microbatch,
        shape=shape,
        times=times,
        memory=_memory(workload, setting, stages, microbatch),
        price=price_step(shape, times),
    )
