"""How a network's layers are best split over devices: ParaDL's table, and Das' two axes.

Both are closed forms on the layers of a captured model; the search prices the same splits operator
by operator. Invariant: a row that the devices or their memory forbid is named as such and never
recommended. Sources: Kahira et al. 2021 (ParaDL); Das et al. 2016, hybrid parallelism, with the
bandwidth of each level of links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headway.cost.guidelines import das, paradl
from headway.cost.guidelines.model import layers_of
from headway.planner.facts import Job, by_module
from headway.planner.guidelines import Advice
from headway.units import format_bytes, format_seconds


def advice_of_splits(job: Job) -> Iterator[Advice]:
    """The answers that the model's layers allow, for more than one device."""
    if job.devices > 1:
        yield from _table(job)
        yield from _degrees(job)


# -- ParaDL ---------------------------------------------------------------------------------------


def rows_of(job: Job) -> dict[str, paradl.Row]:
    """ParaDL's rows for the job's devices, of one step; with hybrids of nodes where there are some.

    Empty for a model without convolutions.
    """
    layers = tuple(_layers(job))
    if not any(layer.points > 1 for layer in layers):
        return {}
    link = job.level.link
    batch = float(job.batch)
    asked = paradl.Job(
        layers=layers,
        samples=batch,
        batch=batch,
        latency=link.latency,
        seconds_per_byte=0.0 if math.isinf(link.rate) else 1.0 / link.rate,
        element=float(job.engine.question.itemsize),
    )
    p, node = job.devices, job.node
    found = {name: paradl.ROWS[name](asked, p) for name in ("data", "spatial", "filter", "channel")}
    if 1 < node < p:
        found[f"data and filter (groups of {node})"] = paradl.data_filter(asked, p // node, node)
        found[f"data and spatial (groups of {node})"] = paradl.data_spatial(asked, p // node, node)
    return found


def _layers(job: Job) -> Iterator[paradl.Layer]:
    """With seconds of a sample, from those of a device's share in one pass."""
    operators = job.engine.question.work.graph.operators
    times = {o.name: t for o, t in zip(operators, job.times, strict=True)}
    share = max(1, job.batch // job.devices)
    rate = job.engine.question.machine.device.update
    for layer in layers_of(job.engine.question.work.graph):
        one = times[layer.name]
        rows = layer.kernel[0] - 1  # of both neighbours together
        yield paradl.Layer(
            forward=one.forward / share,
            backward=(one.weight_grad + one.input_grad) / share,
            update=rate * layer.weights,
            x=layer.ifm * math.prod(layer.input),
            y=layer.ofm * math.prod(layer.output),
            w=layer.weights,
            filters=layer.ofm,
            channels=layer.ifm,
            points=math.prod(layer.input) if layer.input[1] > 1 else 1,
            halo_x=rows * layer.input[1] * layer.ifm,
            halo_dy=0 if layer.first else rows * layer.output[1] * layer.ofm,
        )


def _table(job: Job) -> Iterator[Advice]:
    rows = rows_of(job)
    if not rows:
        return
    cap, p = job.engine.question.cap, job.devices
    can = {name: row for name, row in rows.items() if paradl.possible(row, p, cap)}
    best = min(can, key=lambda name: can[name].seconds, default=None)
    answer = f"{best}. " if best else "None of them can be on so many devices. "
    answer += "Per step: " + "; ".join(_line(name, row, p, cap) for name, row in rows.items())
    yield Advice(
        question=f"Which split of the convolutions is best for {p} devices?",
        answer=answer + ".",
        numbers={name: row.seconds for name, row in rows.items()} | {"p": p},
        source="Kahira et al. 2021 (ParaDL), table of its cost model",
    )


def _line(name: str, row: paradl.Row, devices: int, cap: float) -> str:
    if devices > row.limit:
        return f"{name} at most {row.limit} device{'s' * (row.limit > 1)}"
    text = f"{name} {format_seconds(row.seconds)}, of these {format_seconds(row.communication)} "
    text += f"exchange, {format_bytes(row.memory)}"
    return text if row.memory <= cap else f"{text}, too much"


# -- Das ------------------------------------------------------------------------------------------


def _degrees(job: Job) -> Iterator[Advice]:
    """For each kind of product the tensor degree with the least exchange."""
    found: dict[das.Layer, list[str]] = {}
    for layer in by_module(job.engine.question.work.graph):
        found.setdefault(replace(layer, name="", first=False), []).append(layer.name)
    if not found:
        return
    network = job.engine.question.machine.network

    def rate(size: int, stride: int) -> float:
        return float(network.rate_of(size, stride))

    texts, numbers = [], {"N": float(job.devices), "MB": float(job.batch)}
    for layer, names in found.items():
        product = das.Matmul(
            inputs=layer.ifm * math.prod(layer.input),
            outputs=layer.ofm * math.prod(layer.output),
            weights=layer.weights,
            element=layer.element,
        )
        degree = das.best_degree(product, job.batch, job.devices, rate=rate)
        numbers[names[0]] = degree
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        texts.append(f"{degree} for {names[0]}{more}")
    yield Advice(
        question="Which tensor degree of each product exchanges least?",
        answer="; ".join(texts) + ".",
        numbers=numbers,
        source="Das et al. 2016, hybrid parallelism, with the bandwidth of each level of links",
    )
