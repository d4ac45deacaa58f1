"""The page of `headway compare --paper`: Markdown; every sentence has a measured figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EvaluatedTask:
    """What the page says of a task.

    Attributes:
        facts: What was compared: names and texts.
        table: Headings, then rows.
        pictures: Heading, and the file's place as seen from the page.
        sentences: Where headway stands.
        hindrances: Of each framework, what hinders it.
    """

    heading: str
    facts: Sequence[tuple[str, str]]
    table: Sequence[Sequence[str]]
    pictures: Sequence[tuple[str, str]]
    sentences: Sequence[str]
    hindrances: Sequence[tuple[str, str]]


_HEAD = """\
# Frameworks side by side: an evaluation

Made by `headway compare --paper`; [compare.md](compare.md) says what is measured and how. The
tasks are those of Nichols et al. 2021, a language model and a classifier of images, at sizes for a
small machine.
"""


def evaluation_page(machine: Sequence[tuple[str, str]], tasks: Sequence[EvaluatedTask]) -> str:
    """The page.

    Args:
        machine: Where and when it was measured: names and texts.
    """
    blocks = [_HEAD, _facts(machine)]
    for task in tasks:
        blocks += [f"## {task.heading}\n", _facts(task.facts), _table(task.table)]
        blocks += [f"![{heading}]({place})\n" for heading, place in task.pictures]
        blocks += ["### Where headway stands\n", _items(task.sentences)]
        told = [f"**{name}**: {text}" for name, text in task.hindrances]
        blocks += ["### What hinders each\n", _items(told)]
    return "\n".join(blocks)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return _items([f"{name}: {text}" for name, text in facts if text])


def _items(texts: Sequence[str]) -> str:
    return "".join(f"- {_plain(text)}\n" for text in texts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(_plain, row))} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _plain(text: str) -> str:
    # A failure may quote what a framework has printed.
    return " ".join(text.split()).replace("|", "\\|")
