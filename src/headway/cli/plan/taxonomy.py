"""`headway taxonomy`: published systems as plans, and the user's own as a row among them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import note, say, say_json, table_lines, write_file
from headway.errors import UsageError
from headway.plans import Plan
from headway.plans.published_systems import OUTSIDE, published_system, published_systems
from headway.plans.taxonomy import AXES, selection_rules, taxonomy_words

YOURS = "(this plan)"


def taxonomy(
    plan: Path | None = None,
    /,
    *,
    write: str | None = None,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """List published systems in the words of the taxonomy of parallel training, each as a plan.

    Args:
        plan: A plan file, to stand as a row among them.
        write: The name of a system: write its plan to the file --out.
        out: The file.
        json: Print the rows as JSON.
    """
    if (write is None) != (out is None):
        raise UsageError("--write NAME and --out FILE go together", fix="Give both, or neither.")
    if write is not None and out is not None:
        write_file(out, published_system(write).plan.to_json())
        note(f"{out}: the plan of {published_system(write).name}")
        return
    own = None if plan is None else Plan.load(plan)
    if json:
        say_json({"systems": _facts(), "plan": None if own is None else plan_facts(own)})
        return
    head = ("system", *(f"{letter}. {name}" for letter, name, _ in AXES), "remark")
    rows = [(s.name, *s.words.cells, s.differs or s.remark) for s in published_systems()]
    mine = [] if own is None else [(YOURS, *taxonomy_words(own).cells, "")]
    for line in table_lines([head, *mine, *rows]):
        say(line)
    for one in OUTSIDE:
        say(f"no plan: {one.name}: {one.why}; the nearest is {one.nearest}")
    for rule in () if own is None else selection_rules(own):
        say(str(rule))


def plan_facts(plan: Plan) -> dict[str, object]:
    """A plan's place and the rules that apply to it, as data."""
    rules = [asdict(rule) for rule in selection_rules(plan)]
    return {"hash": plan.hash, "words": asdict(taxonomy_words(plan)), "rules": rules}


def _facts() -> list[dict[str, object]]:
    return [
        {
            "name": system.name,
            "source": system.source,
            "remark": system.remark,
            "differs": system.differs,
            "surveyed": system.surveyed,
            "words": asdict(system.words),
            "plan": system.plan.to_dict(),
        }
        for system in published_systems()
    ]
