"""Files of trained machines: libsvm's text format, which its own tools read, and safetensors.

libsvm's format has whole numbers for labels and no place for the numbers of the samples, for facts
of the training, and for the number of columns. The safetensors file holds all of a machine.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy import sparse

from headway.documents import parse_json
from headway.errors import DataError, UsageError
from headway.svm.arrays import Array, Matrix
from headway.svm.kernels import Kernel, KernelName
from headway.svm.machine import Machine, PairFacts

_KERNELS: dict[str, KernelName] = {
    "linear": "linear",
    "polynomial": "poly",
    "rbf": "rbf",
    "sigmoid": "sigmoid",
}
_NAMES = {name: word for word, name in _KERNELS.items()}
# Which parameters a kernel has, and under which words.
_PARAMETERS = {
    "linear": (),
    "poly": ("degree", "gamma", "coef0"),
    "rbf": ("gamma",),
    "sigmoid": ("gamma", "coef0"),
}
_SAFETENSORS = ".safetensors"
_FORMAT = "headway-svm-1"


def save_machine(machine: Machine, path: Path | str) -> None:
    """Write a machine: as safetensors where the name ends so, else in libsvm's format.

    Raises:
        UsageError: Its kernel is a function, or libsvm's format cannot hold its labels.
    """
    path = Path(path)
    if machine.kernel.name == "callable":
        raise UsageError(
            "a machine whose kernel is a function cannot be written to a file",
            where=str(path),
            fix="Pickle it (joblib.dump), where the function can be imported.",
        )
    if path.suffix == _SAFETENSORS:
        _save_safetensors(machine, path)
    else:
        with path.open("w", encoding="ascii") as file:
            file.writelines(f"{line}\n" for line in _libsvm_lines(machine, path))


def load_machine(path: Path | str, columns: int | None = None) -> Machine:
    """Read a machine that `save_machine` or libsvm's svm-train has written.

    Args:
        columns: Of the samples; None: in libsvm's format as many as support vectors need.

    Raises:
        DataError: It is no such file, with the line.
    """
    path = Path(path)
    if path.suffix == _SAFETENSORS:
        return _load_safetensors(path)
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            "this is no model file of libsvm", where=str(path), why=str(error)
        ) from None
    return _LibsvmReader(path, lines).machine(columns)


# -- libsvm ------------------------------------------------------------------------------------


def _libsvm_lines(machine: Machine, path: Path) -> Iterator[str]:
    labels = _whole_labels(machine, path)
    if not machine.finished:
        warnings.warn(
            f"{path}: the machine is unfinished, and libsvm's format cannot say so", stacklevel=3
        )
    kernel = machine.kernel
    yield "svm_type c_svc"
    yield f"kernel_type {_NAMES[kernel.name]}"
    for name in _PARAMETERS[kernel.name]:
        value = getattr(kernel, name)
        yield f"{name} {int(value) if name == 'degree' else f'{value:.17g}'}"
    yield f"nr_class {len(labels)}"
    yield f"total_sv {len(machine.numbers)}"
    yield "rho " + " ".join(f"{value:.17g}" for value in machine.offsets)
    yield "label " + " ".join(map(str, labels))
    yield "nr_sv " + " ".join(map(str, machine.counts.tolist()))
    yield "SV"
    for column, row in zip(machine.coefficients.T, _entries(machine.rows), strict=True):
        weights = [f"{value:.17g}" for value in column]
        yield " ".join([*weights, *(f"{place + 1}:{value:.17g}" for place, value in row)])


def _whole_labels(machine: Machine, path: Path) -> list[int]:
    labels = machine.classes.tolist()
    if any(isinstance(label, str) or int(label) != label for label in labels):
        raise UsageError(
            "the labels are no whole numbers, and libsvm's format has nothing else",
            where=str(path),
            why=f"Labels are {', '.join(map(repr, labels[:3]))}.",
            fix=f"Use a name that ends in {_SAFETENSORS}, or whole numbers for labels.",
        )
    return [int(label) for label in labels]


def _entries(rows: Matrix) -> Iterator[list[tuple[int, float]]]:
    """Columns and values that are not zero, row by row."""
    rows = sparse.csr_matrix(rows)
    for first, last in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        places, values = rows.indices[first:last].tolist(), rows.data[first:last].tolist()
        yield [(place, value) for place, value in zip(places, values, strict=True) if value]


class _LibsvmReader:
    """Reads the lines of a file, and says of a wrong one which it is."""

    def __init__(self, path: Path, lines: list[str]) -> None:
        self._path = path
        self._lines = lines
        self._line = 0

    def machine(self, columns: int | None) -> Machine:
        header = self._header()
        kernel = self._kernel(header)
        labels = self._numbers(header, "label", int)
        count = len(labels)
        counts = np.array(self._numbers(header, "nr_sv", int, count), dtype=np.int64)
        offsets = np.array(self._numbers(header, "rho", float, count * (count - 1) // 2))
        if len(set(labels)) < count or (counts < 0).any():
            raise self._wrong("label names a class twice, or nr_sv has a number below 0")
        coefficients, rows = self._vectors(int(counts.sum()), count - 1, columns)
        order = np.argsort(labels, kind="stable")
        found = Machine(
            classes=np.array(labels),
            kernel=kernel,
            rows=rows,
            numbers=np.full(len(coefficients), -1, dtype=np.int64),
            counts=counts,
            coefficients=coefficients.T.copy(),
            offsets=offsets,
        )
        return found if (order == np.arange(count)).all() else _reordered(found, order.tolist())

    def _header(self) -> dict[str, str]:
        header: dict[str, str] = {}
        for line in self._lines:
            self._line += 1
            word, _, rest = line.strip().partition(" ")
            if word == "SV":
                return header
            header[word] = rest
        raise self._wrong("there is no line SV")

    def _kernel(self, header: dict[str, str]) -> Kernel:
        kind, name = header.get("svm_type", ""), header.get("kernel_type", "")
        if kind not in ("c_svc", "nu_svc"):
            raise self._wrong(f"svm_type is {kind or 'missing'}, and c_svc or nu_svc is needed")
        if name not in _KERNELS:
            raise self._wrong(f"kernel_type is {name or 'missing'}, and one of "
                              f"{', '.join(_KERNELS)} is needed")  # fmt: skip
        given = dict.fromkeys(("gamma", "degree", "coef0"), 1.0)
        for word in _PARAMETERS[_KERNELS[name]]:
            (given[word],) = self._numbers(header, word, float, 1)
        return Kernel(_KERNELS[name], given["gamma"], given["degree"], given["coef0"])

    def _numbers(
        self, header: dict[str, str], word: str, kind: Any, count: int | None = None
    ) -> list[Any]:
        try:
            found = [kind(text) for text in header.get(word, "").split()]
        except ValueError as error:
            raise self._wrong(f"{word}: {error}") from None
        if not found or count not in (None, len(found)):
            wanted = "some" if count is None else count
            raise self._wrong(f"{word} has {len(found)} numbers, and {wanted} are needed")
        if not np.isfinite(found).all():
            raise self._wrong(f"{word} has a number that is not finite")
        return found

    def _vectors(self, count: int, weights: int, columns: int | None) -> tuple[Array, Matrix]:
        lines = self._lines[self._line :]
        while lines and not lines[-1].strip():
            lines.pop()
        if len(lines) != count:
            raise self._wrong(f"{len(lines)} support vectors follow, and nr_sv says {count}")
        coefficients = np.empty((count, weights))
        places: list[int] = []
        values: list[float] = []
        ends = [0]
        for number, line in enumerate(lines):
            self._line += 1
            words = line.split()
            try:
                coefficients[number] = [float(word) for word in words[:weights]]
                pairs = [word.split(":") for word in words[weights:]]
                places += [int(place) - 1 for place, _ in pairs]
                values += [float(value) for _, value in pairs]
            except ValueError as error:
                raise self._wrong(f"a support vector cannot be read: {error}") from None
            ends.append(len(places))
            if not np.isfinite([*coefficients[number], *values[ends[-2] :]]).all():
                raise self._wrong("a support vector has a number that is not finite")
            row = places[ends[-2] :]
            if any(place < 0 for place in row) or row != sorted(set(row)):
                raise self._wrong("the columns of a support vector must rise, from 1")
        width = max(places, default=-1) + 1
        if columns is not None and width > columns:
            raise self._wrong(f"support vectors have {width} columns, and samples {columns}")
        shape = (count, width if columns is None else columns)
        return coefficients, sparse.csr_matrix((values, places, ends), shape=shape, dtype=float)

    def _wrong(self, why: str) -> DataError:
        return DataError(
            "this is no model file of libsvm",
            where=f"{self._path}, line {self._line}",
            why=why,
        )


def _reordered(machine: Machine, order: list[int]) -> Machine:
    """The machine with its classes in another order: svm-train has that of the samples."""
    count = len(order)
    ends = np.cumsum(machine.counts)
    stretches = [np.arange(end - size, end) for end, size in zip(ends, machine.counts, strict=True)]
    rows = np.concatenate([stretches[old] for old in order])
    coefficients = np.empty_like(machine.coefficients)
    offsets = np.empty_like(machine.offsets)
    place = {
        pair: number
        for number, pair in enumerate(
            (one, other) for one in range(count) for other in range(one + 1, count)
        )
    }
    for one, old_one in enumerate(order):
        for other, old_other in enumerate(order):
            if one == other:
                continue
            # A pair the other way round has the other sign.
            sign = 1.0 if (one < other) == (old_one < old_other) else -1.0
            old_row = old_other - (old_other > old_one)
            coefficients[other - (other > one), stretches[old_one]] = (
                sign * machine.coefficients[old_row, stretches[old_one]]
            )
            old_pair = (min(old_one, old_other), max(old_one, old_other))
            offsets[place[min(one, other), max(one, other)]] = (
                sign * machine.offsets[place[old_pair]]
            )
    return Machine(
        classes=machine.classes[order],
        kernel=machine.kernel,
        rows=machine.rows[rows],
        numbers=machine.numbers[rows],
        counts=machine.counts[order],
        coefficients=coefficients[:, rows],
        offsets=offsets,
    )


# -- safetensors -------------------------------------------------------------------------------


def _save_safetensors(machine: Machine, path: Path) -> None:
    tensors = {
        "numbers": machine.numbers,
        "counts": machine.counts,
        "coefficients": np.ascontiguousarray(machine.coefficients),
        "offsets": machine.offsets,
    }
    if sparse.issparse(machine.rows):
        tensors |= {
            "rows.values": machine.rows.data,
            "rows.columns": machine.rows.indices,
            "rows.ends": machine.rows.indptr,
        }
    else:
        tensors["rows"] = np.ascontiguousarray(machine.rows)
    kernel = machine.kernel
    facts = {
        "classes": machine.classes.tolist(),
        "kernel": [kernel.name, kernel.gamma, kernel.degree, kernel.coef0],
        "columns": machine.rows.shape[1],
        "finished": bool(machine.finished),
        "pairs": [asdict(pair) for pair in machine.pairs],
    }
    metadata = {"format": _FORMAT, "machine": json.dumps(facts, default=_plain)}
    save_file(tensors, path, metadata=metadata)


def _plain(value: Any) -> Any:
    return value.item()


def _load_safetensors(path: Path) -> Machine:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
    except SafetensorError as error:
        raise DataError("this is no safetensors file", where=str(path), why=str(error)) from None
    if metadata.get("format") != _FORMAT:
        raise DataError("this safetensors file holds no support vector machine", where=str(path))
    facts = parse_json(metadata["machine"])
    rows: Matrix = tensors.get("rows")
    if rows is None:
        parts = (tensors["rows.values"], tensors["rows.columns"], tensors["rows.ends"])
        rows = sparse.csr_matrix(parts, shape=(len(tensors["numbers"]), facts["columns"]))
    name, gamma, degree, coef0 = facts["kernel"]
    return Machine(
        classes=np.array(facts["classes"]),
        kernel=Kernel(name, gamma, degree, coef0),
        rows=rows,
        numbers=tensors["numbers"],
        counts=tensors["counts"],
        coefficients=tensors["coefficients"],
        offsets=tensors["offsets"],
        finished=facts["finished"],
        pairs=tuple(PairFacts(**pair) for pair in facts["pairs"]),
    )
