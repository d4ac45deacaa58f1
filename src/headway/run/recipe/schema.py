"""The schema of recipe.toml and its overrides, checked without torch.

Two forms are legal. A `RecipeDocument` names the parts (model, data, loss, optimiser) in tables; a
`RecipeReference` names a Python function that returns a `Recipe`. In both, every scalar field of
`Recipe` may stand at the top. All other keys of a table beside `call` are keyword arguments.

The types of single values (`Batch`, `Stop`, `NonNegativeInt`) check a value alone and leave it as
it is written; keys that contradict each other are found afterwards, so that one run reports all
problems with their lines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from headway.documents import (
    check_limits,
    document,
    find_line,
    parse_toml,
    read_text,
    to_type,
)
from headway.errors import DocumentError, RecipeError
from headway.optim.lr_scaling import Scaling
from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, Synchrony
from headway.plans.batch import Norm
from headway.plans.plan import Zero
from headway.units import Amount, parse_bytes

BATCH_UNITS = ("samples", "tokens")
STOP_UNITS = ("steps", "epochs", "samples", "tokens")


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _whole(least: int) -> BeforeValidator:
    def check(value: object) -> object:
        # A bool is an int in Python: `workers = true` would pass for 1.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{_show(value)} is not a whole number of at least {least}")
        return value

    return BeforeValidator(check)


def _amount(units: tuple[str, ...], example: str) -> BeforeValidator:
    def check(value: object) -> object:
        try:
            Amount.parse(value if isinstance(value, int) else str(value), units)
        except ValueError as error:
            raise ValueError(f"{error}; for example {example}") from None
        return value

    return BeforeValidator(check)


def _scaling(value: object) -> object:
    Scaling.parse(str(value))
    return value


def _size(value: object) -> object:
    try:
        parse_bytes("" if isinstance(value, bool) else str(value))
    except ValueError:
        raise ValueError(f'{_show(value)} is not a size; for example "2 GiB"') from None
    return value


def _text(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{_show(value)} is not a text; write it in quotes")
    return value


def _positive(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{_show(value)} is not a number greater than 0")
    return value


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"{_show(value)} is neither true nor false")
    return value


def _reference(value: object) -> object:
    module, colon, name = str(value).partition(":")
    if not isinstance(value, str) or not (module and colon and name):
        raise ValueError(f'{value!r} is not of the form "module:name", as in "torch.nn:Linear"')
    return value


MAX_NAME_BYTES = 200
"""Of a run's name; file systems take 255 bytes, and "-001" follows."""


def _name(value: object) -> object:
    # The name becomes a directory.
    value = _text(value)
    if any(sign in str(value) for sign in "/\\\0") or str(value) in {".", ".."}:
        raise ValueError(f"{value!r} names the run directory; leave out slashes and dots alone")
    length = len(str(value).encode())
    if length > MAX_NAME_BYTES:
        raise ValueError(f"names the run directory: {length} bytes, at most {MAX_NAME_BYTES}")
    return value


def table_of(*own: str, **shorthands: str) -> BeforeValidator:
    """Gather what is not one of the table's `own` keys as keyword arguments.

    Args:
        shorthands: Texts that stand for a table whose `call` is given.
    """

    def gather(value: object) -> object:
        if isinstance(value, str) and value in shorthands:
            return {"call": shorthands[value]}
        if not isinstance(value, dict):
            raise ValueError(
                f'{value!r} is not a table; write it as [table] with call = "module:name"'
            )
        if "memmap" in value:
            return value
        extra = {key: inner for key, inner in value.items() if key not in (*own, "arguments")}
        rest = {key: inner for key, inner in value.items() if key not in extra}
        given = value.get("arguments", {})
        return rest | {"arguments": extra | given} if isinstance(given, dict) else rest

    return BeforeValidator(gather)


TOKEN_LOSS = "headway.huggingface:TokenLoss"
"""What `loss = "tokens"` stands for."""

NonNegativeInt = Annotated[int, _whole(0)]
PositiveInt = Annotated[int, _whole(1)]
Batch = Annotated[int | str, _amount(BATCH_UNITS, '"64 samples" or "8192 tokens"')]
Stop = Annotated[int | str, _amount(STOP_UNITS, '"300 steps", "2 epochs" or "1M samples"')]
Name = Annotated[str, BeforeValidator(_name)]
Text = Annotated[str, BeforeValidator(_text)]
Size = Annotated[int | str, BeforeValidator(_size)]
Reference = Annotated[str, BeforeValidator(_reference)]
Precision = Literal["float32", "float64", "bfloat16"]
PositiveFloat = Annotated[float, BeforeValidator(_positive)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Scale = Annotated[str, BeforeValidator(_scaling)]


@document
class RecipeCall:
    """`call` names a class or function; all other keys of the table are its keyword arguments.

    In [scheduler], an argument that is itself a table with `call` names a further scheduler.

    `arguments` may be written as a table of its own where a keyword is itself named "call".
    """

    call: Reference
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@document
class LossTable:
    """Either `criterion` (input, target) -> mean, or `call`, a `Loss` of (model, batch)."""

    call: Reference | None = None
    criterion: Reference | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.call is None) == (self.criterion is None):
            raise ValueError(
                "needs either criterion (a torch criterion) or call (a loss), not both"
            )


