"""A cluster as the text of a cluster.toml; reading it gives the cluster back, to 12 digits."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Iterator, Mapping, Sequence

from headway.cluster.cluster import Cluster
from headway.units import Price

_SI = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_RATE = {f"{prefix}B/s": factor for prefix, factor in _SI.items()}
_FLOPS = {f"{prefix}FLOP/s": factor for prefix, factor in _SI.items()}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SIZE = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
_UNITS: Mapping[str, Mapping[str, float]] = {
    "memory": _SIZE,
    "memory_rate": _RATE,
    "rate": _RATE,
    **dict.fromkeys(("latency", "kernel", "dispatch", "skew", "update", "gather"), _TIME),
    **dict.fromkeys(("small", "middle", "large"), _TIME),
    **dict.fromkeys(("step", "microbatch", "tensor", "piped_step", "piped_microbatch"), _TIME),
    **dict.fromkeys(("forward", "backward"), _FLOPS),
    **dict.fromkeys(("forward_stream", "backward_stream"), _RATE),
    **dict.fromkeys(("forward_weights", "backward_weights"), _RATE),
    **dict.fromkeys(("forward_far", "backward_far"), _RATE),
    **dict.fromkeys(("forward_call", "backward_call"), _TIME),
}
"""By key of the file: units with their factors, the largest first."""
_TABLES = {"peak": _FLOPS}
"""Tables of which all entries have one unit."""
_BARE = frozenset(f"{string.ascii_letters}{string.digits}_-")


def to_toml(cluster: Cluster, head: Sequence[str] = ()) -> str:
    """The text.

    Args:
        cluster: Any.
        head: Lines of a comment at the top.
    """
    named = None if cluster.nodes == Cluster.of(len(cluster.nodes)).nodes else cluster.nodes
    tables = {"nodes": named or (), "levels": cluster.levels, "links": cluster.links}
    lines = [f"# {line}".rstrip() for line in head]
    if named is None:
        lines.append(f"nodes = {len(cluster.nodes)}")
    lines += _entries(_facts(cluster, without=("devices", *tables)))
    for table, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{table}]]", *_entries(_facts(row))]
    for name, device in cluster.devices.items():
        lines += ["", f"[devices.{_key(name)}]", *_entries(_facts(device))]
    return "\n".join(lines) + "\n"


def _facts(row: object, without: Sequence[str] = ()) -> dict[str, object]:
    """The fields that say something."""
    assert dataclasses.is_dataclass(row)
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name not in without and getattr(row, field.name) not in (None, field.default, {})
    }


def _entries(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        yield f"{name} = {_value(name, value)}"


def _value(name: str, value: object, by_key: Mapping[str, Mapping[str, float]] = _UNITS) -> str:
    if isinstance(value, str | Price):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, int | float):
        return _amount(value, by_key[name]) if name in by_key else repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_value(name, item) for item in value)}]"
    facts = value if isinstance(value, Mapping) else _facts(value)
    units = {str(key): _TABLES[name] for key in facts} if name in _TABLES else _UNITS
    inner = [f"{_key(key)} = {_value(key, v, units)}" for key, v in facts.items()]
    return f"{{ {', '.join(inner)} }}"


def _amount(value: float, units: Mapping[str, float]) -> str:
    """In the largest unit that leaves at least 1 before the point: "201 GB/s"."""
    fitting = (unit for unit, factor in units.items() if value >= factor)
    unit = next(fitting, list(units)[-1])
    return f'"{value / units[unit]:.12g} {unit}"'


def _key(name: str) -> str:
    return name if name and set(name) <= _BARE else json.dumps(name)
