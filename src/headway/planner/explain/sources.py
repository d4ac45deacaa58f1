"""Where each number of a plan comes from: a measurement, a preset, or a formula with its paper.

Every figure that a plan shows has a formula here, and every formula names the numbers of the
machine that go into it, each with its own source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from headway.cost.network import LinkLevel
from headway.planner.search.request import PlanRequest
from headway.units import format_bytes, format_flops, format_rate, format_seconds

DEVICE = ("efficiency", "depth", "memory_rate", "kernel", "dispatch", "sharpness")


@dataclass(frozen=True, kw_only=True)
class MachineNumber:
    """A number of the machine.

    Attributes:
        name: "device.memory_rate", "links.node.latency".
        source: A datasheet, a measurement with its date, "assumed", "fitted", or the file.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class FigureFormula:
    """How a figure of a plan is made.

    Attributes:
        formula: In symbols: t, d, p the degrees, m micro-batches of b samples.
        uses: Names of numbers of the machine; "links.*" stands for those of the level in use.
    """

    figure: str
    formula: str
    paper: str
    code: str
    uses: tuple[str, ...] = ()


_LINKS = ("links.*.rate", "links.*.latency")
FORMULAS = (
    FigureFormula(
        figure="step time",
        formula="what the schedule's table takes with these stages, messages and sums; cuts by "
        "sum of t_i + (m - 1) max t_i; gradients where computation waits for them, and the update",
        paper="Zheng et al. 2022 (Alpa), equation 2",
        code="planner/search/candidate.py, planner/estimate/pricing.py, "
        "planner/estimate/stage_cut.py",
    ),
    FigureFormula(
        figure="time of an operator",
        formula="max(FLOPs / (peak efficiency) (1 + depth / k), bytes / memory rate), joined with "
        "the host's launches",
        paper="Williams et al. 2009 (roofline); Bang et al. 2024 (vTrain's runs), launches",
        code="planner/estimate/operators.py, cost/device.py",
        uses=("device.peak", *(f"device.{name}" for name in DEVICE)),
    ),
    FigureFormula(
        figure="exchanges",
        formula="all-reduce: least of 2 (n-1) a + 2 (n-1)/n S/B, 2 a log2 n + 2 S/B, and levels; "
        "all-gather, reduce-scatter: (n-1) a + (n-1)/n S/B",
        paper="Thakur, Rabenseifner and Gropp 2005",
        code="cost/network.py",
        uses=_LINKS,
    ),
    FigureFormula(
        figure="messages between stages",
        formula="a + S/B",
        paper="Hockney 1994",
        code="cost/network.py",
        uses=("links.*.message",),
    ),
    FigureFormula(
        figure="update",
        formula="seconds per parameter, divided by d with ZeRO",
        paper="Rajbhandari et al. 2020 (ZeRO)",
        code="planner/estimate/pricing.py",
        uses=("device.update",),
    ),
    FigureFormula(
        figure="weights, gradients, optimiser",
        formula="bytes per parameter 4 + 4 + 8 (32 bits) or 2 + 4 + 12 (16 bits), the last one, "
        "two or three of them divided by d (ZeRO 1, 2, 3)",
        paper="Rajbhandari et al. 2020 (ZeRO), section 3",
        code="planner/estimate/degrees.py, cost/memory.py",
    ),
    FigureFormula(
        figure="activations",
        formula="bytes that autograd keeps, of the captured graph, times the micro-batches under "
        "way: min(m, p - i) in stage i of 1F1B, else as the schedule's table has them",
        paper="Narayanan et al. 2021 (1F1B)",
        code="graph/aten/flops.py, planner/estimate/pipeline_time.py",
    ),
    FigureFormula(
        figure="allowed memory",
        formula="what --memory says, else the device's",
        paper="-",
        code="planner/search/request.py",
        uses=("device.memory",),
    ),
    FigureFormula(
        figure="R_O",
        formula="(step - T_C / devices) / T_C, T_C the passes of the batch on one device",
        paper="Zou et al. 2017, Lemma 1",
        code="planner/explain/alternatives.py",
    ),
    FigureFormula(
        figure="MFU",
        formula="FLOPs of the model / (step devices peak)",
        paper="Chowdhery et al. 2022 (PaLM), section 4.1",
        code="planner/explain/alternatives.py",
        uses=("device.peak",),
    ),
    FigureFormula(
        figure="money",
        formula="devices x step x price of an hour / 3600",
        paper="-",
        code="planner/search/request.py",
        uses=("price",),
    ),
)
"""In the order in which a plan's figures are read."""


def machine_numbers(question: PlanRequest) -> Iterator[MachineNumber]:
    """Of the device, then of the levels of links from the innermost outwards, then the price."""
    device = question.machine.device
    said = dict(device.source)
    for dtype, rate in sorted(device.peak.items()):
        yield MachineNumber(
            name=f"device.peak.{dtype}",
            value=format_flops(rate),
            source=said.get("peak", "assumed"),
        )
    plain = {
        "memory": format_bytes(device.memory),
        "memory_rate": format_rate(device.memory_rate),
        "efficiency": f"{device.efficiency:.3g}",
        "depth": f"{device.depth:.3g}",
        "kernel": format_seconds(device.kernel),
        "dispatch": format_seconds(device.dispatch),
        "sharpness": f"{device.sharpness:.3g}",
        "update": f"{device.update:.3g} s",
    }
    if device.gather:
        plain["gather"] = format_seconds(device.gather)
    for name, value in plain.items():
        yield MachineNumber(name=f"device.{name}", value=value, source=said.get(name, "assumed"))
    for place, level in enumerate(question.machine.network.levels):
        yield from _of_level(level, {} if place else said)
    if question.price is not None:
        yield MachineNumber(
            name="price", value=f"{question.price:g} an hour", source="given by the user"
        )


def _of_level(level: LinkLevel, said: dict[str, str]) -> Iterator[MachineNumber]:
    """`said`: sources that fitting wrote beside those of the device, for the innermost level."""
    link, message = level.link, level.message or level.link
    values = {
        "rate": format_rate(link.rate),
        "latency": format_seconds(link.latency),
        "message": f"{format_rate(message.rate)}, {format_seconds(message.latency)}",
    }
    fitted = {"rate": "link_rate", "latency": "link_latency", "message": "message_rate"}
    for name, value in values.items():
        own = level.source.get(name) or level.source.get("rate", "assumed")
        source = said.get(fitted[name]) or own
        yield MachineNumber(name=f"links.{level.name}.{name}", value=value, source=source)


def in_data(question: PlanRequest) -> dict[str, object]:
    """Numbers and formulas as plain data."""
    return {
        "numbers": [asdict(one) for one in machine_numbers(question)],
        "formulas": [asdict(one) for one in FORMULAS],
    }


def in_lines(question: PlanRequest) -> Iterator[str]:
    """Formulas and numbers for people."""
    for one in FORMULAS:
        yield f"  {one.figure}: {one.formula}"
        uses = f"; from {', '.join(one.uses)}" if one.uses else ""
        yield f"      {one.paper}; {one.code}{uses}"
    rows = [(one.name, one.value, one.source) for one in machine_numbers(question)]
    widths = [max(len(row[n]) for row in rows) for n in range(2)]
    for name, value, source in rows:
        yield f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source}"


def kinds(sources: Sequence[MachineNumber]) -> str:
    """ "assumed, fitted 2026-11-21": what the sources begin with, each once."""
    return ", ".join(sorted({one.source.partition(":")[0].partition(" (")[0] for one in sources}))