@document
class CacheTable:
    """The arguments of `headway.data.cached`; `prepare` and `augment` name functions."""

    memory: Size | None = None
    disk: Text | None = None
    disk_limit: Size | None = None
    name: Text | None = None
    version: int | str | None = None
    prepare: Reference | None = None
    augment: Reference | None = None

    def __post_init__(self) -> None:
        if not (self.memory or self.disk):
            raise ValueError("needs memory (a size), disk (a directory on a local disk), or both")
        if self.disk_limit is not None and self.disk is None:
            raise ValueError("disk_limit needs disk, a directory on a local disk")


@document
class DataTable:
    """Either `call` with arguments, or `memmap` with `window` and `dtype`; both may be cached."""

    cache: CacheTable | None = None
    call: Reference | None = None
    memmap: Text | None = None
    window: PositiveInt | None = None
    dtype: Text | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.call is None) == (self.memmap is None):
            raise ValueError(
                "needs either call (a function) or memmap (a file of tokens), not both"
            )
        if self.memmap is not None and self.arguments:
            raise ValueError("arguments belong to call, not to memmap")


CallTable = Annotated[RecipeCall, table_of("call")]
DataCall = Annotated[DataTable, table_of("call", "cache")]


@document
class Scalars:
    """The optional scalar fields of `Recipe`; None: not given, the default of `Recipe` holds."""

    microbatch: PositiveInt | None = None
    validate_every: NonNegativeInt | None = None
    validation_samples: PositiveInt | None = None
    weights: Text | None = None
    weights_only: tuple[Text, ...] | None = None
    loggers: tuple[Text, ...] | None = None
    monitor: Text | None = None
    monitor_mode: Literal["min", "max"] | None = None
    early_stopping: NonNegativeInt | None = None
    keep_best: Flag | None = None
    scale_rate: Scale | None = None
    seed: NonNegativeInt | None = None
    clip: PositiveFloat | None = None
    precision: Precision | None = None
    checkpoint_every: NonNegativeInt | None = None
    checkpoint_keep: PositiveInt | None = None
    workers: NonNegativeInt | None = None
    drop_last: Flag | None = None
    tokens_per_sample: PositiveInt | None = None
    exchange: ExchangePlan | None = None
    stages: PositiveInt | None = None
    pipeline: PipelinePlan | None = None
    shares: tuple[PositiveFloat, ...] | None = None
    zero: Zero | None = None
    shards: PositiveInt | None = None
    split: LayerSplit | None = None
    norm: Norm | None = None
    synchrony: Synchrony | None = None


@document
class RecipeDocument(Scalars):
    """recipe.toml that names the parts."""

    name: Name
    batch: Batch
    stop: Stop
    model: CallTable
    data: DataCall
    loss: Annotated[LossTable, table_of("call", "criterion", tokens=TOKEN_LOSS)]
    optimizer: CallTable
    validation: DataCall | None = None
    metrics: CallTable | None = None
    scheduler: CallTable | None = None
    collate: CallTable | None = None
    showcase: CallTable | None = None


@document
class RecipeReference(Scalars):
    """recipe.toml that names a function, or a function named on the command line.

    `optimizer` holds options that are laid over those of the optimiser that the recipe builds.
    """

    recipe: Reference
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: Name | None = None
    batch: Batch | None = None
    stop: Stop | None = None


AnyRecipe = RecipeDocument | RecipeReference


def nested_calls(arguments: Mapping[str, Any]) -> dict[str, RecipeCall]:
    """The arguments that are themselves tables with `call`, by name."""
    return {
        name: RecipeCall(
            call=value["call"], arguments={k: v for k, v in value.items() if k != "call"}
        )
        for name, value in arguments.items()
        if isinstance(value, Mapping) and isinstance(value.get("call"), str)
    }


