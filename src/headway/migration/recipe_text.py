"""recipe.toml of what carried over, with the origin of every line.

What a configuration cannot say (model, data, loss, often the batch and the end) is taken from the
user, or stands as a commented line: a recipe with a gap is refused with the name of what is
missing, and is never trained with a number that nobody chose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway.migration.settings import ImportedCall, ImportedSettings
from headway.plans import ExchangePlan, LayerSplit, PipelinePlan


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """The parts of a recipe that are code, as "module:name"; None: to be written by hand.

    Attributes:
        recipe: A function that returns a `Recipe`, whose scalar fields are overridden: then model,
            data, loss and the optimiser's class are its own.
        loss: A loss of (model, batch), or "tokens".
        criterion: In place of it: a torch criterion, for data that yields (input, target).
        optimizer: In place of the configuration's.
    """

    recipe: str | None = None
    model: str | None = None
    data: str | None = None
    validation: str | None = None
    loss: str | None = None
    criterion: str | None = None
    optimizer: str | None = None
    stop: str | None = None


_SCALARS = (
    "microbatch", "clip", "precision", "seed", "workers", "drop_last", "tokens_per_sample",
    "checkpoint_every", "checkpoint_keep", "loggers", "stages", "zero", "shards",
)  # fmt: skip
_OF_VALIDATION = ("validate_every", "validation_samples")
_TABLES: Mapping[str, ExchangePlan | PipelinePlan | LayerSplit] = {
    "exchange": ExchangePlan(),
    "pipeline": PipelinePlan(),
    "split": LayerSplit(),
}
_DEFAULT = ImportedSettings()


def recipe_text(settings: ImportedSettings, parts: RecipeParts, *, name: str, source: str) -> str:
    """The text of a recipe.toml.

    Args:
        name: Of the run.
        source: Where the settings come from, for the first line.
    """
    lines = [f"# Made by `headway import` from {source}", ""]
    if parts.recipe is not None:
        lines += [f"recipe = {toml(parts.recipe)}", *_head(settings, parts, "")]
        if settings.optimizer is not None:
            # Options are laid over those of the optimiser that the recipe builds.
            lines += _table("optimizer", settings.optimizer.arguments)
        return "\n".join([*lines, *_plan_tables(settings)]) + "\n"
    lines += [f"name = {toml(name)}", *_head(settings, parts, "# ")]
    lines += _code("model", parts.model, "my_module:build_model")
    lines += _code("data", parts.data, "my_module:training_data")
    if parts.loss == "tokens":
        lines.insert(3, 'loss = "tokens"')
    elif parts.criterion is not None:
        lines += ["", "[loss]", f"criterion = {toml(parts.criterion)}"]
    else:
        lines += _code("loss", parts.loss, "my_module:loss")
    if parts.validation is not None:
        lines += _code("validation", parts.validation, "")
    chosen = settings.optimizer if parts.optimizer is None else ImportedCall(call=parts.optimizer)
    lines += _call("optimizer", chosen, "torch.optim:AdamW")
    if settings.scheduler is not None:
        lines += _call("scheduler", settings.scheduler, "")
    return "\n".join([*lines, *_plan_tables(settings)]) + "\n"


def missing_parts(settings: ImportedSettings, parts: RecipeParts) -> tuple[str, ...]:
    """What stands in the recipe as a commented line, because nothing says it."""
    if parts.recipe is not None:
        return ()
    found = {
        "batch": settings.batch,
        "stop": parts.stop or settings.stop,
        "model": parts.model,
        "data": parts.data,
        "loss": parts.loss or parts.criterion,
        "optimizer": parts.optimizer or settings.optimizer,
    }
    return tuple(name for name, value in found.items() if value is None)


def _head(settings: ImportedSettings, parts: RecipeParts, gap: str) -> Iterator[str]:
    """The scalar fields.

    Args:
        gap: In front of what nothing says; "": such a line is left out.
    """
    stop = parts.stop or settings.stop
    for name, value, example in (("batch", settings.batch, 64), ("stop", stop, "300 steps")):
        if value is not None:
            yield f"{name} = {toml(value)}"
        elif gap:
            yield f"{gap}{name} = {toml(example)}  (write yours)"
    for name in _SCALARS:
        value = getattr(settings, name)
        if value != getattr(_DEFAULT, name):
            yield f"{name} = {toml(value)}"
    for name in _OF_VALIDATION:
        value = getattr(settings, name)
        if value is not None:
            needs = "" if parts.validation or not gap else "# "
            yield f"{needs}{name} = {toml(value)}" + ("  (needs [validation])" if needs else "")


def _code(table: str, call: str | None, example: str) -> list[str]:
    if call is None:
        return ["", f"# [{table}]", f"# call = {toml(example)}  (write yours)"]
    return ["", f"[{table}]", f"call = {toml(call)}"]


def _call(table: str, call: ImportedCall | None, example: str) -> list[str]:
    if call is None:
        return _code(table, None, example)
    return [*_table(table, (("call", call.call), *call.arguments))]


def _table(name: str, items: Sequence[tuple[str, Any]]) -> Iterator[str]:
    if items:
        yield from ("", f"[{name}]")
        yield from (f"{key} = {toml(value)}" for key, value in items)


def _plan_tables(settings: ImportedSettings) -> Iterator[str]:
    for table, default in _TABLES.items():
        given = getattr(settings, table)
        changed = [
            (field.name, getattr(given, field.name))
            for field in fields(default)
            if getattr(given, field.name) != getattr(default, field.name)
        ]
        yield from _table(table, changed)


def toml(value: Any) -> str:
    """A value as TOML has it: text, number, truth value, list or table of such."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_bare(key)} = {toml(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control sign that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _bare(key: str) -> str:
    return key if key.replace("-", "_").isidentifier() and key.isascii() else toml(key)
