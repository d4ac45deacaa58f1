"""A pipeline's table in a CSV file, as overrides of a recipe that trains by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from headway.errors import PlanError
from headway.schedule.check import Violation, schedule_violations
from headway.schedule.csv_format import read_table, to_csv


def recipe_overrides(file: Path) -> tuple[str, ...]:
    """What `headway train --schedule FILE` lays over a recipe: stages and the table.

    Args:
        file: A CSV file in headway's dialect, or in torch's of one pipe.

    Raises:
        DocumentError: The file cannot be read.
        PlanError: The table cannot be executed.
    """
    schedule = read_table(file)
    wrong = schedule_violations(schedule)
    if wrong:
        raise invalid_table_error(file, wrong)
    # What JSON calls a string is a basic string of TOML.
    table = json.dumps(to_csv(schedule), ensure_ascii=False)
    return f"stages={schedule.ranks}", f"pipeline.table={table}"


def invalid_table_error(file: Path, wrong: Sequence[Violation]) -> PlanError:
    """The error that lists what is wrong with a table."""
    count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
    return PlanError(
        f"the table cannot be executed: {count}",
        where=str(file),
        problems=[f"{violation.rule}: {violation.text}" for violation in wrong],
        fix="Fix the named cells (ranks and cells count from 0).",
    )
