"""`headway schedule choose`: replicas, stages and micro-batch size for Chimera.

Every (W, D) with W D = P is priced by Chimera's performance model and by timing its table; the
recipe lines that are printed are those of the model's best candidate. Li and Hoefler, SC 2021,
section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.cli.schedule.show import check_at_least_1
from headway.cli.terminal.console import parse_option, say, say_json
from headway.cluster.link import Link
from headway.cost.pipeline_model import (
    ADAM,
    ChimeraCandidate,
    ChimeraSetting,
    EqualLayers,
    refused_depths,
)
from headway.cost.pipeline_model import rank_chimera_candidates as candidates
from headway.errors import UsageError
from headway.units import format_bytes, format_seconds, parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from headway.run.measure.recipe_model import ModelCosts


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EqualLayersModel:
    """A model of equal layers; what is not given is measured, where a recipe is given.

    Attributes:
        batch: Samples of the global batch.
        forward: Time of the forward of one layer for one sample.
        launch: Time that the forward of a stage takes beyond that, whatever its size.
        activation: Size of what goes from one layer to the next, for one sample.
        held: Size of what a layer keeps for its backward, for one sample.
        weights: Size of the parameters of a layer.
        state: Size of a layer's parameters, gradients and optimiser state together; by default 4
            times --weights, as with Adam.
    """

    batch: int | None = None
    layers: int | None = None
    forward: str | None = None
    launch: str = "0 s"
    activation: str | None = None
    held: str | None = None
    weights: str | None = None
    state: str | None = None


_UNKNOWN = EqualLayersModel()


def choose(
    recipe: str | None = None,
    /,
    *,
    ranks: int,
    memory: str,
    bandwidth: str,
    latency: str = "0 s",
    model: EqualLayersModel = _UNKNOWN,
    pipes: int = 2,
    mode: Literal["direct", "doubling", "halving"] = "direct",
    recompute: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Choose copies, stages and micro-batch of a Chimera pipeline; prints lines for a recipe.

    Args:
        recipe: Measure this recipe's model here, in place of the numbers that are not given.
        ranks: P, the number of processes.
        memory: Memory of one rank, as in "16 GiB".
        bandwidth: Rate of the link between any two ranks, as in "10 Gbit/s".
        latency: Latency of that link.
        model: Of equal layers.
        pipes: Simultaneous pipes, half of them in each direction.
        mode: How the schedule continues with more micro-batches than stages.
        recompute: Recompute activations in backward instead of keeping them.
    """
    check_at_least_1(ranks=ranks, pipes=pipes)
    measured = None
    if recipe is not None:
        from headway.run.measure.recipe_model import measure_model_costs

        measured = measure_model_costs(recipe, ranks)
    workload, batch = _workload(model, measured)
    setting = ChimeraSetting(
        workers=ranks,
        batch=batch,
        memory=_positive("memory", memory, parse_bytes),
        link=Link(
            rate=_positive("bandwidth", bandwidth, parse_rate),
            latency=parse_option("--latency", latency, parse_seconds),
        ),
        pipes=pipes,
        mode=mode,
        recompute=recompute,
    )
    found = candidates(workload, setting)
    if json:
        say_json([_facts(candidate) for candidate in found])
        return
    say(_describe(workload, setting, found, measured is not None))


def _workload(given: EqualLayersModel, measured: ModelCosts | None) -> tuple[EqualLayers, int]:
    """The model, and the global batch.

    Raises:
        UsageError: A number is missing, or none.
    """
    names = ("batch", "layers", "forward", "activation", "held", "weights")
    missing = [f"--{name}" for name in names if getattr(given, name) is None]
    if missing and measured is None:
        raise UsageError(
            f"{', '.join(missing)}: not given",
            fix="Give them, or a recipe whose model is measured.",
        )
    check_at_least_1(**{n: v for n in ("batch", "layers") if (v := getattr(given, n)) is not None})
    if measured is not None and given.layers:
        measured = measured.in_layers(given.layers)

    def number(name: str, parse: Callable[[str], float]) -> float:
        text = getattr(given, name)
        found: float = (
            getattr(measured, name) if text is None else parse_option(f"--{name}", text, parse)
        )
        return found

    weights = number("weights", parse_bytes)
    workload = EqualLayers(
        layers=given.layers or int(number("layers", int)),
        forward=number("forward", parse_seconds),
        launch=parse_option("--launch", given.launch, parse_seconds),
        activation=number("activation", parse_bytes),
        held=number("held", parse_bytes),
        gradient=weights,
        state=ADAM * weights
        if given.state is None
        else parse_option("--state", given.state, parse_bytes),
    )
    if not workload.forward > 0:
        raise UsageError(f"--forward {given.forward}: more than 0")
    return workload, given.batch or int(number("batch", int))


