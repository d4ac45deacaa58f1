"""Advice for a model on a cluster: the lemmas' facts, and how its layers are best split.

Every fact is a formula on the graph, priced by the cost model. The lemmas suppose data parallelism.
A *node* is what the outermost level in use joins: a machine, or a device where one machine has them
all. What neither graph nor cluster says is named, not guessed. The choice per block is
recomputation (Chen et al. 2016), in the place of the algorithms of a convolution, whose work spaces
only a measurement knows.

Splits of layers are closed forms on the captured layers: Kahira et al. 2021 (ParaDL); Das et al.
2016, hybrid parallelism, with the bandwidth of each level of links.

On devices of several types the lemmas are answered for each type as if all devices were of it.
Lemma 1 of Zou et al. 2017 for unequal devices, as headway derives it: T = T_C / G + T_O with G
devices like the fastest, G = sum over the devices of c_fastest / c.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from headway.collective.model.link_fit import LinkFit
from headway.cost.network import LinkLevel
from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.graph.model_graph import ModelGraph, Operator
from headway.planner.estimate.degrees import Degrees, microbatch_sizes
from headway.planner.estimate.operators import OperatorSetting, legal_rules, operator_cost
from headway.planner.explain.step_parts import level_of
from headway.planner.guidelines import zou
from headway.planner.guidelines.advice import (
    EFFICIENCY,
    Advice,
    AdviceFacts,
    guidelines,
    names_of_alike,
    one_and_more,
)
from headway.planner.guidelines.layer_algorithms import Minibatch, choose_minibatch
from headway.planner.guidelines.layer_parallelism import (
    ROWS,
    DasLayer,
    LayerTimes,
    Matmul,
    ParadlJob,
    ParadlLayer,
    ParadlRow,
    best_degree,
    data_filter,
    data_spatial,
    layers_of,
    possible,
)
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_point import Point
from headway.planner.whale.load_balance import whole_filling
from headway.units import format_bytes, format_number, format_seconds, format_share


@dataclass(frozen=True)
class AdviceRequest:
    """A model on so many devices.

    Attributes:
        microbatch: Samples that a device computes at once.
    """

    engine: PlanSearch
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
        stage = self.engine.candidate(self._degrees(1)).planned((0, len(self.engine.row)))
        return stage.stages[0].seconds, stage.stages[0].state

    @cached_property
    def compute(self) -> float:
        """T_C of the whole batch on one device."""
        return self.alone[0] * self.batch / self.microbatch

    @cached_property
    def overhead(self) -> float:
        """T_O: the exchange over all devices, none of it hidden, and the update."""
        candidate = self.engine.candidate(self._degrees(self.devices))
        stage = candidate.planned((0, len(self.engine.row))).stages[0]
        return float(candidate.pricing.summed(np.asarray(stage.params))) + stage.after

    def _degrees(self, data: int) -> Degrees:
        return Degrees(tensor=1, data=data, pipeline=1, microbatch=self.microbatch, microbatches=1)

    @property
    def flops(self) -> float:
        """Of a step."""
        work = self.engine.question.work
        return work.graph.flops.total * self.batch / work.samples

    @cached_property
    def minibatch(self) -> Minibatch | None:
        """What one device passes through the model at once, and which blocks it computes again;
        None: not even one sample fits."""
        share = max(1, self.batch // self.devices)
        try:
            return choose_minibatch(
                self._profile,
                microbatch_sizes(share),
                memory=self.engine.question.cap,
                samples=share,
            )
        except PlanError:
            return None

    def _profile(self, samples: int) -> AlgorithmProfile:
        tables = self.engine.tables_of(1, samples)
        layers: dict[str, tuple[LayerAlgorithm, ...]] = {}
        for number, unit in enumerate(tables.row):
            keep, again = (tables.solved(unit.kind).rows[n, 0, 0, 0].tolist() for n in range(2))
            ways = [LayerAlgorithm("keep", keep[0] + keep[1], keep[4])]
            if again[4] < keep[4]:
                ways.append(LayerAlgorithm("recompute", 2 * again[0] + again[1], again[4]))
            layers[f"{number} {unit.module}".strip()] = tuple(ways)
        return AlgorithmProfile(
            layers=layers, rest=0.0, features=tables.transient, parameters=self.alone[1]
        )

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
        # Two points make the line: a sum of nothing is the latency.
        empty = float(network.all_reduce(0.0, self.devices))
        slope = (float(network.all_reduce(size, self.devices)) - empty) / size
        return LinkFit(empty, slope, ranks=self.devices)


def _times(setting: OperatorSetting, operator: Operator) -> LayerTimes:
    # Without a tensor axis the first rule is the whole operator.
    forward, backward = operator_cost(setting, operator, legal_rules(setting, operator)[0], ())[
        :2
    ].tolist()
    flops, traffic = operator.flops, operator.traffic
    # Backward is divided as the FLOPs of both gradients, without FLOPs as their bytes.
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
    job: AdviceRequest, *, measured: Minibatch | None = None
) -> tuple[list[Advice], list[str]]:
    """The answers, and what is not known.

    Args:
        measured: Minibatch and algorithms of a device for an epoch, in place of what the cost model
            says of recomputation.
    """
    graph, nodes = job.engine.question.work.graph, job.devices // job.node
    rate = job.level.link.rate if nodes > 1 and math.isfinite(job.level.link.rate) else None
    shared = AdviceFacts(
        compute=job.compute,
        overhead=job.overhead,
        workers=job.devices,
        minibatch=measured or job.minibatch,
        period="an epoch" if measured else "a device's share of a step",
    )
    each = AdviceFacts(
        # In Lemma 2 T_C is the compute of a round, in which each device has its share of the batch.
        compute=job.compute / job.devices,
        parameter_bytes=graph.parameter_bytes,
        workers=nodes,
        server_rate=rate,
        link_rate=rate,
        # What the cost model says that a device reaches, not its peak.
        node_rate=job.flops / job.compute * job.node,
        batch=job.batch,
        layers=by_module(graph),
        times=job.times,
        link=job.link,
    )
    return [*guidelines(shared), *guidelines(each)], list(_unknown(job, each, measured))


def by_module(graph: ModelGraph) -> list[DasLayer]:
    """The model's layers, named as a user knows them: by their modules."""
    modules = {operator.name: operator.module for operator in graph.operators}
    return [replace(layer, name=modules[layer.name] or layer.name) for layer in layers_of(graph)]


