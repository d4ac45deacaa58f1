"""The facts of a practitioner's questions, from a model's graph and a cluster.

Every number is a formula on the graph, priced by the cost model. The lemmas suppose data
parallelism. A *node* is what the outermost level in use joins: a machine, or a device where one
machine has them all. Invariant: what neither graph nor cluster says is named (`unknown`), not
guessed. Sources: those of `guidelines`; the choice per block is recomputation (Chen et al. 2016),
in the place of the algorithms of a convolution, whose work spaces only a measurement knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from headway.collective.link import LinkFit
from headway.cost.guidelines.das import Layer
from headway.cost.guidelines.model import layers_of
from headway.cost.guidelines.windows import LayerTimes
from headway.cost.network import LinkLevel
from headway.errors import PlanError
from headway.graph import ModelGraph, Operator
from headway.planner.binding import level_of
from headway.planner.degrees import Degrees, microbatches
from headway.planner.guidelines import Advice, Facts, guidelines
from headway.planner.knapsack import Algorithm, Minibatch, Profile, choose_minibatch
from headway.planner.operators import Setting, cost, legal
from headway.planner.planned import candidate_of
from headway.planner.search import Search


@dataclass(frozen=True)
class Job:
    """A model on so many devices.

    Attributes:
        engine: Of the model and the cluster.
        devices: That train.
        microbatch: Samples that a device computes at once.
    """

    engine: Search
    devices: int
    microbatch: int

    @property
    def batch(self) -> int:
        return self.engine.question.batch

    @cached_property
    def level(self) -> LinkLevel:
        """The outermost level in use."""
        return level_of(self.engine.question.machine.network, self.devices)

    @cached_property
    def node(self) -> int:
        """Devices of a node."""
        levels = self.engine.question.machine.network.levels
        place = levels.index(self.level)
        return min(self.devices, int(levels[place - 1].width)) if place else 1

    @cached_property
    def alone(self) -> tuple[float, float]:
        """Seconds of one micro-batch on one device in both passes, and bytes of its state."""
        stage = candidate_of(self.engine, self._degrees(1)).planned((0, len(self.engine.row)))
        return stage.stages[0].seconds, stage.stages[0].state

    @cached_property
    def compute(self) -> float:
        """T_C of the whole batch on one device."""
        return self.alone[0] * self.batch / self.microbatch

    @cached_property
    def overhead(self) -> float:
        """T_O: the exchange over all devices, none of it hidden, and the update."""
        candidate = candidate_of(self.engine, self._degrees(self.devices))
        stage = candidate.planned((0, len(self.engine.row))).stages[0]
        return float(candidate.pricing.summed(np.asarray(stage.params))) + stage.after

    def _degrees(self, data: int) -> Degrees:
        return Degrees(tensor=1, data=data, pipeline=1, microbatch=self.microbatch, microbatches=1)

    @property
    def flops(self) -> float:
        """Of a step."""
        work = self.engine.question.work
        return work.graph.flops.total * self.batch / work.samples

    # -- parts of the facts ----------------------------------------------------------------------

    @cached_property
    def minibatch(self) -> Minibatch | None:
        """What one device passes through the model at once, and which blocks it computes again;
        None: not even one sample fits."""
        share = max(1, self.batch // self.devices)
        try:
            return choose_minibatch(
                self._profile, microbatches(share), memory=self.engine.question.cap, samples=share
            )
        except PlanError:
            return None

    def _profile(self, samples: int) -> Profile:
        tables = self.engine.tables_of(1, samples)
        layers: dict[str, tuple[Algorithm, ...]] = {}
        for number, unit in enumerate(tables.row):
            keep, again = (tables.solved(unit.kind).rows[n, 0, 0, 0].tolist() for n in range(2))
            ways = [Algorithm("keep", keep[0] + keep[1], keep[4])]
            if again[4] < keep[4]:
                ways.append(Algorithm("recompute", 2 * again[0] + again[1], again[4]))
            layers[f"{number} {unit.module}".strip()] = tuple(ways)
        return Profile(layers=layers, rest=0.0, features=tables.transient, parameters=self.alone[1])

    @cached_property
    def times(self) -> tuple[LayerTimes, ...]:
        """Of each operator, on one device with its share of the batch in one pass."""
        setting = self.engine.tables_of(1, max(1, self.batch // self.devices)).setting
        return tuple(_times(setting, o) for o in setting.work.graph.operators)

    @cached_property
    def link(self) -> LinkFit | None:
        """Of a sum over all devices, by its times at an operator's mean size and at none."""
        network = self.engine.question.machine.network
        sent = [one.num_bytes for one in self.times if one.num_bytes]
        if self.devices == 1 or not sent:
            return None
        size = sum(sent) / len(sent)
        empty = float(network.all_reduce(0.0, self.devices))
        slope = (float(network.all_reduce(size, self.devices)) - empty) / size
        return LinkFit(empty, slope, ranks=self.devices)