def _positive(name: str, text: str, parse: Callable[[str], float]) -> float:
    value = parse_option(f"--{name}", text, parse)
    if not value > 0:
        raise UsageError(f"--{name} {text}: more than 0")
    return value


def _describe(
    workload: EqualLayers,
    setting: ChimeraSetting,
    found: Sequence[ChimeraCandidate],
    measured: bool,
) -> str:
    best = found[0]
    played = [candidate.simulated() for candidate in found]
    lines = [
        f"{setting.workers} ranks with {format_bytes(setting.memory)} each, {setting.link}; "
        f"{setting.batch} samples",
        f"{workload.layers} layers{' (measured here)' if measured else ''}; each: "
        f"forward {format_seconds(workload.forward)} a sample, "
        f"gives {format_bytes(workload.activation)}, keeps {format_bytes(workload.held)}, "
        f"weights {format_bytes(workload.gradient)}, state {format_bytes(workload.state)}",
        "",
        f"{'copies':>6}{'stages':>8}{'samples':>9}{'micro-batches':>15}{'memory':>10}"
        f"{'model':>10}{'executed':>10}",
        *(_line(candidate, seconds) for candidate, seconds in zip(found, played, strict=True)),
        "",
        *(f"not possible: {problem}" for problem in refused_depths(workload, setting)),
    ]
    fastest = min(range(len(found)), key=played.__getitem__)
    # Less than that would not show in the printed times.
    if played[fastest] < played[0] * (1 - 1e-3):
        other = found[fastest].shape.stages
        gain = 1 - played[fastest] / played[0]
        lines.append(f"executed, {other} stages are {gain:.1%} faster than the model's choice")
    lines += [
        f"chosen: {best.replicas} x {best.shape.stages} stages, the least time of the model",
        "",
        *_recipe_lines(best, setting),
    ]
    return "\n".join(lines)


def _line(candidate: ChimeraCandidate, played: float) -> str:
    return (
        f"{candidate.replicas:>6}{candidate.shape.stages:>8}{candidate.microbatch:>9}"
        f"{candidate.shape.microbatches:>15}{format_bytes(candidate.memory):>10}"
        f"{format_seconds(candidate.price.seconds):>10}{format_seconds(played):>10}"
    )


def _recipe_lines(best: ChimeraCandidate, setting: ChimeraSetting) -> list[str]:
    """What a recipe.toml says for a candidate."""
    lines = [
        f'batch = "{setting.batch} samples"',
        f"microbatch = {best.microbatch}",
        f"stages = {best.shape.stages}",
        "",
        "[pipeline]",
        'schedule = "chimera"',
    ]
    if setting.pipes != 2:
        lines.append(f"pipes = {setting.pipes}")
    if setting.mode != "direct":
        lines.append(f'mode = "{setting.mode}"')
    if setting.recompute:
        lines.append("recompute = true")
    return lines


def _facts(candidate: ChimeraCandidate) -> dict[str, object]:
    return {
        "copies": candidate.replicas,
        "stages": candidate.shape.stages,
        "samples": candidate.microbatch,
        "microbatches": candidate.shape.microbatches,
        "memory": candidate.memory,
        "model": candidate.price.seconds,
        "executed": candidate.simulated(),
        "forwards": candidate.price.counts.forwards,
        "backwards": candidate.price.counts.backwards,
        "unoverlapped": candidate.price.unoverlapped,
    }
