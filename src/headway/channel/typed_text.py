"""Values for another rank as text: bounded, of known types, and nothing that runs code.

Ranks tell each other facts, and stages the structure of their messages: containers, constants and
types. They are written as JSON in which everything has its kind beside it. Types are named, not
sent: the other end looks them up among headway's modules and those that it has imported already,
and takes dataclasses, named tuples, enumerations, dictionaries and headway's errors only. An object
is made of its fields without a call of its constructor, as `headway.parallel.stages` does.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from headway.documents import parse_json
from headway.errors import HeadwayError, RunError

MOST_BYTES = 1 << 22
"""Of one text, where nobody says how many: some 40,000 tensors between two stages."""
_BUILTINS = {kind.__name__: kind for kind in (int, float, tuple, list, dict)}
_SEQUENCES: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_OF_TORCH = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


class TypedTextError(ValueError):
    """A text that is no value."""


def write_typed(thing: Any, own: Sequence[Any] = (), *, most_bytes: int = MOST_BYTES) -> bytes:
    """A value as text.

    Args:
        own: Objects of which each end has its own in place of the other's, in the same order.

    Raises:
        RunError: It holds something that has no text, or is too large or too deep.
    """
    writer = _Writer({id(one): number for number, one in enumerate(own)})
    try:
        found = json.dumps(writer.write(thing), separators=(",", ":")).encode()
        # What the other end could not read is refused here, where the model is.
        parse_json(found)
    except (RecursionError, ValueError) as error:
        raise _refused("a value", f"It is too deep: {error}") from None
    if len(found) > most_bytes:
        raise _refused("a value", f"Its structure takes {len(found)} bytes, of {most_bytes}.")
    return found


def read_typed(text: bytes, own: Sequence[Any] = (), *, most_bytes: int = MOST_BYTES) -> Any:
    """The inverse of `write_typed`, at the other end.

    Raises:
        RunError: The text is none of its results, or names a type that is not to be made here.
    """
    reader = _Reader(own)
    try:
        if len(text) > most_bytes:
            raise TypedTextError(f"it has {len(text)} bytes")
        return reader.read(parse_json(text))
    # RuntimeError: of torch's devices and sizes.
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise RunError(
            "another rank sends a text that is no value",
            why=f"{error}"[:200],
            fix="All ranks run the same versions of headway, torch and the model.",
        ) from None
    finally:
        # Its table of methods is a cycle: what `own` holds would live until it is collected.
        reader.release()


def _refused(what: str, why: str) -> RunError:
    return RunError(
        f"{what} cannot go from one rank to another",
        why=why,
        fix="Between stages go tensors, numbers, texts, flags, and tuples, lists, dictionaries and "
        "dataclasses of them; keep other objects in the stage's module.",
    )


class _Writer:
    def __init__(self, places: Mapping[int, int]) -> None:
        self._places = places

    def write(self, value: Any) -> Any:
        """The value as JSON has it."""
        if id(value) in self._places:
            return ["own", self._places[id(value)]]
        if value is None or type(value) in (bool, str):
            return value
        plain = self._plain(value)
        if plain is not None:
            return plain
        name = next((name for name, kind in _SEQUENCES.items() if kind is type(value)), None)
        if name is not None:
            items = list(value)
            if name in ("set", "frozenset"):  # in the same order in every process
                items.sort(key=repr)
            return [name, *map(self.write, items)]
        if type(value) is dict:
            return ["dict", *([self.write(k), self.write(v)] for k, v in value.items())]
        if isinstance(value, type):
            return ["type", *_name_of(value)]
        if isinstance(value, Enum):
            return ["enum", *_name_of(type(value)), value.name]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", *_name_of(type(value)), *map(self.write, value)]
        if isinstance(value, HeadwayError):
            facts = [[name, self.write(part)] for name, part in value.__dict__.items()]
            return ["error", *_name_of(type(value)), *facts]
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            # What its constructor or a cached property has added.
            every = {**getattr(value, "__dict__", {}), **fields}
            parts = [[name, self.write(part)] for name, part in every.items()]
            return ["object", *_name_of(type(value)), *parts]
        raise _refused(f"an object of type {type(value).__qualname__}", "It is a constant there.")

    def _plain(self, value: Any) -> list[Any] | None:
        """Values that JSON does not have, or not exactly."""
        if type(value) is int:
            return ["int", str(value)]
        if type(value) is float:
            return ["float", value.hex()]
        if type(value) is complex:
            return ["complex", value.real.hex(), value.imag.hex()]
        if type(value) is bytes:
            return ["bytes", value.hex()]
        if type(value) is slice:
            return ["slice", *map(self.write, (value.start, value.stop, value.step))]
        if value is Ellipsis:
            return ["ellipsis"]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        for name, kind in _OF_TORCH.items():
            if isinstance(value, kind):
                return [name, str(value).rpartition(".")[2]]
        return None


class _Reader:
    def __init__(self, own: Sequence[Any]) -> None:
        self._own = own
        self._readers: dict[str, Callable[..., Any]] = {
            "int": lambda text: int(_text(text)),
            "float": lambda text: float.fromhex(_text(text)),
            "complex": lambda x, y: complex(float.fromhex(_text(x)), float.fromhex(_text(y))),
            "bytes": lambda text: bytes.fromhex(_text(text)),
            "device": lambda text: torch.device(_text(text)),
            "ellipsis": lambda: Ellipsis,
            "type": _type_of,
            "own": self._own_one,
            "slice": lambda *parts: slice(*map(self.read, parts)),
            "dict": lambda *pairs: {self.read(key): self.read(part) for key, part in pairs},
            "enum": self._enum,
            "named": self._named,
            "object": self._object,
            "error": self._error,
        }

    def release(self) -> None:
        """Keep nothing of what was read."""
        self._own = ()

    def read(self, said: Any) -> Any:
        """The value of what `write` made."""
        if said is None or type(said) in (bool, str):
            return said
        if type(said) is not list or not said or type(said[0]) is not str:
            raise TypedTextError(f"{said!r:.100} has no kind")
        kind, *parts = said
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(self.read, parts))
        if kind in _OF_TORCH:
            return self._of_torch(kind, *parts)
        if kind not in self._readers:
            raise TypedTextError(f"unknown kind {kind!r:.100}")
        return self._readers[kind](*parts)

    def _of_torch(self, kind: str, name: Any) -> Any:
        found = getattr(torch, _text(name), None)
        if not isinstance(found, _OF_TORCH[kind]):
            raise TypedTextError(f"torch has no {kind} {name!r:.100}")
        return found

    def _own_one(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._own):
            raise TypedTextError(f"this end has no object {number!r:.100}")
        return self._own[number]

    def _enum(self, module: Any, name: Any, member: Any) -> Any:
        kind = _type_of(module, name)
        if not issubclass(kind, Enum):
            raise TypedTextError(f"{name!r:.100} is no enumeration")
        return kind[_text(member)]

    def _named(self, module: Any, name: Any, *parts: Any) -> Any:
        kind = _type_of(module, name)
        if not issubclass(kind, tuple) or len(parts) != len(getattr(kind, "_fields", "")):
            raise TypedTextError(f"{name!r:.100} is no named tuple of {len(parts)}")
        return tuple.__new__(kind, map(self.read, parts))

    def _error(self, module: Any, name: Any, *parts: Any) -> HeadwayError:
        kind = _type_of(module, name)
        facts = {_field(field): self.read(part) for field, part in parts}
        texts = [facts.get(field) for field in ("what", "where", "why", "fix")]
        if not issubclass(kind, HeadwayError) or not all(type(text) is str for text in texts):
            raise TypedTextError(f"{name!r:.100} is no error")
        found = kind.__new__(kind)
        Exception.__init__(found, facts["what"])
        found.__dict__.update(facts)
        return found

    def _object(self, module: Any, name: Any, *parts: Any) -> Any:
        kind = _type_of(module, name)
        if not dataclasses.is_dataclass(kind):
            raise TypedTextError(f"{name!r:.100} is no dataclass")
        names = {field for field, _ in parts}
        missing = [field.name for field in dataclasses.fields(kind) if field.name not in names]
        if missing:
            raise TypedTextError(f"a {name} without {missing[0]}"[:200])
        # A dataclass may be a dictionary, too.
        found = dict.__new__(kind) if issubclass(kind, dict) else object.__new__(kind)
        for field, part in parts:
            object.__setattr__(found, _field(field), self.read(part))
        return found


def _field(name: Any) -> str:
    if not _text(name).isidentifier() or name.startswith("__"):
        raise TypedTextError(f"{name!r:.100} is no field")
    return str(name)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypedTextError(f"{value!r:.100} is no text")
    return value


def _name_of(kind: type) -> tuple[str, str]:
    """Module and name of a type that the other end can look up."""
    try:
        if _type_of(kind.__module__, kind.__qualname__) is kind:
            return kind.__module__, kind.__qualname__
    except TypedTextError:
        pass
    raise _refused(
        f"an object of type {kind.__qualname__}",
        "Types are found by the name of their module: dataclasses, named tuples, enumerations and "
        "dictionaries.",
    )


def _type_of(module: Any, name: Any) -> type:
    if _text(module) == "builtins":
        if _text(name) in _BUILTINS:
            return _BUILTINS[name]
        raise TypedTextError(f"the type {name!r:.100}")
    # Of others than headway's nothing is imported here: a module's code runs with its import.
    if module.startswith("headway.") and "__main__" not in module:
        try:
            importlib.import_module(module)
        except ImportError:
            raise TypedTextError(f"there is no {module}"[:200]) from None
    found: Any = sys.modules.get(module)
    for part in _text(name).split("."):
        found = getattr(found, part, None)
    # What is thrown away here must not run code, either.
    if (
        isinstance(found, type)
        and not hasattr(found, "__del__")
        and (
            dataclasses.is_dataclass(found)
            or issubclass(found, (Enum, dict, HeadwayError))
            or (issubclass(found, tuple) and hasattr(found, "_fields"))
        )
    ):
        return found
    raise TypedTextError(f"{module}.{name} is no type of values here"[:200])
