"""`headway.import_configuration`: a configuration of another framework as recipe and plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import DocumentError, UsageError
from headway.keywords import checks_keywords
from headway.migration import (
    FORMATS,
    ImportedSettings,
    ImportRequest,
    KeyOutcome,
    RecipeParts,
    TranslatedConfiguration,
    recipe_text,
    translate_file,
)
from headway.migration.recipe_text import missing_parts
from headway.plans import Plan
from headway.plans.plan import unsupported_by_executor


@dataclass(frozen=True, kw_only=True)
class ImportedConfiguration:
    """What a configuration is in headway's words.

    Attributes:
        plan: None where the number of processes or the batch is not known.
        missing: What the recipe still needs, and nothing says.
        unsupported: What of the plan the executor cannot run yet.
    """

    translated: TranslatedConfiguration
    plan: Plan | None
    recipe: str
    missing: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def rows(self) -> tuple[KeyOutcome, ...]:
        """Every key of the file once, in its order."""
        return self.translated.rows

    @property
    def defaults(self) -> tuple[KeyOutcome, ...]:
        """Defaults of the framework that the file leaves as they are."""
        return self.translated.defaults

    @property
    def settings(self) -> ImportedSettings:
        """What carries over."""
        return self.translated.settings

    def command(self, recipe: str) -> str:
        """The command that trains the recipe in this file."""
        settings = self.settings
        words = ["headway train", recipe]
        words += [f"--processes {settings.processes}"] if settings.processes else []
        words += [f"--device {settings.device}"] if settings.device else []
        words += [f'--timeout "{settings.timeout}"'] if settings.timeout else []
        return " ".join(words)


@checks_keywords
def import_configuration(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002
    processes: int | None = None,
    batch: int | None = None,
    recipe: str | None = None,
    model: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    loss: str | None = None,
    criterion: str | None = None,
    optimizer: str | None = None,
    stop: str | None = None,
) -> ImportedConfiguration:
    """Translate a configuration of DeepSpeed, Accelerate or torchtitan.

    Args:
        path: A JSON, YAML or TOML file.
        format: "deepspeed", "accelerate" or "torchtitan"; None: as the file's keys say.
        processes: Of the whole job, where the file does not say it.
        batch: Samples of the global batch, where the file does not say it.
        recipe: "module:function" that returns a `Recipe`, in place of the parts below.
        model: "module:name" of a function that builds the model.
        data: "module:name" of a function that makes the training data.
        validation: "module:name" of a function that makes the validation data.
        loss: "module:name" of a loss of (model, batch), or "tokens".
        criterion: In place of it: "module:name" of a torch criterion.
        optimizer: "module:name", in place of the file's optimiser.
        stop: "300 steps", where the file does not say it.

    Raises:
        DocumentError: The file has problems; all are listed.
        PlanError: What it says is a plan that cannot exist.
        UsageError: No format is recognised, or options contradict each other.
        MissingExtra: The file is YAML, and PyYAML is not installed.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"no format {format!r}", fix=f"One of {', '.join(FORMATS)}.")
    parts = RecipeParts(
        recipe=recipe,
        model=model,
        data=data,
        validation=validation,
        loss=loss,
        criterion=criterion,
        optimizer=optimizer,
        stop=stop,
    )
    _check_parts(parts)
    file = Path(path)
    request = ImportRequest(format=format, processes=processes, batch=batch)
    translated = translate_file(file, request)
    settings = translated.settings
    plan = settings.plan()
    text = recipe_text(
        settings, parts, name=_run_name(file), source=f"{translated.title}'s {_one_line(file.name)}"
    )
    missing = missing_parts(settings, parts)
    if not missing:
        _check_recipe_text(text, file)
    return ImportedConfiguration(
        translated=translated,
        plan=plan,
        recipe=text,
        missing=missing,
        unsupported=() if plan is None else tuple(unsupported_by_executor(plan)),
    )


def _check_parts(parts: RecipeParts) -> None:
    whole = ("model", "data", "validation", "loss", "criterion", "optimizer")
    given = [name for name in whole if getattr(parts, name) is not None]
    if parts.recipe is not None and given:
        raise UsageError(
            f"--recipe {parts.recipe} brings its own {given[0]}",
            fix=f"Leave --{given[0]} or --recipe out.",
        )
    if parts.loss is not None and parts.criterion is not None:
        raise UsageError("--loss and --criterion are both given", fix="Leave one of them out.")


def _run_name(file: Path) -> str:
    found = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in file.stem)
    return found[:60].strip(".") or "imported"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _check_recipe_text(text: str, file: Path) -> None:
    """Refuse what the options have made of the recipe, before it is written.

    Raises:
        DocumentError: With every problem.
    """
    # The schema is the executor's; it imports no torch.
    from headway.documents import parse_toml, to_type
    from headway.run.recipe.schema import RecipeDocument, RecipeReference

    try:
        raw = parse_toml(text)
        to_type(raw, RecipeReference if "recipe" in raw else RecipeDocument, where="the recipe")
    except DocumentError as error:
        raise DocumentError(
            "no recipe can be made of it", where=str(file), problems=error.problems
        ) from None
