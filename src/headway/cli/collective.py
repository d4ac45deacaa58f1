"""`headway collective show`: compare the programs of a collective on a cluster.

Nothing is run: programs are generated for the cluster's links, checked and simulated. With
`--change` the same programs are simulated on links that have drifted, with the re-packing that
training would do (`headway.collective.all_reduce.repacking`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import say, say_json, table_lines, write_pictures
from headway.collective.all_reduce.algorithm import ALL_REDUCE_KINDS, all_reduce_program
from headway.collective.all_reduce.repacking import Repacking, find_repacking
from headway.collective.program.program import ROOTED, CollectiveTask, Op, rounds
from headway.collective.topology import NetworkTopology
from headway.errors import PlanError, UsageError
from headway.planner.collective_algorithm import (
    PricedProgram,
    choose_all_reduce,
    parse_wires,
    price_programs,
)
from headway.simulator.collective import HostCosts, simulate_collective
from headway.simulator.what_if import change_link
from headway.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@dataclass(frozen=True)
class LinkChangeEffect:
    """Programs on links that have drifted.

    Attributes:
        seconds: Of each program now, by name.
        repacking: What training does if it carries its sums by the first of them; None: it keeps
            that program, or the operation is none of training.
        seconds_after: Of the program that it goes over to.
    """

    sentences: tuple[str, ...]
    seconds: Mapping[str, float]
    repacking: Repacking | None
    seconds_after: float | None

    def lines(self, found: Sequence[PricedProgram]) -> Iterator[str]:
        """The times before and now, and the change of program."""
        yield f"changed: {'; '.join(self.sentences)}"
        width = max(len(one.name) for one in found)
        for one in found:
            now, before = format_seconds(self.seconds[one.name]), format_seconds(one.seconds)
            yield f"   {one.name:<{width}}  {now}, was {before}"
        if self.repacking is None:
            return
        if self.seconds_after is None:
            yield f"train would keep {self.repacking.before}"
        else:
            seconds = format_seconds(self.seconds_after)
            yield f"train would re-pack: {self.repacking.after}: {seconds}"

    def facts(self) -> dict[str, object]:
        """For `--json`."""
        after = self.repacking and self.repacking.after
        return {
            "change": self.sentences,
            "seconds": dict(self.seconds),
            "program": after and after.kind,
            "seconds_after": self.seconds_after,
            "trees": [
                {"parents": tree.parents, "weight": tree.weight}
                for tree in (after.carrier.trees if after else ())
            ],
        }


def programs_after_change(
    found: Sequence[PricedProgram],
    wires: NetworkTopology,
    sentences: Sequence[str],
    *,
    element_bytes: int,
    host: HostCosts,
) -> LinkChangeEffect:
    """Play programs on other links.

    Args:
        found: Made for `wires`, the fastest first.
        sentences: See `LEGAL_LINK_CHANGES`; several are made together.
        host: What messages and sums cost the ranks.

    Raises:
        UsageError: A sentence says nothing that can be changed.
    """
    now = wires
    for sentence in sentences:
        now = change_link(now, sentence)
    seconds = {
        one.name: simulate_collective(one.program, now, element_bytes, host=host).seconds
        for one in found
    }
    repacking = _repacking(found[0], wires, now, element_bytes)
    after = None
    if repacking is not None and repacking.changes:
        task, chosen = found[0].program.collective, repacking.after
        program = all_reduce_program(
            chosen.kind, chosen.carrier, wires.ranks, task.elements, element_bytes
        )
        after = simulate_collective(program, now, element_bytes, host=host).seconds
    return LinkChangeEffect(tuple(sentences), seconds, repacking, after)


def _repacking(
    best: PricedProgram, wires: NetworkTopology, now: NetworkTopology, element_bytes: int
) -> Repacking | None:
    # Training re-packs sums of gradients, and only on links that two ranks have to themselves.
    if best.program.op != "all_reduce" or wires.shared or best.name not in ALL_REDUCE_KINDS:
        return None
    size = best.program.elements * element_bytes
    carrier = choose_all_reduce(best.name, wires, size, element_bytes=element_bytes).carrier
    assert carrier is not None  # with the rates of links that are not shared
    return find_repacking(best.name, carrier, wires.graph, now.graph, [size], element_bytes)


def show(
    *,
    cluster: Annotated[str, Parameter(alias="-c")],
    op: Op = "all_reduce",
    size: Annotated[str, Parameter(name=["--bytes", "-b"])] = "25 MiB",
    programs: str = "",
    root: int | None = None,
    nodes: int | None = None,
    element: int = 4,
    overhead: str = "0 s",
    change: tuple[str, ...] = (),
    svg: Path | None = None,
    png: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Compare the programs of a collective on a cluster: time, busiest link, share of the bound.

    Args:
        cluster: A cluster.toml, a preset, or dgx-1v, dgx-1p: the NVLinks of one machine.
        size: Size of the whole buffer; for all_to_all what each rank sends in total.
        programs: Comma-separated names: ring, direct, halving-doubling, hierarchical, servers,
            trees; by default all.
        root: Root of broadcast and reduce; by default rank 0.
        nodes: Number of nodes of a preset; by default 1.
        element: Bytes of an element.
        overhead: Cost of starting a message, to its sender; about 30 us in Python.
        change: Simulate drifted links, too: "link a-b 10 Mbit/s", "link a-b 0.1x"; may be repeated.
            Shows the program to which `headway train` would switch.
        svg: Write a picture to this file.
        png: Write a picture to this file.
    """
    if element < 1:
        raise UsageError(f"--element {element}: at least 1 byte")
    try:
        num_bytes, host = parse_bytes(size), HostCosts(overhead=parse_seconds(overhead))
    except ValueError as error:
        raise UsageError(f"--bytes {size} --overhead {overhead}: {error}") from None
    wires = parse_wires(cluster, nodes=nodes)
    if root is not None and (op not in ROOTED or not 0 <= root < wires.ranks):
        raise UsageError(
            f"--root {root}: {op} of {wires.ranks} ranks",
            fix="broadcast and reduce have a root, one of the ranks.",
        )
    collective = CollectiveTask.of(op, wires.ranks, num_bytes // element, root=root)
    names = [name.strip() for name in programs.split(",") if name.strip()]
    found, refused = price_programs(
        collective, wires, names=names, element_bytes=element, host=host
    )
    if not found:
        raise PlanError(
            f"no program carries out {op} here",
            problems=[f"{name}: {why}" for name, why in refused.items()],
            fix="Ask for other programs, or leave --programs out.",
        )
    title = f"{op} of {format_bytes(num_bytes)} on {wires.ranks} ranks of {cluster}"
    _pictures(title, found, svg, png)
    later = (
        programs_after_change(found, wires, change, element_bytes=element, host=host)
        if change
        else None
    )
    if json:
        facts: dict[str, object] = {
            "op": op,
            "bytes": num_bytes,
            "ranks": wires.ranks,
            "bound": found[0].least,
        }
        facts |= {"programs": [_facts(one) for one in found], "refused": refused}
        say_json(facts | ({"changed": later.facts()} if later else {}))
    else:
        say(
            "\n".join(
                [describe_programs(title, found, refused), *(later.lines(found) if later else ())]
            )
        )


def describe_programs(
    title: str, found: Sequence[PricedProgram], refused: Mapping[str, str]
) -> str:
    """A line for each program, the fastest first."""
    least = found[0].least
    heads = ("", "program", "time", "of bound", "rounds", "messages", "busiest link")
    rows = [heads, *(_row(one, best=not number) for number, one in enumerate(found))]
    head = f"{title}: no program takes less than {format_seconds(least)}"
    reasons = (f"   {name}: {why}" for name, why in refused.items())
    return "\n".join([head, *table_lines(rows), *reasons])


def _row(one: PricedProgram, *, best: bool) -> tuple[str, ...]:
    return (
        "*" if best else "",
        one.name,
        format_seconds(one.seconds),
        f"{one.share:.0%}",
        str(rounds(one.program)),
        str(one.program.messages()),
        _busiest(one),
    )


def _busiest(one: PricedProgram) -> str:
    wire = one.played.busiest()
    if wire is None:
        return "none"
    found, load = one.played.wires.wires[wire], one.played.loads()[wire]
    return f"{found.name}: {format_bytes(load)} at {format_rate(found.rate)}"


def _facts(one: PricedProgram) -> dict[str, object]:
    wire = one.played.busiest()
    return {
        "program": one.name,
        "seconds": one.seconds,
        "share_of_bound": one.share,
        "rounds": rounds(one.program),
        "messages": one.program.messages(),
        "busiest_wire": None if wire is None else one.played.wires.wires[wire].name,
        "busiest_bytes": None if wire is None else one.played.loads()[wire],
        "bytes_by_pair": {
            f"{a}-{b}": size
            for (a, b), size in one.program.traffic(one.played.element_bytes).sent.items()
        },
        "trees": [{"parents": parents, "weight": weight} for parents, weight in one.trees],
    }


def _pictures(
    title: str, found: Sequence[PricedProgram], svg: Path | None, png: Path | None
) -> None:
    if svg is None and png is None:
        return
    from headway.report.pictures.collective_programs import programs_png, programs_svg

    write_pictures(
        (svg, lambda: programs_svg(title, found)), (png, lambda: programs_png(title, found))
    )
