"""What a plan predicts, beside what its run measures: the words of a progress line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from headway.documents import to_type
from headway.plan.prediction import Prediction
from headway.units import format_seconds

Parts = tuple[float, float, float]
"""Seconds of compute, of waiting for others, of the update."""
WORDS = ("compute", "wait", "update")


def read_expected(predicted: Mapping[str, Any] | None) -> Prediction | None:
    """The prediction in the first event of a run; None: its plan has none.

    Raises:
        DocumentError: It is of another form.
    """
    if not predicted:
        return None
    found: Prediction = to_type(dict(predicted), Prediction, where="the first event")
    return found


def announced(predicted: Mapping[str, Any] | None) -> Iterator[str]:
    """What is expected of a step, and on which device, in a line; nothing where nothing is."""
    known = read_expected(predicted)
    if known is not None:
        where = f" on {known.device}" if known.device else ""
        yield f"predicted: {format_seconds(known.seconds)} a step{where}"


def parts_of(event: Mapping[str, Any]) -> Parts:
    """Of a step of one rank."""
    return event.get("compute", 0.0), event["exposed"], event.get("update", 0.0)


def beside(expected: Prediction | None, seconds: float, parts: Sequence[Parts]) -> str:
    """ " (predicted 104 ms, -5%; compute 80.1 ms/78 ms, ...)", measured before predicted.

    Args:
        expected: None: "".
        seconds: Of a step, as measured.
        parts: Of recent steps.
    """
    if expected is None or seconds <= 0:
        return ""
    texts = [f"predicted {format_seconds(expected.seconds)}, {expected.seconds / seconds - 1:+.0%}"]
    known = (expected.compute, expected.waiting, expected.update)
    if parts:
        found = (median(part[number] for part in parts) for number in range(len(WORDS)))
        texts.append(
            ", ".join(
                f"{word} {format_seconds(one)}/{format_seconds(other)}"
                for word, one, other in zip(WORDS, found, known, strict=True)
            )
        )
    return f" ({'; '.join(texts)})"
