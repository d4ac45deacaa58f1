"""`headway import FILE`: the table of keys, the recipe and the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.cli.terminal.console import say, say_json, table_lines, warn, write_file
from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.api.migration import ImportedConfiguration
    from headway.migration import KeyOutcome


def import_file(
    file: Path,
    /,
    *,
    format: Annotated[  # noqa: A002
        Literal["deepspeed", "accelerate", "torchtitan"] | None, Parameter(name="--from")
    ] = None,
    out: Path | None = None,
    plan: Path | None = None,
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    batch: int | None = None,
    stop: str | None = None,
    recipe: str | None = None,
    model: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    loss: str | None = None,
    criterion: str | None = None,
    optimizer: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Translate a configuration of DeepSpeed, Accelerate or torchtitan.

    Each key of the file is told once: what it became, or why it does not carry over and what to do
    instead.

    Args:
        file: A DeepSpeed JSON, an Accelerate YAML or JSON, a torchtitan TOML.
        format: Whose it is; by default as its keys say.
        out: Write the recipe here, a .toml file.
        plan: Write the plan here, a .json file; it needs processes and batch.
        processes: Of the whole job, where the file does not say it.
        batch: Samples of the global batch, where the file does not say it.
        stop: As in "300 steps" or "2 epochs", where the file does not say it.
        recipe: module:function that returns a Recipe, in place of the parts below.
        model: module:name of a function that builds the model.
        data: module:name of a function that makes the training data.
        validation: module:name of a function that makes the validation data.
        loss: module:name of a loss of (model, batch), or tokens.
        criterion: In place of it: module:name of a torch criterion.
        optimizer: module:name of an optimiser, in place of the file's.
        json: Print JSON.
    """
    from headway.api.migration import import_configuration

    if out is not None and out.suffix != ".toml":
        raise UsageError(
            f"--out {out} is no .toml file",
            fix=f"Recipes are TOML: --out {out.with_suffix('.toml')}",
        )
    found = import_configuration(
        file,
        format=format,
        processes=processes,
        batch=batch,
        recipe=recipe,
        model=model,
        data=data,
        validation=validation,
        loss=loss,
        criterion=criterion,
        optimizer=optimizer,
        stop=stop,
    )
    if plan is not None:
        if found.plan is None:
            raise UsageError(
                "there is no plan without the number of processes and the batch",
                where=str(file),
                fix="Say them with --processes and --batch.",
            )
        write_file(plan, found.plan.to_json())
    if out is not None:
        write_file(out, found.recipe)
    if json:
        say_json(_facts(found))
        return
    _print_table(found)
    _print_next(found, out, plan)


def _facts(found: ImportedConfiguration) -> dict[str, object]:
    return {
        "format": found.translated.title,
        "rows": [dataclasses.asdict(row) for row in found.rows],
        "defaults": [dataclasses.asdict(row) for row in found.defaults],
        "recipe": found.recipe,
        "plan": None if found.plan is None else found.plan.to_dict(),
        "hash": None if found.plan is None else found.plan.hash,
        "missing": found.missing,
        "unsupported": found.unsupported,
    }


def _print_table(found: ImportedConfiguration) -> None:
    rows, translated = found.rows, found.translated
    counts = [
        f"{translated.count('carried') + translated.count('adapted')} carried over",
        f"{translated.count('unneeded') + translated.count('off')} not needed",
        f"{translated.count('lost')} do not carry over",
        f"{translated.count('unknown')} unknown",
    ]
    say(f"{translated.title}: {len(rows)} keys: {', '.join(counts)}\n")
    say("\n".join(table_lines([("key", "value", "becomes"), *map(_row, rows)])))
    if found.defaults:
        say(f"\n{translated.title}'s defaults, which the file leaves as they are:\n")
        say("\n".join(table_lines([_row(row) for row in found.defaults])))


def _row(row: KeyOutcome) -> tuple[str, str, str]:
    return row.key, row.value, str(row)


def _print_next(found: ImportedConfiguration, out: Path | None, plan: Path | None) -> None:
    say()
    if found.plan is None:
        say("plan     none: it needs --processes and --batch")
    else:
        where = "" if plan is None else f", written to {plan}"
        equation = found.plan.batch.equation(found.plan.data_degree, pipe=found.plan.pipe_degree)
        say(f"plan     {found.plan.hash}: {equation}{where}")
    say(f"recipe   {out or 'recipe.toml is written with --out'}")
    if found.missing:
        say(f"missing  {', '.join(found.missing)}: options of this command, or lines of the recipe")
    say(f"then     {found.command(str(out or 'recipe.toml'))}")
    for line in found.unsupported:
        warn(f"the executor cannot run this plan yet: {line}")
