"""Amounts with units, as users write and read them: "80 GiB", "25 Gbit/s", "2 ms", "2.5 USD/h".

Inside the library a size is a number of bytes, a duration a number of seconds, a rate a number of
bytes (or FLOP) per second. This module is the only place where text becomes such a number and back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*(.*?)\s*$")
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_RATES = {f"{p}B/s": f for p, f in (_DECIMAL | _BINARY).items()} | {
    f"{p}bit/s": f / 8 for p, f in (_DECIMAL | _BINARY).items()
}
_FLOPS = {f"{p}FLOP/s": f for p, f in _DECIMAL.items() if p != "K"}
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _parse(text: str | float, units: Mapping[str, float], kind: str, bare: str | None) -> float:
    """Number times the factor of its unit; a bare number is allowed where `bare` names its unit."""
    match = _NUMBER.match(str(text))
    if match is not None:
        number, unit = match.groups()
        factor = units.get(unit or (bare or ""))
        if factor is not None and math.isfinite(float(number) * factor):
            return float(number) * factor
    legal = ", ".join(u for u in units if u)
    raise ValueError(f"{text!r} is not a {kind}; write a number and one of: {legal}")


def parse_bytes(text: str | float) -> int:
    """Bytes of "80 GiB", "1.5 MB" or a bare number of bytes."""
    return round(_parse(text, _SIZES, "size", "B"))


def parse_seconds(text: str | float) -> float:
    """Seconds of "2 ms", "1.5 h" or a bare number of seconds."""
    return _parse(text, _DURATIONS, "duration", "s")


def parse_rate(text: str | float) -> float:
    """Bytes per second of "25 Gbit/s" or "3 GB/s"; a bare number would be ambiguous: an error."""
    return _parse(text, _RATES, "rate", None)


def parse_flops(text: str | float) -> float:
    """FLOP per second of "312 TFLOP/s"; a bare number would be ambiguous: an error."""
    return _parse(text, _FLOPS, "rate of computing", None)


def format_bytes(size: float) -> str:
    """Three significant digits with a binary unit: 1536 -> "1.5 KiB"."""
    if abs(size) < 1024:
        return f"{size:.0f} B"
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_seconds(seconds: float) -> str:
    """Three significant digits with the fitting unit: 0.0021 -> "2.1 ms", 65 -> "1 min 5 s"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 59.95:
        return _scaled(seconds * 1e9, 1000, ("ns", "us", "ms", "s")) if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{_three(seconds / 3600)} h"


def format_rate(rate: float) -> str:
    """Network convention, decimal bits: 3.125e9 -> "25 Gbit/s"."""
    return _scaled(rate * 8, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_flops(rate: float) -> str:
    """Three significant digits with the fitting unit: 3.12e14 -> "312 TFLOP/s"."""
    return _scaled(rate, 1000, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def exact_bytes(size: float) -> str:
    """For files, to 12 digits: 1.5 * 2**30 -> "1.5 GiB"."""
    return _exact(size, _SIZES, ("GiB", "MiB", "KiB", "B"))


def exact_seconds(seconds: float) -> str:
    """For files, to 12 digits: 3.21e-6 -> "3.21 us"."""
    return _exact(seconds, _DURATIONS, ("s", "ms", "us", "ns"))


def exact_rate(rate: float) -> str:
    """For files, to 12 digits, in bytes: 2.91e9 -> "2.91 GB/s"."""
    return _exact(rate, _RATES, ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"))


def exact_flops(rate: float) -> str:
    """For files, to 12 digits: 3.12e14 -> "312 TFLOP/s"."""
    return _exact(rate, _FLOPS, ("TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"))


def _exact(value: float, factors: Mapping[str, float], units: tuple[str, ...]) -> str:
    """In the first of `units`, from large to small, that leaves at least 1 before the point; below
    the smallest, as 0 is, in the smallest."""
    unit = next((unit for unit in units if value >= factors[unit]), units[-1])
    return f"{value / factors[unit]:.12g} {unit}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """`value` in the first unit in which its three digits are below `step`, or in the last."""
    for unit in units[:-1]:
        # Rounded first: 999.6 Mbit/s becomes "1 Gbit/s", never "1e+03 Mbit/s".
        if abs(float(f"{value:.3g}")) < min(step, 1000):
            return f"{_three(value)} {unit}"
        value /= step
    return f"{_three(value)} {units[-1]}"


def counted(number: object, noun: str) -> str:
    """A number with its noun: "1 sample", "2 samples", "2 processes"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def format_number(value: float) -> str:
    """A number without a unit: three significant digits, 12345 -> "12,345"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def format_share(share: float) -> str:
    """A percentage that does not become nothing: 0.078 -> "7.8%", 0.00005 -> "0.005%"."""
    return f"{share:.1%}" if share >= 0.01 or share == 0 else f"{100 * share:.2g}%"


def _three(value: float) -> str:
    """Three significant digits, never with an exponent above 999: 12345 -> "12345"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


@dataclass(frozen=True)
class Amount:
    """A count with its unit, for example Amount(300, "steps")."""

    value: int
    unit: str

    @staticmethod
    def parse(text: str | int, units: tuple[str, ...]) -> Amount:
        """Parse "300 steps", "10M samples", "1 epoch"; a bare number has the first of `units`.

        Raises:
            ValueError: The number is not positive and whole, or the unit is not one of `units`.
        """
        match = _NUMBER.match(str(text))
        if match is not None:
            number, rest = match.groups()
            # Where the whole word is a unit, its first letter is no prefix.
            prefix = rest[:1] if rest[:1] in _DECIMAL and _unit(rest, units) is None else ""
            unit = _unit(rest.removeprefix(prefix), units)
            # Not a float: "2.3M" is a whole number, and a product of floats need not be one.
            value = Decimal(number) * _DECIMAL[prefix]
            if unit is not None and 0 < value < 10**18 and value == int(value):
                return Amount(int(value), unit)
        raise ValueError(f"{text!r} is not a positive count of {' or '.join(units)}")

    def __str__(self) -> str:
        unit = self.unit[:-1] if self.value == 1 and self.unit.endswith("s") else self.unit
        return f"{self.value} {unit}"


@dataclass(frozen=True)
class Price:
    """Money per hour, for example Price(2.5, "USD")."""

    per_hour: float
    currency: str

    @staticmethod
    def parse(text: str) -> Price:
        """Parse "2.5 USD/h".

        Raises:
            ValueError: It is no amount of a currency per hour.
        """
        match = _NUMBER.match(str(text))
        unit = re.fullmatch(r"([A-Za-z€$£]{1,8})\s*/\s*h", match.group(2)) if match else None
        if match is None or unit is None:
            raise ValueError(f'{text!r} is no price; write it as "2.5 USD/h"')
        return Price(float(match.group(1)), unit.group(1))

    def __str__(self) -> str:
        return f"{self.per_hour:g} {self.currency}/h"


def _unit(word: str, units: tuple[str, ...]) -> str | None:
    """The unit that `word` means, in singular or plural; the first where there is no word."""
    word = word.strip() or units[0]
    return next((unit for unit in units if word in (unit, unit.removesuffix("s"))), None)