def scalars_of(recipe: AnyRecipe) -> dict[str, Any]:
    """The scalar fields that were given, by name of the field of `Recipe`."""
    names = [f.name for f in dataclasses.fields(Scalars)] + ["name", "batch", "stop"]
    return {n: getattr(recipe, n) for n in names if getattr(recipe, n) is not None}


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read and check a recipe file.

    Args:
        overrides: "key=value" each, laid over the file before it is checked.

    Raises:
        DocumentError: The file cannot be read, is not TOML, or has problems; all are listed.
        RecipeError: An override is not of the form key=value.
    """
    text, raw = _parse(path)
    changed = apply_overrides(raw, overrides)
    in_file = _problems(raw, str(path), text)
    problems = _problems(changed, "--set", "") if overrides else in_file
    # What is wrong in the file already is told with its line there, not as an override's problem.
    known = {_message(line): line for line in in_file}
    merged = sorted((known.get(_message(line), line) for line in problems), key=_line)
    return _check(changed, merged, str(path))


def reference_recipe(reference: str, overrides: Sequence[str] = ()) -> RecipeReference:
    """The document that "module:function" and its overrides stand for.

    Raises:
        DocumentError: The reference or an override is wrong; all problems are listed.
        RecipeError: An override is not of the form key=value.
    """
    raw = apply_overrides({"recipe": reference}, overrides)
    problems = [_with_tables(problem, raw) for problem in _problems(raw, "--set", "")]
    checked = _check(raw, problems, "--set")
    assert isinstance(checked, RecipeReference)
    return checked


def _with_tables(problem: str, raw: Mapping[str, Any]) -> str:
    """An unknown key is most often an option of the optimiser or an argument of the function."""
    match = re.search(r"unknown key (\w+)", problem)
    if match is None or match[1] not in raw or "did you mean" in problem:
        return problem
    key = match[1]
    return (
        f"{problem[: match.end()]}; write optimizer.{key} for an option of the optimiser, "
        f"arguments.{key} for an argument of the function"
    )


def given_keys(path: Path | None, overrides: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The keys of these tables that a checked file and its overrides give."""
    raw = apply_overrides(_parse(path)[1] if path else {}, overrides)
    return {name: tuple(raw.get(name, ())) for name in ("exchange", "pipeline", "synchrony")}


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    text = read_text(path)
    try:
        return text, parse_toml(text)
    except ValueError as error:
        problems = [str(error)]
        raise DocumentError("is not valid TOML", where=str(path), problems=problems) from None


def _kind(raw: Mapping[str, Any]) -> type[AnyRecipe]:
    return RecipeReference if "recipe" in raw else RecipeDocument


def _check(raw: dict[str, Any], problems: Sequence[str], where: str) -> AnyRecipe:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise DocumentError(f"{count}:", where=where, problems=problems)
    return to_type(raw, _kind(raw), where=where)


def _message(problem: str) -> str:
    """A problem without its place."""
    return problem.partition("  ")[2]


def _problems(raw: dict[str, Any], where: str, text: str) -> list[str]:
    """Everything that is wrong, one line each, in the order of the file."""
    found: list[str] = []
    try:
        to_type(raw, _kind(raw), where=where, text=text)
    except DocumentError as error:
        found.extend(error.problems)
    for key, message in _contradictions(raw):
        line = find_line(text, key.split("."))
        found.append(f"{where}:{line}  {message}" if line else f"{where}  {message}")
    return sorted(found, key=_line)


def _line(problem: str) -> int:
    # Missing keys have no line; they come first.
    number = problem.partition("  ")[0].rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _contradictions(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys that do not go together, as (key, message); each key alone is checked by its type."""
    if "recipe" in raw:
        return []
    found: list[tuple[str, str]] = []
    if tokens_per_sample(raw) is None:
        found.extend(
            (key, f"{key} is stated in tokens; tokens_per_sample must say how many a sample has")
            for key in ("batch", "stop", "scale_rate")
            if str(raw.get(key, "")).rstrip().endswith(("token", "tokens"))
        )
    if "validation" not in raw:
        found.extend(
            (key, f"{key} needs a [validation] table")
            for key in ("validate_every", "validation_samples", "early_stopping", "keep_best")
            if raw.get(key)
        )
    return found


def tokens_per_sample(raw: Mapping[str, Any]) -> int | None:
    """As stated, or the window of the memory-mapped data."""
    data = raw.get("data")
    window = data.get("window") if isinstance(data, dict) and "memmap" in data else None
    stated: int | None = raw.get("tokens_per_sample", window)
    return stated


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a document with "dotted.key=value" laid over it.

    A value is written as in TOML; what is not TOML is a text, so that `stop=300 steps` needs no
    second pair of quotes.

    Raises:
        RecipeError: An override has no "=", goes through a key that is not a table, or is beyond
            the limits of documents.
    """
    # Tables inside are changed as well, and `read_recipe` still needs the file as it was.
    changed = deepcopy(dict(raw))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key.strip() and equals):
            raise RecipeError(
                f"{override!r} is not of the form key=value",
                where="--set",
                fix="For example: --set optimizer.lr=0.001",
            )
        *tables, last = key.strip().split(".")
        table: Any = changed
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise RecipeError(f"{name} in {key.strip()!r} is not a table", where="--set")
        table[last] = _value(text.strip())
    try:
        check_limits(changed)
    except ValueError as error:
        raise RecipeError(str(error), where="--set") from None
    return changed


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except TOMLDecodeError:
        return text
    except ValueError as error:
        raise RecipeError(
            f"the value {text[:20]}... cannot be used: {error}", where="--set"
        ) from None
