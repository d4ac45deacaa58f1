"""`headway collective show`: the programs of a collective on a cluster, side by side.

Nothing is run: programs are made for the cluster's links, checked, and played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.collective_change import changed
from headway.cli.console import say, say_json
from headway.collective.program_order import rounds
from headway.collective.task import ROOTED, Collective, Op
from headway.errors import PlanError, UsageError
from headway.planner.programs import Priced, price_programs, wires_of
from headway.simulator.collective import Host
from headway.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds


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
        op: What is to be done.
        size: Bytes of the whole; of all_to_all what each rank has for all.
        programs: Names with commas: ring, direct, halving-doubling, hierarchical, servers, trees;
            by default all.
        root: Of broadcast and reduce; by default rank 0.
        nodes: Of a preset; by default 1.
        element: Bytes of an element.
        overhead: What beginning a message costs its rank; about 30 us in Python.
        change: Links that have drifted: "link a-b 10 Mbit/s", "link a-b 0.1x"; may be repeated. The
            programs then, and that which `headway train` would go over to.
        svg: Write a picture to this file.
        png: The same as PNG.
        json: Print the rows as JSON.
    """
    if element < 1:
        raise UsageError(f"--element {element}: at least 1 byte")
    try:
        num_bytes, host = parse_bytes(size), Host(overhead=parse_seconds(overhead))
    except ValueError as error:
        raise UsageError(f"--bytes {size} --overhead {overhead}: {error}") from None
    wires = wires_of(cluster, nodes=nodes)
    if root is not None and (op not in ROOTED or not 0 <= root < wires.ranks):
        raise UsageError(
            f"--root {root}: {op} of {wires.ranks} ranks",
            fix="broadcast and reduce have a root, one of the ranks.",
        )
    collective = Collective.of(op, wires.ranks, num_bytes // element, root=root)
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
    later = changed(found, wires, change, element_bytes=element, host=host) if change else None
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
        say("\n".join([describe(title, found, refused), *(later.lines(found) if later else ())]))


def describe(title: str, found: Sequence[Priced], refused: Mapping[str, str]) -> str:
    """A line for each program, the fastest first."""
    least = found[0].least
    rows: list[tuple[str, ...]] = [
        ("", "program", "time", "of bound", "rounds", "messages", "busiest wire")
    ]
    rows += [_row(one, best=not number) for number, one in enumerate(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    head = f"{title}: no program takes less than {format_seconds(least)}"
    return "\n".join([head, *lines, *(f"   {name}: {why}" for name, why in refused.items())])


def _row(one: Priced, *, best: bool) -> tuple[str, ...]:
    return (
        "*" if best else "",
        one.name,
        format_seconds(one.seconds),
        f"{one.share:.0%}",
        str(rounds(one.program)),
        str(one.program.messages()),
        _busiest(one),
    )


def _busiest(one: Priced) -> str:
    wire = one.played.busiest()
    if wire is None:
        return "none"
    found, load = one.played.wires.wires[wire], one.played.loads()[wire]
    return f"{found.name}: {format_bytes(load)} at {format_rate(found.rate)}"


def _facts(one: Priced) -> dict[str, object]:
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


def _pictures(title: str, found: Sequence[Priced], svg: Path | None, png: Path | None) -> None:
    if svg is None and png is None:
        return
    from headway.report.collective_picture import Drawn, programs_png, programs_svg

    shown = []
    for one in found:
        total = sum(weight for _, weight in one.trees)
        trees = tuple((parents, weight / total) for parents, weight in one.trees)
        sent = one.program.traffic(one.played.element_bytes).sent
        shown.append(Drawn(one.name, one.seconds, sent, trees))
    names = found[0].played.wires.names
    if svg is not None:
        svg.write_text(programs_svg(title, shown, found[0].least, names), encoding="utf-8")
    if png is not None:
        png.write_bytes(programs_png(title, shown, found[0].least, names))
