"""The program that carries the sums of a plan's exchange, found for a network: data for the plan.

Invariant: what is returned is legal for the ranks of the network, and says everything that those
who carry it out need: the network itself is not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from headway.collective.carried import make_program
from headway.collective.carrier import CARRIED, Carrier, Tree
from headway.collective.link import LinkFit, fit_link
from headway.collective.task import Collective as Task
from headway.collective.wires import Wires
from headway.errors import PlanError
from headway.plan.exchange import Collective
from headway.planner.programs import INTERPRETED, PROGRAMS, Priced, price_programs
from headway.simulator.collective import Host, play_collective
from headway.units import format_bytes

SIZES = tuple(2**power for power in range(18, 25, 2))
"""256 KiB to 16 MiB, as buckets have, from which a program's time is fitted. Buckets smaller than a
chunk do not lie on their line."""


@dataclass(frozen=True)
class Carrying:
    """What was found.

    Attributes:
        collective: For `Exchange.collective`.
        carrier: For `Exchange.carrier`.
        chosen: The program, priced for one bucket.
        others: Slower ones, the fastest first.
    """

    collective: Collective
    carrier: Carrier | None
    chosen: Priced
    others: tuple[Priced, ...] = ()


def find_carrier(
    name: str,
    wires: Wires,
    num_bytes: int,
    *,
    element_bytes: int = 4,
    host: Host = INTERPRETED,
) -> Carrying:
    """The fastest program for a bucket, or the one of this name as it fits the network best.

    A ring by number is what Gloo's own all-reduce is, without an interpreter; "auto" takes that.
    Levels of nodes are carried out by the exchange "hierarchical", which needs as many ranks on
    each.

    Args:
        name: Of `PROGRAMS`, or "auto".
        wires: Of all ranks of the exchange.
        num_bytes: Of a bucket.
        element_bytes: Of a gradient.
        host: What messages and sums cost the ranks.

    Raises:
        PlanError: No such program on this network.
        UsageError: No such program.
    """
    names = [name]
    if name == "auto":
        names = [each for each in PROGRAMS if each != "hierarchical" or wires.nodes.uniform]
    task = Task.of("all_reduce", wires.ranks, max(1, num_bytes // element_bytes))
    found, refused = price_programs(
        task, wires, names=names, element_bytes=element_bytes, host=host
    )
    if not found:
        raise PlanError(
            "no program carries the sums on this network",
            problems=[f"{other}: {why}" for other, why in refused.items()],
            fix="Ask for another collective, or leave it out: Gloo finds its own ways.",
        )
    rates = () if wires.shared else wires.graph.rates
    collective, carrier = _as_data(found[0], element_bytes, rates, automatic=name == "auto")
    return Carrying(collective, carrier, found[0], tuple(found[1:]))


def _as_data(
    priced: Priced, element_bytes: int, rates: tuple[tuple[float, ...], ...], *, automatic: bool
) -> tuple[Collective, Carrier | None]:
    usual = tuple(range(priced.program.ranks))
    if automatic and priced.name == "ring" and priced.order == usual:
        return "all_reduce", None
    name = cast(Collective, priced.name)
    if name not in CARRIED:
        return name, None
    carrier = Carrier(
        chunk="" if priced.chunk is None else format_bytes(priced.chunk * element_bytes),
        order=() if priced.order == usual else priced.order,
        trees=tuple(
            Tree.of(parents, weight)
            for parents, weight in (priced.trees if name == "trees" else ())
        ),
        rates=rates,
    )
    return name, None if carrier == Carrier() else carrier


def carried_fit(
    collective: str,
    carrier: Carrier | None,
    wires: Wires,
    *,
    element_bytes: int = 4,
    host: Host = INTERPRETED,
    sizes: Sequence[int] = SIZES,
) -> LinkFit:
    """Latency and seconds per byte of the sums that a program carries, from its plays.

    For `collective.service.Network.carried`, by which an exchange is priced.

    Args:
        collective: Of `CARRIED`.
        carrier: Of the exchange.
        wires: The network.
        element_bytes: Of a gradient.
        host: What messages and sums cost the ranks.
        sizes: Bytes of buckets.
    """
    samples = []
    for size in sizes:
        program = make_program(
            collective, carrier, wires.ranks, max(1, size // element_bytes), element_bytes
        )
        seconds = play_collective(program, wires, element_bytes, host=host).seconds
        samples.append((float(size), seconds))
    return fit_link(samples, ranks=wires.ranks)
