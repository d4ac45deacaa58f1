"""Amounts with units, as users write and read them: "80 GiB", "25 Gbit/s", "2 ms", "300 steps".

Inside the library a size is a number of bytes, a duration a number of seconds, a rate a number of
bytes per second. This module is the only place where text becomes such a number and back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*$")
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_RATES = {f"{p}B/s": f for p, f in (_DECIMAL | _BINARY).items()} | {
    f"{p}bit/s": f / 8 for p, f in (_DECIMAL | _BINARY).items()
}
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _parse(text: str | float, units: dict[str, float], kind: str, bare: str | None) -> float:
    """Number times the factor of its unit; a bare number is allowed where `bare` names its unit."""
    match = _NUMBER.match(str(text))
    if match is not None:
        number, unit = match.groups()
        factor = units.get(unit or (bare or ""))
        if factor is not None and (unit or bare is not None):
            return float(number.replace("_", "")) * factor
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


def format_bytes(size: float) -> str:
    """Three significant digits with a binary unit: 1536 -> "1.50 KiB"."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the fitting unit: 0.0021 -> "2.1 ms"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_rate(rate: float) -> str:
    """Network convention, decimal bits: 3.125e9 -> "25 Gbit/s"."""
    bits, prefix = rate * 8, ""
    for prefix in ("", "k", "M", "G", "T"):
        if bits < 1000 or prefix == "T":
            break
        bits /= 1000
    return f"{bits:.3g} {prefix}bit/s"


@dataclass(frozen=True)
class Amount:
    """A count with its unit, for example Amount(300, "steps")."""

    value: int
    unit: str

    @staticmethod
    def parse(text: str | int, units: tuple[str, ...]) -> Amount:
        """Parse "300 steps", "10M samples", "1 epoch"; a bare number has the first of `units`.

        Raises:
            ValueError: The number is not positive or the unit is not one of `units`.
        """
        match = _NUMBER.match(str(text))
        if match is not None:
            number, rest = match.groups()
            prefix, unit = "", rest
            if rest and rest[0] in _DECIMAL and rest[0] != "":
                head = rest[1:].strip()
                if _plural(head) in units:
                    prefix, unit = rest[0], head
            unit = _plural(unit) if unit else units[0]
            value = float(number.replace("_", "")) * _DECIMAL[prefix]
            if unit in units and value > 0 and value == int(value):
                return Amount(int(value), unit)
        raise ValueError(f"{text!r} is not a positive count of {' or '.join(units)}")

    def __str__(self) -> str:
        unit = self.unit[:-1] if self.value == 1 and self.unit.endswith("s") else self.unit
        return f"{self.value} {unit}"


def _plural(unit: str) -> str:
    return unit if unit.endswith("s") else unit + "s"
