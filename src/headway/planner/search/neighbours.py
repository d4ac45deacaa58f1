"""Degrees one step away from others, in the space that the search looks at.

The search climbs from a plan to its neighbours, and explanations show them as alternatives: both
take them from here, so that no alternative is a plan that the search could not have chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.planner.estimate.degrees import Degrees, microbatch_sizes
from headway.planner.search.request import ORDERS, PlanRequest
from headway.schedule.generators.registry import PLAIN

_STEPS = {"tensor": "tensor", "data": "data", "pipeline": "pipe", "microbatch": "micro-batch"}
"""The degrees that change by a step, and how they are called."""


@dataclass(frozen=True, kw_only=True)
class DegreeStep:
    """A step up or down in one degree.

    Attributes:
        step: "tensor 1 -> 2".
        degrees: None where the step is impossible.
        why: What makes it so.
    """

    step: str
    degrees: Degrees | None = None
    why: str = ""


def degree_steps(
    question: PlanRequest, old: Degrees, *, units: int, most: int
) -> Iterator[DegreeStep]:
    """One step up and down in t, d, p and b: t and p take from d, d is of other devices.

    Args:
        units: A pipeline has at most so many stages.
        most: Devices there are.
    """
    for name, label in _STEPS.items():
        number = getattr(old, name)
        yield _step(question, old, name, f"{label} {number}", 2 * number, units, most)
        if number % 2:
            yield DegreeStep(step=f"{label} {number} -> less", why=f"{number} cannot be halved")
        else:
            yield _step(question, old, name, f"{label} {number}", number // 2, units, most)


def _step(
    question: PlanRequest, old: Degrees, name: str, label: str, new: int, units: int, most: int
) -> DegreeStep:
    degrees, why = _moved(question, old, name, new, units, most)
    return DegreeStep(step=f"{label} -> {new}", degrees=degrees, why=why)


def _moved(
    question: PlanRequest, old: Degrees, name: str, new: int, units: int, most: int
) -> tuple[Degrees | None, str]:
    """The degrees after one step, or why there are none."""
    batch = question.batch
    t, d, p = old.tensor, old.data, old.pipeline
    if name == "microbatch":
        if batch % (d * new):
            return None, f"a share of {batch // d} samples is no multiple of {new}"
        return replace(old, microbatch=new, microbatches=batch // d // new), ""
    if name == "data":
        d = new
        if t * d * p > most:
            return None, f"it needs {t * d * p} devices, the cluster has {most}"
    else:
        number = old.data * getattr(old, name)
        if number % new:
            return None, f"{number} ranks that tensor, pipe and data share are no multiple of {new}"
        d = number // new
        t, p = (new, p) if name == "tensor" else (t, new)
    if p * old.virtual > units:
        return None, f"the model has {units} units that can be a stage"
    if t > question.machine.network.levels[0].width:
        return None, "a tensor axis stays within the innermost level of links"
    # What modules are forced to may leave out degrees: plans without it are shown, and say so.
    forced = any(how != "stage" for _, how in question.force)
    if question.tensor and t not in question.tensor and not forced:
        return None, "this search has no such tensor axis"
    if p > 1 == old.pipeline and not {PLAIN.name, "all"} & {*question.schedules}:
        return None, f"{PLAIN.name} is not among the schedules of this search"
    if batch % d:
        return None, f"a batch of {batch} samples is no multiple of {d} shares"
    b = max(size for size in microbatch_sizes(batch // d) if size <= old.microbatch)
    if old.pipes > 1 and batch // d == b:
        return None, "its schedule needs two micro-batches"
    zero = old.zero if d > 1 else 0
    moved = replace(old, tensor=t, data=d, pipeline=p, microbatch=b, zero=zero)
    if p == 1:
        moved = replace(moved, schedule=PLAIN.name, virtual=1, pipes=1)
    # Where both orders cost the same, the search lists the first one only.
    if 1 in (d, p) or moved.devices <= question.machine.network.levels[0].width:
        moved = replace(moved, order=ORDERS[0])
    return replace(moved, microbatches=batch // d // b), ""
