"""timeline.json: the Chrome trace of a run, checked before it is written.

Perfetto and chrome://tracing silently drop events that lack a field; so nothing is written that
they would drop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headway.timeline import Timeline

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "X": ("name", "cat", "ph", "pid", "tid", "ts", "dur"),
    "M": ("name", "ph", "pid", "tid", "args"),
}


def check_chrome(trace: Mapping[str, Any]) -> list[str]:
    """Every reason why a viewer would drop an event of a Chrome trace; empty for a sound one."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is not a list"]
    return [
        f"traceEvents.{number}: {problem}"
        for number, event in enumerate(events)
        for problem in _problems(event)
    ]


def _problems(event: Any) -> list[str]:
    if not isinstance(event, Mapping):
        return ["is not an object"]
    phase = str(event.get("ph"))
    if phase not in _FIELDS:
        return [f"ph is {phase}; one of {', '.join(_FIELDS)}"]
    found = [f"{field} is missing" for field in _FIELDS[phase] if field not in event]
    found += [
        f"{field} is {event[field]!r}, not a whole number"
        for field in ("pid", "tid")
        if field in event and not isinstance(event[field], int)
    ]
    for field in ("ts", "dur"):
        value = event.get(field, 0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            found.append(f"{field} is {value!r}, not a time in microseconds")
    return found


def chrome_json(timeline: Timeline) -> str:
    """The text of timeline.json.

    Raises:
        ValueError: The timeline has an event that viewers would drop.
    """
    trace = timeline.to_chrome()
    problems = check_chrome(trace)
    if problems:
        raise ValueError("not a sound Chrome trace: " + "; ".join(problems[:5]))
    return json.dumps(trace, allow_nan=False) + "\n"
