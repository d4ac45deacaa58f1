"""What of a gradient is sent: the compressors by name, as data.

A compressor is written as a text, "name" or "name:amount" ("mstopk:0.01", "powersgd:2"). This table
knows what each one may be combined with and how many bytes it sends; `comm` holds the classes that
do the work, and their payloads must have exactly these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.documents import nearest

Amount = Literal["none", "density", "rank"]


@dataclass(frozen=True, kw_only=True)
class CompressorFacts:
    """What is known of a compressor without running it.

    Attributes:
        amount: What the number behind the colon means.
        summable: The network may add encoded payloads, so that any all-reduce carries them; the
            others are gathered from all ranks and decoded one by one.
        feedback: What was not sent is kept and added to the next gradient (error feedback).
        exact: The sum is that of the uncompressed exchange.
    """

    amount: Amount = "none"
    summable: bool
    feedback: bool
    exact: bool = False


COMPRESSORS: dict[str, CompressorFacts] = {
    "none": CompressorFacts(summable=True, feedback=False, exact=True),
    "fp16": CompressorFacts(summable=True, feedback=False),
    "bf16": CompressorFacts(summable=True, feedback=False),
    "int8": CompressorFacts(summable=False, feedback=False),
    "sign": CompressorFacts(summable=False, feedback=True),
    "topk": CompressorFacts(amount="density", summable=False, feedback=True),
    "mstopk": CompressorFacts(amount="density", summable=False, feedback=True),
    "adaptive": CompressorFacts(amount="density", summable=False, feedback=True),
    "randomk": CompressorFacts(amount="density", summable=True, feedback=True),
    "powersgd": CompressorFacts(amount="rank", summable=True, feedback=True),
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A compressor with its amount: density in (0, 1], or rank from 1."""

    name: str
    amount: float = 0.0

    @property
    def facts(self) -> CompressorFacts:
        return COMPRESSORS[self.name]

    @property
    def rank(self) -> int:
        """Of "powersgd:2": 2."""
        return int(self.amount)

    def __str__(self) -> str:
        return self.name if self.facts.amount == "none" else f"{self.name}:{self.amount:g}"


def parse_compression(text: str) -> Compression:
    """Read "fp16", "mstopk:0.01" or "powersgd:4".

    Raises:
        ValueError: No such compressor, or an amount that it cannot have; says what is legal.
    """
    name, colon, number = text.strip().partition(":")
    if name not in COMPRESSORS:
        raise ValueError(f"{name!r} is no compressor{nearest(name, list(COMPRESSORS))}")
    kind = COMPRESSORS[name].amount
    if kind == "none":
        if colon:
            raise ValueError(f"{name} takes no amount; write {name}")
        return Compression(name=name)
    example = f"{name}:0.01" if kind == "density" else f"{name}:2"
    try:
        amount = float(number)
    except ValueError:
        raise ValueError(f"{name} needs a {kind}; for example {example}") from None
    if kind == "density" and not 0 < amount <= 1:
        raise ValueError(f"{text}: a density lies between 0 and 1; for example {example}")
    if kind == "rank" and (amount < 1 or amount != int(amount)):
        raise ValueError(f"{text}: a rank is a whole number from 1; for example {example}")
    return Compression(name=name, amount=amount)