def _unknown(job: AdviceRequest, facts: AdviceFacts, measured: Minibatch | None) -> Iterator[str]:
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


def advice_of_splits(job: AdviceRequest) -> Iterator[Advice]:
    """The answers that the model's layers allow, for more than one device."""
    if job.devices > 1:
        yield from _table(job)
        yield from _degrees(job)


def rows_of(job: AdviceRequest) -> dict[str, ParadlRow]:
    """ParaDL's rows for the job's devices, of one step; with hybrids of nodes where there are some.

    Empty for a model without convolutions.
    """
    layers = tuple(_layers(job))
    if not any(layer.points > 1 for layer in layers):
        return {}
    link = job.level.link
    batch = float(job.batch)
    asked = ParadlJob(
        layers=layers,
        samples=batch,
        batch=batch,
        latency=link.latency,
        seconds_per_byte=0.0 if math.isinf(link.rate) else 1.0 / link.rate,
        element=float(job.engine.question.itemsize),
    )
    p, node = job.devices, job.node
    found = {name: row(asked, p) for name, row in ROWS.items()}
    if 1 < node < p:
        found[f"data and filter (groups of {node})"] = data_filter(asked, p // node, node)
        found[f"data and spatial (groups of {node})"] = data_spatial(asked, p // node, node)
    return found


def _layers(job: AdviceRequest) -> Iterator[ParadlLayer]:
    operators = job.engine.question.work.graph.operators
    times = {o.name: t for o, t in zip(operators, job.times, strict=True)}
    share = max(1, job.batch // job.devices)
    rate = job.engine.question.machine.device.update
    for layer in layers_of(job.engine.question.work.graph):
        one = times[layer.name]
        rows = layer.kernel[0] - 1  # of both neighbours together
        yield ParadlLayer(
            forward=one.forward / share,
            backward=(one.weight_grad + one.input_grad) / share,
            update=rate * layer.weights,
            x=layer.ifm * math.prod(layer.input),
            y=layer.ofm * math.prod(layer.output),
            w=layer.weights,
            filters=layer.ofm,
            channels=layer.ifm,
            # The positions of a linear layer are (n, 1): there is no space to split.
            points=math.prod(layer.input) if layer.input[1] > 1 else 1,
            halo_x=rows * layer.input[1] * layer.ifm,
            halo_dy=0 if layer.first else rows * layer.output[1] * layer.ofm,
        )


def _table(job: AdviceRequest) -> Iterator[Advice]:
    rows = rows_of(job)
    if not rows:
        return
    cap, p = job.engine.question.cap, job.devices
    can = {name: row for name, row in rows.items() if possible(row, p, cap)}
    best = min(can, key=lambda name: can[name].seconds, default=None)
    answer = f"{best}. " if best else "None of them can be on so many devices. "
    answer += "Per step: " + "; ".join(_line(name, row, p, cap) for name, row in rows.items())
    yield Advice(
        question=f"Which split of the convolutions is best for {p} devices?",
        answer=answer + ".",
        numbers={name: row.seconds for name, row in rows.items()} | {"p": p},
        source="Kahira et al. 2021 (ParaDL), table of its cost model",
    )


def _line(name: str, row: ParadlRow, devices: int, cap: float) -> str:
    if devices > row.limit:
        return f"{name} at most {row.limit} device{'s' * (row.limit > 1)}"
    text = f"{name} {format_seconds(row.seconds)}, of these {format_seconds(row.communication)} "
    text += f"exchange, {format_bytes(row.memory)}"
    return text if row.memory <= cap else f"{text}, too much"


def _degrees(job: AdviceRequest) -> Iterator[Advice]:
    """For each kind of product the tensor degree with the least exchange."""
    # The first layer has the same volumes, only less to compute.
    layers = (replace(one, first=False) for one in by_module(job.engine.question.work.graph))
    found = names_of_alike(layers)
    if not found:
        return
    network = job.engine.question.machine.network

    def rate(size: int, stride: int) -> float:
        return float(network.rate_of(size, stride))

    texts, numbers = [], {"N": float(job.devices), "MB": float(job.batch)}
    for layer, names in found.items():
        product = Matmul(
            inputs=layer.ifm * math.prod(layer.input),
            outputs=layer.ofm * math.prod(layer.output),
            weights=layer.weights,
            element=layer.element,
        )
        degree = best_degree(product, job.batch, job.devices, rate=rate)
        numbers[names[0]] = degree
        texts.append(f"{degree} for {one_and_more(names)}")
    yield Advice(
        question="Which tensor degree of each product exchanges least?",
        answer="; ".join(texts) + ".",
        numbers=numbers,
        source="Das et al. 2016, hybrid parallelism, with the bandwidth of each level of links",
    )


def advice_of_mixed(search: PlanSearch, point: Point) -> tuple[list[Advice], list[str]]:
    """The answers, and what is not known."""
    jobs = {kind: _job(search, point, kind) for kind, _ in point.amounts}
    answers = list(_of_group(point, jobs))
    unknown: list[str] = []
    for kind, job in jobs.items():
        own, lacking = advice_of(job)
        as_if = f"[as if all {job.devices} devices were {kind}] " if len(jobs) > 1 else ""
        answers += [
            replace(one, question=f"{as_if}{one.question}")
            for one in (*own, *advice_of_splits(job))
        ]
        unknown += [line.partition(": --measure")[0] for line in lacking]  # of one type alone
    return answers, list(dict.fromkeys(unknown))


def _job(search: PlanSearch, point: Point, kind: str) -> AdviceRequest:
    """All devices of the plan, with its largest micro-batch on this type, or a device's share."""
    question = search.question.of(kind)
    sizes = [one.microbatch for one in point.classes if kind in one.kinds]
    share = max(1, question.batch // point.devices)
    return AdviceRequest(PlanSearch(question), point.devices, min(share, *sizes))


def _of_group(point: Point, jobs: Mapping[str, AdviceRequest]) -> Iterator[Advice]:
    yield _idle(point)
    if len(jobs) > 1:
        yield _shares(point, jobs)
        yield _worth(point, jobs)


def _idle(point: Point) -> Advice:
    kinds = [kind for kind, _ in point.amounts]
    shares = {kind: point.idle(kind) for kind in kinds}
    words = ", ".join(f"{kind} for {format_share(share)}" for kind, share in shares.items())
    slowest = max(
        (stage.seconds, number, kind)
        for one in point.classes
        for number, (kind, stage) in enumerate(zip(one.kinds, one.stages, strict=True))
    )
    return Advice(
        question="How well are the plan's own devices filled?",
        answer=f"Of a step of {format_seconds(point.seconds)} they do not compute: {words}. All "
        f"wait for stage {slowest[1]} on {slowest[2]}, {format_seconds(slowest[0])} per "
        "micro-batch.",
        numbers={f"idle {kind}": share for kind, share in shares.items()}
        | {"step": point.seconds, "stage": slowest[1], "seconds": slowest[0]},
        source="Jia et al. 2022 (Whale), balancing between task graphs",
    )


def _shares(point: Point, jobs: Mapping[str, AdviceRequest]) -> Advice:
    batch = next(iter(jobs.values())).batch
    each = {kind: _sample(job) for kind, job in jobs.items()}
    numbers = dict(point.amounts)
    costs = [np.arange(1, batch + 1, dtype=np.float64) * each[kind] for kind in numbers]
    sizes, longest = whole_filling(costs, list(numbers.values()), batch)
    even = -(-batch // point.devices) * max(each.values())
    shares = dict(zip(numbers, sizes, strict=True))
    words = ", ".join(f"{shares[kind]} for each of {n} {kind}" for kind, n in numbers.items())
    times = ", ".join(f"{format_seconds(one)} on {kind}" for kind, one in each.items())
    return Advice(
        question="How should the samples be shared among them, with data parallelism?",
        answer=f"Of {batch} samples {words}: a sample takes {times}, so the passes take "
        f"{format_seconds(longest)}; with even shares {format_seconds(even)}, "
        f"{format_number(even / longest)} times as long.",
        numbers={f"share {kind}": share for kind, share in shares.items()}
        | {f"devices {kind}": number for kind, number in numbers.items()}
        | {f"sample {kind}": one for kind, one in each.items()}
        | {"MB": batch, "passes": longest, "even": even, "gain": even / longest},
        source="Jia et al. 2022 (Whale), balancing inside a task graph, by headway's water filling",
    )


def _worth(point: Point, jobs: Mapping[str, AdviceRequest]) -> Advice:
    """Lemma 1 with the group as a number of its fastest devices."""
    each = {kind: _sample(job) for kind, job in jobs.items()}
    fastest = min(each, key=lambda kind: each[kind])
    worth = sum(n * each[fastest] / each[kind] for kind, n in point.amounts)
    compute, overhead = jobs[fastest].compute, max(job.overhead for job in jobs.values())
    ratio = overhead / compute
    reached = zou.efficiency(ratio, worth)
    verdict = "at least" if reached >= EFFICIENCY else "less than"
    return Advice(
        question="How many of the fastest devices are they worth?",
        answer=f"{format_number(worth)} x {fastest}. Sharing the batch as above they are "
        f"{format_number(zou.speed_up(ratio, worth))} times as fast as one of these, "
        f"{format_share(reached)} of what they are worth, {verdict} the {EFFICIENCY:.0%} wanted: "
        f"what does not shrink takes {format_share(ratio)} of the compute.",
        numbers={
            "G": worth,
            "T_C": compute,
            "T_O": overhead,
            "R_O": ratio,
            "alpha_G": reached,
            "speed_up": zou.speed_up(ratio, worth),
            "alpha": EFFICIENCY,
        },
        source="Zou et al. 2017, Lemma 1, with G as a sum of c_fastest / c",
    )


def _sample(job: AdviceRequest) -> float:
    """c: seconds of a sample's passes on one device, at the job's micro-batch."""
    return job.alone[0] / job.microbatch