def _times(setting: Setting, operator: Operator) -> LayerTimes:
    """Backward is divided as the FLOPs of both gradients, without FLOPs as their bytes."""
    forward, backward = cost(setting, operator, legal(setting, operator)[0], ())[:2].tolist()
    flops, traffic = operator.flops, operator.traffic
    work = flops if flops.input_gradient + flops.weight_gradient else traffic
    both = work.input_gradient + work.weight_gradient
    share = work.weight_gradient / both if both else 0.0
    tensors = setting.work.graph.tensors
    return LayerTimes(
        forward=forward,
        weight_grad=backward * share,
        input_grad=backward * (1.0 - share),
        num_bytes=float(sum(tensors[name].bytes for name in operator.parameters)),
    )


def advice_of(
    job: Job, *, efficiency: float = 0.8, measured: Minibatch | None = None
) -> tuple[list[Advice], list[str]]:
    """The answers, and what is not known.

    Args:
        job: The model on its devices.
        efficiency: Wanted share of linear speed-up.
        measured: Minibatch and algorithms of a device for an epoch, in place of what the cost model
            says of recomputation.
    """
    graph, nodes = job.engine.question.work.graph, job.devices // job.node
    rate = job.level.link.rate if nodes > 1 and math.isfinite(job.level.link.rate) else None
    shared = Facts(
        compute=job.compute,
        overhead=job.overhead,
        efficiency=efficiency,
        workers=job.devices,
        minibatch=measured or job.minibatch,
        period="an epoch" if measured else "a device's share of a step",
    )
    each = Facts(
        compute=job.compute / job.devices,
        parameter_bytes=graph.parameter_bytes,
        workers=nodes,
        server_rate=rate,
        link_rate=rate,
        node_rate=job.flops / job.compute * job.node,
        batch=job.batch,
        layers=by_module(graph),
        times=job.times,
        link=job.link,
    )
    return [*guidelines(shared), *guidelines(each)], list(_unknown(job, each, measured))


def by_module(graph: ModelGraph) -> list[Layer]:
    """The model's layers, named as a user knows them: by their modules."""
    modules = {operator.name: operator.module for operator in graph.operators}
    return [replace(layer, name=modules[layer.name] or layer.name) for layer in layers_of(graph)]


def _unknown(job: Job, facts: Facts, measured: Minibatch | None) -> Iterator[str]:
    graph = job.engine.question.work.graph
    if measured is not None:
        pass
    elif job.minibatch is None:
        yield "the minibatch: not even one sample fits on one device without a split of the model"
    else:
        yield (
            "algorithms of convolutions and attention, and their work spaces: --measure times them "
            "on this machine"
        )
    if job.devices == 1:
        yield "servers, exchange and groups: one device exchanges nothing"
    elif facts.link_rate is None:
        yield f"servers, exchange and groups: the cluster says no rate of {job.level.name} links"
    held = [o for o in graph.operators if o.parameters and o.flops.total]
    if len(held) > len(facts.layers):
        yield (
            f"volumes of {len(held) - len(facts.layers)} of {len(held)} products with weights: "
            "neither plain convolutions nor linear layers"
        )
    if job.link is not None:
        yield "the exchange in buckets: here every operator with parameters is a message of its own"
    if facts.link_rate is not None:
        yield "servers of another kind: those here have a node's link"
