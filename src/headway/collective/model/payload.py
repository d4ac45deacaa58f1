"""How many bytes a compressor hands to each collective operation: arithmetic on shapes, no torch.

The classes of `comm.compress` hand over exactly these. Which parameters a compressor leaves alone
is decided here, too, so that prediction and execution cannot differ: vectors and small tensors are
sent whole, because their few bytes decide much of the model (Shi et al. 2021; Vogels et al. 2019,
section 3), and PowerSGD leaves alone what it would not make smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Operation = Literal["all_reduce", "all_gather", "all_to_all"]
Shape = Sequence[int]

SMALLEST = 1024
"""A tensor of fewer elements is sent whole: it costs at most one packet or three."""
BLOCK = 256
"""Elements of int8 that share a scale."""
BLOCK_BYTES = BLOCK + 4
MINIMUM_RATE = 2
"""PowerSGD must make a matrix at least so many times smaller."""
INDEX_BYTES = 4
LARGE = 2**17
"""Bytes from which two ranks gather in parts."""
PARTS = 4


@dataclass(frozen=True, slots=True)
class Payload:
    """What each rank hands to one operation.

    Attributes:
        operation: "all_reduce": a vector that is summed; "all_gather": what everybody gets;
            "all_to_all": as many equal parts as there are ranks, one for each.
        num_bytes: Of the tensor that a rank hands over (for all_to_all: of all its parts).
    """

    operation: Operation
    num_bytes: int


def is_dense(shape: Shape) -> bool:
    """Whether sparsifying, sign and low-rank compressors send a tensor of this shape whole."""
    return len(shape) < 2 or prod(shape) < SMALLEST


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A tensor as a matrix: the first dimension against all others."""
    return shape[0], prod(shape[1:])


def low_rank_pays(shape: Shape, rank: int) -> bool:
    """Whether two factors of this rank are `MINIMUM_RATE` times smaller than the tensor."""
    if is_dense(shape):
        return False
    rows, columns = matrix_shape(shape)
    return (rows + columns) * rank * MINIMUM_RATE < rows * columns


def kept_elements(elements: int, density: float) -> int:
    """How many elements a density means: rounded up, at least one."""
    return max(1, ceil(density * elements - 1e-9))


def gathers_whole(ranks: int) -> bool:
    """Whether encoded gradients are best gathered by everybody, for this number of ranks.

    Gathering all of d bytes sends (n - 1) d; scatter, reduce and gather sends 2 (n - 1) d / n,
    which is less from 3 ranks, and loses precision a second time.
    """
    return ranks <= 2


def gathered_parts(num_bytes: int, ranks: int) -> tuple[int, ...]:
    """Bytes of each operation by which ranks in host memory gather a payload; one but for two."""
    if ranks != 2 or num_bytes < LARGE:
        return (num_bytes,)
    size = _up(-(-num_bytes // PARTS), 8)
    return tuple(min(size, num_bytes - start) for start in range(0, num_bytes, size))


def sparse_bytes(elements: int, itemsize: int) -> int:
    """Values and indices of so many elements, padded so that every rank's row is aligned."""
    return _up(elements * (itemsize + INDEX_BYTES), 8)


def blocks_per_rank(elements: int, ranks: int) -> int:
    """Blocks of int8 that one rank reduces (or all of them, where everybody gathers)."""
    blocks = ceil(elements / BLOCK)
    return blocks if gathers_whole(ranks) else ceil(blocks / ranks)


def sign_bytes_per_rank(elements: Sequence[int], ranks: int) -> int:
    """Bytes of bits that one rank reduces; each tensor begins on a byte."""
    total = sum(ceil(count / 8) for count in elements)
    return _up(total if gathers_whole(ranks) else ceil(total / ranks), 4)


def payloads(
    compressor: str,
    amount: float,
    shapes: Sequence[Shape],
    itemsize: int,
    ranks: int,
    *,
    flags: bool = True,
) -> tuple[Payload, ...]:
    """What each rank hands over for one bucket, operation by operation.

    Args:
        compressor: "none", "topk", ... as in `headway.plan.exchange`.
        shapes: Of the parameters of the bucket, in their memory order.
        itemsize: Bytes of a gradient's element.
        flags: There is one more element per parameter, which says whether it was used.
    """
    count = len(shapes) if flags else 0
    sizes = [prod(shape) for shape in shapes]
    if compressor in ("none", "fp16", "bf16"):
        width = itemsize if compressor == "none" else 2
        return (Payload("all_reduce", (sum(sizes) + count) * width),)
    if compressor == "int8":
        return _present(Payload("all_reduce", count * itemsize), *_int8(sum(sizes), ranks))
    compressed, rest = _split(shapes, _chosen(compressor, amount))
    rest += count
    if not compressed:
        return _present(Payload("all_reduce", rest * itemsize))
    if compressor == "powersgd":
        return _present(*_powersgd(compressed, rest, int(amount), max(itemsize, 4)))
    elements = [prod(shape) for shape in compressed]
    number = sum(kept_elements(size, amount) for size in elements)
    if compressor == "randomk":
        return _present(Payload("all_reduce", (number + rest) * itemsize))
    dense = Payload("all_reduce", rest * itemsize)
    if compressor == "sign":
        return _present(dense, *_sign(elements, ranks))
    return _present(dense, Payload("all_gather", sparse_bytes(number, itemsize)))


def payload_bytes(
    compressor: str,
    amount: float,
    shapes: Sequence[Shape],
    itemsize: int,
    ranks: int,
    *,
    flags: bool = True,
) -> int:
    """The sum of `payloads`."""
    parts = payloads(compressor, amount, shapes, itemsize, ranks, flags=flags)
    return sum(part.num_bytes for part in parts)


def _present(*parts: Payload) -> tuple[Payload, ...]:
    return tuple(part for part in parts if part.num_bytes)


def _chosen(compressor: str, amount: float) -> Callable[[Shape], bool]:
    if compressor == "powersgd":
        return lambda shape: low_rank_pays(shape, int(amount))
    return lambda shape: not is_dense(shape)


def _split(shapes: Sequence[Shape], chosen: Callable[[Shape], bool]) -> tuple[list[Shape], int]:
    """The shapes that are compressed, and the elements of the others."""
    compressed = [shape for shape in shapes if chosen(shape)]
    return compressed, sum(map(prod, shapes)) - sum(map(prod, compressed))


def _int8(elements: int, ranks: int) -> tuple[Payload, ...]:
    part = blocks_per_rank(elements, ranks) * BLOCK_BYTES
    return _gathered(part, ranks)


def _sign(elements: Sequence[int], ranks: int) -> tuple[Payload, ...]:
    part = sign_bytes_per_rank(elements, ranks) + 4 * len(elements)
    return _gathered(part, ranks)


def _gathered(part: int, ranks: int) -> tuple[Payload, ...]:
    if gathers_whole(ranks):
        return (Payload("all_gather", part),)
    return (Payload("all_to_all", part * ranks), Payload("all_gather", part))


def _powersgd(
    compressed: Sequence[Shape], rest: int, rank: int, itemsize: int
) -> tuple[Payload, ...]:
    matrices = [matrix_shape(shape) for shape in compressed]
    left = rest + rank * sum(rows for rows, _ in matrices)
    right = rank * sum(columns for _, columns in matrices)
    return (Payload("all_reduce", left * itemsize), Payload("all_reduce", right * itemsize))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
