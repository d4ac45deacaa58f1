"""Which devices of several types stand where on the mesh of a plan.

Devices stand in an order of their types, tensor groups inside of one type. They are laid out stage
by stage (pipelines across types) or copy by copy (data parallelism across types); where a type ends
in the middle of a stage or of a copy, both are mixed. Order by memory and nested data parallelism
as in Jia et al. 2022 (Whale); device groups in order as in Zheng et al. 2022 (Alpa).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product

from headway.planner.estimate.degrees import Degrees
from headway.planner.search.request import PlanRequest
from headway.plans.tensor_layout import divisors


@dataclass(frozen=True, kw_only=True, order=True)
class DeviceLayout:
    """The type of device of each cell of data x pipe.

    Attributes:
        copies: For each copy of the model the types of its stages.
        order: Of the axes, as in `Degrees`: "tdp" stage by stage, "tpd" copy by copy.
    """

    copies: tuple[tuple[str, ...], ...]
    order: str

    @cached_property
    def classes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Distinct copies, and how many there are of each; in order."""
        return tuple(Counter(self.copies).items())


def device_layouts(
    amounts: Mapping[str, int], *, tensor: int, data: int, pipeline: int, every: bool = True
) -> Iterator[DeviceLayout]:
    """All different ways to lay devices out.

    Args:
        amounts: Devices of each type; types of which there are 0 are left out.
        tensor: Devices of a cell, all of one type.
        every: All orders of the types; else the one in which they are given.
    """
    used = {kind: number for kind, number in amounts.items() if number}
    if any(number % tensor for number in used.values()):
        return
    if sum(used.values()) != tensor * data * pipeline:
        return
    seen: set[tuple[tuple[str, ...], ...]] = set()
    # 24 orders at most: beyond four types only the one that is given.
    tried = permutations(used) if every and len(used) <= 4 else iter([tuple(used)])
    for kinds in tried:
        cells = [kind for kind in kinds for _ in range(used[kind] // tensor)]
        for order in ("tdp", "tpd"):
            copies = _copies(cells, data, pipeline, order)
            key = tuple(sorted(copies))  # which copy is the first does not matter
            if key not in seen:
                seen.add(key)
                yield DeviceLayout(copies=copies, order=order)


def _copies(
    cells: Sequence[str], data: int, pipeline: int, order: str
) -> tuple[tuple[str, ...], ...]:
    if order == "tpd":
        return tuple(tuple(cells[c * pipeline : (c + 1) * pipeline]) for c in range(data))
    return tuple(tuple(cells[s * data + c] for s in range(pipeline)) for c in range(data))


def device_counts(
    counts: Mapping[str, int], devices: Sequence[int] | None
) -> tuple[dict[str, int], ...]:
    """How many devices of each type may be used together.

    Args:
        devices: Numbers of devices in all, of powers of two or all of each type; None: every type
            is used whole or not at all.
    """
    ways = []
    for number in counts.values():
        some = {2**n for n in range(number.bit_length())} if devices is not None else set()
        ways.append(sorted({0, number, *(n for n in some if n <= number)}))
    found = [dict(zip(counts, numbers, strict=True)) for numbers in product(*ways)]
    return tuple(
        amounts
        for amounts in found
        if (sum(amounts.values()) in devices if devices is not None else any(amounts.values()))
    )


@dataclass(frozen=True, kw_only=True, order=True)
class Combination:
    """What the search opens.

    Attributes:
        degrees: Of devices of several types with the mean micro-batch; see `sized`.
        amounts: Devices of each type in use; empty where the request has one type.
        layout: Of devices of several types; None: all are of one.
    """

    degrees: Degrees
    amounts: tuple[tuple[str, int], ...] = ()
    layout: DeviceLayout | None = None

    @property
    def devices(self) -> int:
        return self.degrees.devices

    @property
    def kind(self) -> str:
        """The type of the devices, where all are of one; "": the request has one."""
        return self.amounts[0][0] if self.amounts else ""

    @property
    def copies(self) -> tuple[tuple[str, ...], ...]:
        """Of a layout: for each copy of the model the types of its stages."""
        assert self.layout is not None
        return self.layout.copies

    @property
    def classes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Of a layout: its distinct copies, and how many there are of each."""
        assert self.layout is not None
        return self.layout.classes

    def types_of(self, stage: int) -> frozenset[tuple[int, str]]:
        """Of a layout: (number of the class, type) of all cells of a stage."""
        return frozenset((c, kinds[stage]) for c, (kinds, _) in enumerate(self.classes))

    def sized(self, microbatch: int) -> Degrees:
        """The degrees as if all copies had micro-batches of this size."""
        return replace(self.degrees, microbatch=microbatch)


def layout_combinations(
    question: PlanRequest, amounts: Mapping[str, int], units: int
) -> Iterator[Combination]:
    """All combinations in which devices of several types work together: with 1F1B, and any number
    of micro-batches, of which copies take different sizes.

    Args:
        units: A pipeline has at most so many stages.
    """
    used = tuple((kind, number) for kind, number in amounts.items() if number)
    devices = sum(amounts.values())
    inner = question.machine.network.levels[0].width
    split = any(how.startswith("split") for _, how in question.force)
    for t in divisors(devices):
        if t > inner or (t == 1 and split) or (question.tensor and t not in question.tensor):
            continue
        cells = devices // t
        for p in divisors(cells):
            d = cells // p
            if p > units or d > question.batch:
                continue
            for m in microbatch_counts(question.batch // d):
                for zero in question.zero if d > 1 else (0,):
                    for layout in device_layouts(
                        amounts, tensor=t, data=d, pipeline=p, every=question.balance == "exact"
                    ):
                        degrees = Degrees(
                            tensor=t,
                            data=d,
                            pipeline=p,
                            microbatch=-(-question.batch // (d * m)),
                            microbatches=m,
                            zero=zero,
                            order=layout.order,
                        )
                        yield Combination(degrees=degrees, amounts=used, layout=layout)


def microbatch_counts(share: int) -> tuple[int, ...]:
    """Numbers of micro-batches that are tried: powers of two, and one for each sample."""
    return tuple(sorted({share, *(2**n for n in range(share.bit_length()) if 2**n <= share)}))
