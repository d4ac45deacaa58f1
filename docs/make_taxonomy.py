"""Writes docs/taxonomy.md from the published systems, the selection rules and what is refused.

python docs/make_taxonomy.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headway.plans.plan import unsupported_by_executor
from headway.plans.published_systems import OUTSIDE, PublishedSystem, published_systems
from headway.plans.synchrony import Synchrony
from headway.plans.taxonomy import AXES, SELECTION_RULES

PAGE = Path(__file__).parent / "taxonomy.md"
HEAD = """# Who agrees with whom, and when: the taxonomy

Written by `docs/make_taxonomy.py` from `plans/taxonomy.py` and `plans/published_systems.py`; a
test holds it.

Distributed training differs in who agrees with whom, when, and on what. Langer et al. 2020 ("A
Taxonomy of Parallel Training", TPDS 31(12)) give five axes for it. A plan's `synchrony` has their
values, and a plan's words are derived from it: `headway plan show` says them, `headway taxonomy
plan.json` puts the plan among the published systems, and `headway taxonomy --write Petuum --out
petuum.json` writes the plan of one of them.

Synchronous all-reduce is *central* in these words: every rank has a copy of the one optimiser that
writes the parameters, a replicated parameter server. *Decentral* means that every worker has an
optimiser and a model of its own.

## Axes
"""
RULES = """## What the taxonomy says of each technique

Table 2 of the paper; `headway plan show` prints what applies to a plan. A pipeline without a flush
is the one with mini-batch pipelining; bounds count as asynchronous. A plan that divides both data
and model has two rows.
"""
REFUSED = """## What is refused

`headway plan check` accepts these words, so that the plans of the literature can be written down;
the executor refuses them with the nearest that exists.
"""
WORDS = (
    ("MPCA-SGD", Synchrony(merge="penalty", kind="soft_bounded")),
    ("a queue by staleness", Synchrony(kind="asynchronous", remedy="prioritize")),
    ("negative momentum", Synchrony(kind="asynchronous", remedy="negative_momentum")),
    ("proxy servers", Synchrony(topology="proxy_tree")),
    ("a distributed array with copies", Synchrony(topology="array")),
    ("another transfer than the usual", Synchrony(topology="single", transfer="binomial_tree")),
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown, and an empty line."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def systems(found: Sequence[PublishedSystem]) -> Iterator[str]:
    """A table of systems."""
    head = ("system", *(f"{letter}. {name}" for letter, name, _ in AXES), "remark")
    rows = [
        (f"{s.name} ({s.source})", *s.words.cells, "; ".join(filter(None, [s.remark, s.differs])))
        for s in found
    ]
    yield from table(head, rows)


def page() -> str:
    """The page as it should be."""
    found = published_systems()
    lines = [HEAD, *table(("axis", "name", "question"), AXES)]
    lines += ["## Published systems", ""]
    lines += ["The table of the survey; sizes, bounds and periods are examples.", ""]
    lines += systems([system for system in found if system.surveyed])
    lines += ["Other papers, in the same words:", ""]
    lines += systems([system for system in found if not system.surveyed])
    lines.append(RULES)
    head = (
        "technique", "needs balanced data", "needs a balanced model", "best learning rate as the "
        "cluster grows", "complexity of overlap", "hyper-parameters", "resilience",
        "reproducible behaviour is",
    )  # fmt: skip
    lines += table(
        head,
        [
            (
                rule.technique, "yes" * rule.balanced_data, "yes" * rule.balanced_model, rule.rate,
                rule.overlap, rule.parameters, rule.resilience, rule.reproducible,
            )
            for rule in SELECTION_RULES.values()
        ],
    )  # fmt: skip
    lines.append(REFUSED)
    plain = next(s for s in found if s.name == "BigDL").plan
    refused = [
        (name, "; ".join(unsupported_by_executor(replace(plain, synchrony=synchrony))))
        for name, synchrony in WORDS
    ]
    lines += table(("what", "what is said"), refused)
    lines += ["No field exists, so no plan can say it:", ""]
    lines += table(("what", "why", "nearest"), [(o.name, o.why, f"{o.nearest}") for o in OUTSIDE])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
