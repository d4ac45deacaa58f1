"""Published formulas of pipeline schedules: bubble ratio, weights, activations.

They stand beside what `schedule.stats` measures, so that each confirms the other. Invariant: a
formula marked exact is what the table of that name gives when executed without messages. Sources:
Table 2 and 3 of Li and Hoefler (Chimera, SC 2021); Narayanan et al. 2021 (interleaved); Qi et al.
2023 (ZB-H1).
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.pipeline import Shape, closed_counts

Range = tuple[float, float]
"""(least, most) of the ranks."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What a paper says of a schedule.

    Attributes:
        bubble: Idle time / (ranks * time of the step).
        text: The formula of the bubble, as people write it.
        weights: In weights of one stage, of as many stages as ranks.
        activations: In activations of one micro-batch at such a stage.
        exact: The bubble is that of the table; else of a steady state, or rounded.
    """

    bubble: float
    text: str
    weights: Range
    activations: Range
    exact: bool = True


def formula(
    name: str,
    *,
    stages: int,
    microbatches: int,
    pipes: int = 2,
    virtual: int = 2,
    mode: str = "direct",
    ratio: float = 2.0,
) -> Formula | None:
    """The formula of a schedule; None where none is known for these sizes.

    Args:
        name: As in `headway.schedule.named.SCHEDULES`.
        stages: D, the ranks.
        microbatches: N.
        pipes: 2f, of Chimera.
        virtual: Stages per rank, of looped schedules.
        mode: Of Chimera.
        ratio: B / F; input and weight gradient are half of B each.
    """
    d, n = stages, microbatches
    deep = float(min(d, n))
    match name:
        case "gpipe":
            return Formula((d - 1) / (n + d - 1), "(D-1)/(N+D-1)", (1, 1), (n, n))
        case "1f1b":
            return Formula((d - 1) / (n + d - 1), "(D-1)/(N+D-1)", (1, 1), (1, deep))
        case "gems":
            return Formula((d - 1) / (d + 0.5), "(D-1)/(D+1/2)", (2, 2), (1, 1), exact=False)
        case "pipedream":
            return Formula(0.0, "0", (1, deep), (1, deep), exact=False)
        case "pipedream-2bw":
            return Formula(0.0, "0", (2, 2), (1, deep), exact=False)
        case "interleaved" | "breadth-first":
            return _looped(name, d, n, virtual)
        case "zb-h1":
            return _zb_h1(d, n, ratio)
        case "chimera" | "chimera-doubling" | "chimera-halving":
            own = name.partition("-")[2] or mode
            return _chimera(Shape(d, n, pipes, own), ratio)
    return None


def _looped(name: str, d: int, n: int, v: int) -> Formula | None:
    if n % d:
        return None
    first, last = ((w + (v - 1) * d + 1) / v for w in (2 * (d - 1), 0))
    held = (min(n, last), min(n, first)) if name == "interleaved" else (n, n)
    return Formula((d - 1) / (v * n + d - 1), "(D-1)/(vN+D-1)", (1, 1), held)


def _zb_h1(d: int, n: int, ratio: float) -> Formula | None:
    """(D-1)(F + I - W) of bubble, with I = W."""
    if n < d or ratio != 2:
        return None
    return Formula((d - 1) / (3 * n + d - 1), "(D-1)/(3N+D-1)", (1, 1), (d, d))


def _chimera(shape: Shape, ratio: float) -> Formula | None:
    """From C_f and C_b; at B = F, at B = 2F and N = D, and doubled, these are the paper's."""
    counts = closed_counts(shape, ratio=ratio)
    if counts is None:
        return None
    d, n, pipes, mode = shape
    part = 0.5 if mode == "halving" else 1.0
    step = part * (counts.forwards + ratio * counts.backwards)
    most, least = d, d - d // pipes + 1
    if mode != "direct" and (mode == "halving" or n > d):
        most, least = 2 * d, 3 * d // 2 + 1
    return Formula(
        1 - n * (1 + ratio) / step,
        _chimera_text(shape, ratio),
        (pipes, pipes),
        (part * least, part * most),
    )


def _chimera_text(shape: Shape, ratio: float) -> str:
    d, n, pipes, mode = shape
    if pipes == 2 and ratio == 2:
        if mode == "halving":
            return "(D-2)/(4N+D-2)"
        if mode == "doubling" and n % (2 * d) == 0:
            return "(D-2)/(2N+D-2)"
        if n == d:
            return "(D-2)/(3N/2+D-2)"
        if mode == "direct":
            return "(D-2)(K+1)/(3KD+(D-2)(K+1))"
    if ratio == 1 and mode == "direct":
        return "(D-2f)/(2fN+D-2f)"
    return "1 - N(F+B)/(C_f F + C_b B)"
