"""Starting weights: a safetensors file, a torch file, or a directory of `save_pretrained`.

Tensors are read one after the other straight into the model's own memory, so that no rank holds a
second copy of the model; a torch file is mapped. Numbers are converted to the model's types. Names
are those of `state_dict`; of tied tensors one name is enough.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headway.documents import nearest, parse_json
from headway.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
_MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of the weights is: its file, shape, and how it is read."""

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def load_weights(model: nn.Module, source: str | Path, only: Sequence[str] = ()) -> None:
    """Fill a model from a file or directory.

    Args:
        source: model.safetensors, a torch file (read with `weights_only`), or a directory as
            `save_pretrained` writes it, in one piece or in several with an index.
        only: Patterns of names, as in "encoder.*": those tensors of the model are read, the others
            keep their numbers, and what else there is in the file is left out. Empty: all of the
            model, and all of the file.

    Raises:
        CheckpointError: There is no such file, or it cannot be read.
        CheckpointMismatch: Names or shapes differ; all differences are listed. Nothing has been
            changed.
    """
    path = Path(source).expanduser()
    with _files(path) as stored:
        wanted = model.state_dict(keep_vars=True)
        targets = {name: t for name, t in wanted.items() if isinstance(t, Tensor)}
        if only:
            targets = {name: t for name, t in targets.items() if _matches(name, only)}
            stored = {name: s for name, s in stored.items() if name in targets}
            if not targets:
                raise CheckpointMismatch(
                    f"no tensor of the model matches {', '.join(only)}",
                    where=str(path),
                    fix=f"The model has {', '.join(list(wanted)[:3])} ...",
                )
        _check(targets, stored, path)
        with torch.no_grad():
            for name, one in stored.items():
                targets[name].copy_(one.read())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], path: Path) -> None:
    # Of tensors that are tied, the file may have any of the names.
    given = {id(targets[name]) for name in stored if name in targets}
    missing = [n for n, t in targets.items() if n not in stored and id(t) not in given]
    unexpected = [name for name in stored if name not in targets]
    problems = [f"missing: {n}{nearest(n, unexpected) if unexpected else ''}" for n in missing]
    problems += [f"unexpected: {n}{nearest(n, missing) if missing else ''}" for n in unexpected]
    problems += [
        f"{name}: {list(one.shape)} in the file, {list(targets[name].shape)} in the model"
        for name, one in stored.items()
        if name in targets and one.shape != tuple(targets[name].shape)
    ]
    if problems:
        more = len(problems) - _MOST_LINES
        raise CheckpointMismatch(
            f"the weights are of another model: {len(missing)} tensors are missing, "
            f"{len(unexpected)} are unexpected",
            where=str(path),
            why="\n  ".join([*problems[:_MOST_LINES], *([f"and {more} more"] if more > 0 else [])]),
            fix='Name what is to be read by patterns: weights_only=("encoder.*",).',
        )


@contextmanager
def _files(path: Path) -> Iterator[Mapping[str, StoredTensor]]:
    """The tensors of a file, or of the files of a directory, while these are open."""
    found: dict[str, StoredTensor] = {}
    opened: list[Any] = []
    try:
        for file, names in _parts(path).items():
            read = _open_safetensors if file.suffix == ".safetensors" else _open_torch
            here = read(file, opened)
            if names is not None and (lacking := sorted(set(names) - here.keys())):
                raise CheckpointDamaged(
                    f"lacks {lacking[0]}, which the index of {path} looks for here", where=str(file)
                )
            found |= here
        yield found
    finally:
        for one in opened:
            one.__exit__(None, None, None)


def _parts(path: Path) -> dict[Path, list[str] | None]:
    """The files of the weights, each with the names that an index looks for in it."""
    if path.is_file():
        return {path: None}
    for index in INDEX_FILES:
        if (path / index).is_file():
            return _indexed(path / index)
    for name in WHOLE_FILES:
        if (path / name).is_file():
            return {path / name: None}
    fix = f"A directory of weights has {', '.join((*WHOLE_FILES, *INDEX_FILES))}."
    what = "holds no weights" if path.is_dir() else "there are no such weights"
    raise CheckpointError(what, where=str(path), fix=fix if path.is_dir() else "")


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        places = parse_json(index.read_bytes())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a plain file name")
            names = files.setdefault(index.parent / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error)
        raise CheckpointDamaged("is no index of weights", where=str(index), why=why) from None
    return files


def _open_safetensors(file: Path, opened: list[Any]) -> dict[str, StoredTensor]:
    try:
        handle: Any = safe_open(file, framework="pt")
        opened.append(handle)
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError("cannot be read", where=str(file), why=str(error)) from None
    return {
        name: StoredTensor(file, shape, partial(handle.get_tensor, name))
        for name, shape in shapes.items()
    }


def _open_torch(file: Path, _: list[Any]) -> dict[str, StoredTensor]:
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            "cannot be read",
            where=str(file),
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="Save model.state_dict(), not the model itself.",
        ) from None
    # What people save: {"state_dict": ...} or {"model": ...} beside other things.
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise CheckpointError(
            "holds no weights",
            where=str(file),
            why="It is no dictionary of tensors.",
            fix="Save model.state_dict().",
        )
    return {
        name: StoredTensor(file, tuple(tensor.shape), partial(_itself, tensor))
        for name, tensor in found.items()
    }


def _itself(tensor: Tensor) -> Tensor:
    return tensor
