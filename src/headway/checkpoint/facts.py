"""Facts that travel with the tensors (scheduler, cursor, counters) as JSON, without pickle.

Invariant: `decode(encode(facts)) == facts` with the same types. What JSON cannot say is tagged:
`{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$float": "nan"}`. A dictionary with a key
that begins with "$" is written in the tagged form too: no user's key can be taken for a tag.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from headway.errors import CheckpointDamaged, CheckpointError


def encode(value: Any, path: str = "facts") -> Any:
    """The JSON form of nested plain values.

    Args:
        value: None, bool, int, float, str, bytes; list, tuple, dict, OrderedDict, Counter of such.
        path: Where the value stands, for messages.

    Raises:
        CheckpointError: A value of another type; the message names its path.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):  # numpy's float64 is a float too, and schedulers return it
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is list or kind is tuple:
        items = [encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in (dict, OrderedDict, Counter):
        return _encode_mapping(value, path)
    raise CheckpointError(
        "cannot be stored in a checkpoint",
        where=path,
        why=f"it is a {kind.__module__}.{kind.__qualname__}; facts are plain values, "
        "because nothing in a checkpoint is pickled",
        fix="store tensors as tensors, and of an object the plain values that rebuild it",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str) -> Any:
    kind = type(value)
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if kind is dict and plain:
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, f"{path} key {key!r}"), encode(item, f"{path}[{key!r}]")]
        for key, item in value.items()
    ]
    return {{dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}[kind]: pairs}


def decode(value: Any) -> Any:
    """The values that `encode` was given.

    Raises:
        CheckpointDamaged: A tag that no version of this format writes.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag.startswith("$"):
            return _decode_tagged(tag, content)
    return {key: decode(item) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any) -> Any:
    try:
        match tag:
            case "$tuple":
                return tuple(decode(item) for item in content)
            case "$float":
                return float(content)
            case "$bytes":
                return base64.b64decode(content, validate=True)
            case "$dict" | "$ordered" | "$counter":
                pairs = [(decode(key), decode(item)) for key, item in content]
                kinds: dict[str, type[Any]] = {
                    "$dict": dict,
                    "$ordered": OrderedDict,
                    "$counter": Counter,
                }
                return kinds[tag](dict(pairs))
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the facts hold a malformed {tag}", why=str(error)) from None
    raise CheckpointDamaged(f"the facts hold the unknown tag {tag}")
