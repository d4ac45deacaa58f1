"""The single values of recipe.toml: what each may be, and how a wrong one is reported.

Each type checks its value alone and leaves it as it is written; what does not go together is found
in `recipe_schema`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from headway.optim.scaling import Scaling
from headway.units import Amount, parse_bytes

BATCH_UNITS = ("samples", "tokens")
STOP_UNITS = ("steps", "epochs", "samples", "tokens")


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _whole(least: int) -> BeforeValidator:
    def check(value: object) -> object:
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


def _name(value: object) -> object:
    """The name becomes a directory."""
    value = _text(value)
    if any(sign in str(value) for sign in "/\\\0") or str(value) in {".", ".."}:
        raise ValueError(f"{value!r} names the run directory; leave out slashes and dots alone")
    return value


def table_of(*own: str) -> BeforeValidator:
    """Gather what is not one of the table's `own` keys as keyword arguments."""

    def gather(value: object) -> object:
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


Least0 = Annotated[int, _whole(0)]
Least1 = Annotated[int, _whole(1)]
Batch = Annotated[int | str, _amount(BATCH_UNITS, '"64 samples" or "8192 tokens"')]
Stop = Annotated[int | str, _amount(STOP_UNITS, '"300 steps", "2 epochs" or "1M samples"')]
Name = Annotated[str, BeforeValidator(_name)]
Text = Annotated[str, BeforeValidator(_text)]
Size = Annotated[int | str, BeforeValidator(_size)]
Reference = Annotated[str, BeforeValidator(_reference)]
Precision = Literal["float32", "float64", "bfloat16"]
Positive = Annotated[float, BeforeValidator(_positive)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Scale = Annotated[str, BeforeValidator(_scaling)]
