"""What is known of each compressor without running it: one class each, and no torch.

A class says how many bytes its compressor hands to each collective operation, what it may be
combined with, how fast it typically is and how exact its result is.
The classes of `comm.compress` run them and hand over exactly these bytes. In a plan a compressor
is a text, "name" or "name:amount" ("mstopk:0.01", "powersgd:2"); see `parse_compression`.

Vectors and small tensors are sent whole, because their few bytes decide much of the model (Shi et
al. 2021; Vogels et al. 2019, section 3), and PowerSGD leaves alone what it would not make smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar, Literal

from headway.documents import nearest

Operation = Literal["all_reduce", "all_gather", "all_to_all"]
Shape = Sequence[int]
Shapes = Sequence[Shape]

# A tensor of fewer elements is sent whole: it costs at most one packet or three.
SMALLEST = 1024
BLOCK = 256
"""Elements of int8 that share a scale."""
BLOCK_BYTES = BLOCK + 4
# The default of torch's PowerSGD hook (min_compression_rate).
MINIMUM_RATE = 2
"""PowerSGD must make a matrix at least so many times smaller."""
INDEX_BYTES = 4
# Bytes from which two ranks gather in parts.
LARGE = 2**17
# Gloo's all-gather of two ranks is half duplex; four parts keep both directions of the link
# busy: 0.54 s instead of 0.74 s for 6 MiB at 100 Mbit/s (docs/compression.md).
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


Payloads = tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class CompressorSpeed:
    """Of a compressor: seconds of one processor per byte of gradient.

    Attributes:
        decode: Of what one rank has sent; gathered payloads are decoded once per rank.
    """

    encode: float
    decode: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """A compressor with its amount.

    Attributes:
        amount: A density in (0, 1], or a rank from 1; 0 where the compressor has none.
    """

    name: ClassVar[str]
    amount_kind: ClassVar[Literal["none", "density", "rank"]] = "none"
    """What the number behind the colon means."""
    exactness: ClassVar[int]
    """0: the sum is exact; 1: rounded to fewer bits; 2: coarse. Coarse ones change how training
    converges, and are never used unasked where gradients are sparse: PowerSGD made recommendation
    models diverge."""
    feedback: ClassVar[bool] = False
    """What was not sent is kept and added to the next gradient (error feedback)."""
    elementwise: ClassVar[bool] = False
    """Its bucket is one sum of which any slice may be exchanged alone: in chunks, by a program."""
    hierarchical: ClassVar[bool] = False
    """It can be the step between nodes of a hierarchical exchange, where shards cut gradients
    anywhere."""
    host_only: ClassVar[bool] = False
    """It works in the memory of the CPU."""
    wire_bytes: ClassVar[int | None] = None
    """Of an element as it travels, where it is rounded."""
    typical_speed: ClassVar[CompressorSpeed] = CompressorSpeed(0.0)
    """On one processor core with AVX2; to be replaced by what was measured."""

    amount: float = 0.0

    def __str__(self) -> str:
        return self.name if self.amount_kind == "none" else f"{self.name}:{self.amount:g}"

    def wire_element_bytes(self, itemsize: int) -> int:
        """Of an element of `itemsize` bytes, as it travels in an elementwise exchange."""
        return self.wire_bytes or itemsize

    @abstractmethod
    def compresses(self, shape: Shape) -> bool:
        """Whether a parameter of this shape is compressed; the others are summed whole."""

    @abstractmethod
    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        """Of a bucket that has something to compress, and `rest` elements that are sent whole."""

    def payloads(
        self, shapes: Shapes, itemsize: int, ranks: int, *, flags: bool = True
    ) -> Payloads:
        """What each rank hands over for one bucket, operation by operation.

        Args:
            shapes: Of the parameters of the bucket, in their memory order.
            itemsize: Bytes of a gradient's element.
            flags: There is one more element per parameter, which says whether it was used.
        """
        compressed = [shape for shape in shapes if self.compresses(shape)]
        rest = sum(map(prod, shapes)) - sum(map(prod, compressed)) + (len(shapes) if flags else 0)
        found: Payloads = (Payload("all_reduce", rest * itemsize),)
        if compressed:
            found = self._operations(compressed, rest, itemsize, ranks)
        return tuple(payload for payload in found if payload.num_bytes)


# Which tensors are sent whole, and what fits into a payload: shared with the implementations.


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
    # 0.07 * 100 is 7.000000000000001 and must not become 8.
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


@dataclass(frozen=True)
class SparseShard:
    """One rank's part of a bucket whose largest elements are exchanged between nodes (HiTopKComm).

    Attributes:
        start: Of its gradients; they end at `middle`, and its flags, if it has any, at `stop`.
        count: How many of the gradients are sent.
    """

    start: int
    middle: int
    stop: int
    count: int
    element_bytes: int

    @property
    def index_start(self) -> int:
        """Bytes of values and flags, padded because types need aligned addresses."""
        return _up((self.count + self.stop - self.middle) * self.element_bytes, 8)

    @property
    def parcel_bytes(self) -> int:
        """Values and flags, indices behind them."""
        return self.index_start + _up(self.count * INDEX_BYTES, 8)


def sparse_shards(
    elements: int, flags: int, width: int, density: float, element_bytes: int
) -> tuple[SparseShard, ...]:
    """The shards of a bucket, flags included, so that these need no messages of their own."""
    end, (size, longer) = elements - flags, divmod(elements, width)
    found = []
    for place in range(width):
        start = place * size + min(place, longer)
        stop = start + size + (place < longer)
        middle = min(max(end, start), stop)
        count = max(1, round(density * (middle - start))) if middle > start else 0
        found.append(SparseShard(start, middle, stop, count, element_bytes))
    return tuple(found)


def blocks_per_rank(elements: int, ranks: int) -> int:
    """Blocks of int8 that one rank reduces (or all of them, where everybody gathers)."""
    blocks = ceil(elements / BLOCK)
    return blocks if gathers_whole(ranks) else ceil(blocks / ranks)


def sign_bytes_per_rank(elements: Sequence[int], ranks: int) -> int:
    """Bytes of bits that one rank reduces; each tensor begins on a byte."""
    total = sum(ceil(count / 8) for count in elements)
    return _up(total if gathers_whole(ranks) else ceil(total / ranks), 4)


def _gathered(part: int, ranks: int) -> Payloads:
    if gathers_whole(ranks):
        return (Payload("all_gather", part),)
    return (Payload("all_to_all", part * ranks), Payload("all_gather", part))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# The compressors.


class ElementwiseCompression(Compression):
    """One all-reduce of all elements, perhaps rounded to fewer bits."""

    elementwise = True
    hierarchical = True

    def compresses(self, shape: Shape) -> bool:
        return True

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        elements = sum(map(prod, compressed)) + rest
        return (Payload("all_reduce", elements * self.wire_element_bytes(itemsize)),)


class NoCompression(ElementwiseCompression):
    """The plain sum."""

    name = "none"
    exactness = 0


UNCOMPRESSED = NoCompression()


class Fp16Compression(ElementwiseCompression):
    """11 significant bits."""

    name = "fp16"
    exactness = 1
    wire_bytes = 2
    typical_speed = CompressorSpeed(0.04e-9, 0.03e-9)


class Bf16Compression(ElementwiseCompression):
    """8 significant bits with the range of float32."""

    name = "bf16"
    exactness = 1
    wire_bytes = 2
    typical_speed = CompressorSpeed(0.04e-9, 0.03e-9)


class Int8Compression(Compression):
    """8 bits per value, and a scale per block of 256."""

    name = "int8"
    exactness = 1
    host_only = True
    typical_speed = CompressorSpeed(0.35e-9, 0.1e-9)

    def compresses(self, shape: Shape) -> bool:
        return True

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        part = blocks_per_rank(sum(map(prod, compressed)), ranks) * BLOCK_BYTES
        return (Payload("all_reduce", rest * itemsize), *_gathered(part, ranks))


class SignCompression(Compression):
    """One bit per value, and a scale per layer."""

    name = "sign"
    exactness = 2
    feedback = True
    host_only = True
    typical_speed = CompressorSpeed(0.1e-9, 0.15e-9)

    def compresses(self, shape: Shape) -> bool:
        return not is_dense(shape)

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        # A float32 scale for each tensor, then the bits.
        part = sign_bytes_per_rank([*map(prod, compressed)], ranks) + 4 * len(compressed)
        return (Payload("all_reduce", rest * itemsize), *_gathered(part, ranks))


class SparseCompression(Compression):
    """A share of the elements of each layer."""

    amount_kind = "density"
    exactness = 2
    feedback = True

    def compresses(self, shape: Shape) -> bool:
        return not is_dense(shape)

    def _kept(self, compressed: Shapes) -> int:
        return sum(kept_elements(prod(shape), self.amount) for shape in compressed)


class LargestElementsCompression(SparseCompression):
    """Values and indices of the largest elements of each layer."""

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        sparse = sparse_bytes(self._kept(compressed), itemsize)
        return (Payload("all_reduce", rest * itemsize), Payload("all_gather", sparse))


class TopKCompression(LargestElementsCompression):
    """The largest elements, exactly."""

    name = "topk"
    hierarchical = True
    typical_speed = CompressorSpeed(0.45e-9, 0.01e-9)


class MsTopKCompression(LargestElementsCompression):
    """About the largest elements, by a bisected threshold."""

    name = "mstopk"
    hierarchical = True
    typical_speed = CompressorSpeed(0.7e-9, 0.01e-9)


class AdaptiveTopKCompression(LargestElementsCompression):
    """The largest elements; layers share one budget."""

    name = "adaptive"
    typical_speed = CompressorSpeed(0.45e-9, 0.01e-9)


class RandomKCompression(SparseCompression):
    """Random elements, the same ones on all ranks, so that the network can sum them."""

    name = "randomk"
    typical_speed = CompressorSpeed(0.1e-9, 0.05e-9)

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        return (Payload("all_reduce", (self._kept(compressed) + rest) * itemsize),)


class PowerSgdCompression(Compression):
    """Two factors of low rank instead of a matrix, summed by the network."""

    name = "powersgd"
    amount_kind = "rank"
    exactness = 2
    feedback = True
    typical_speed = CompressorSpeed(0.4e-9, 0.1e-9)

    @property
    def rank(self) -> int:
        return int(self.amount)

    def compresses(self, shape: Shape) -> bool:
        return low_rank_pays(shape, self.rank)

    def _operations(self, compressed: Shapes, rest: int, itemsize: int, ranks: int) -> Payloads:
        width = max(itemsize, 4)  # factors of 16-bit gradients are computed in float32
        matrices = [matrix_shape(shape) for shape in compressed]
        # What is sent whole travels with the first factors, which saves an operation.
        left = rest + self.rank * sum(rows for rows, _ in matrices)
        right = self.rank * sum(columns for _, columns in matrices)
        return (Payload("all_reduce", left * width), Payload("all_reduce", right * width))


COMPRESSORS: dict[str, type[Compression]] = {
    kind.name: kind
    for kind in (
        NoCompression,
        Fp16Compression,
        Bf16Compression,
        Int8Compression,
        SignCompression,
        TopKCompression,
        MsTopKCompression,
        AdaptiveTopKCompression,
        RandomKCompression,
        PowerSgdCompression,
    )
}
ELEMENTWISE_NAMES = tuple(name for name, kind in COMPRESSORS.items() if kind.elementwise)
"""What a program can carry, and what can be cut into chunks."""
HIERARCHICAL_NAMES = tuple(name for name, kind in COMPRESSORS.items() if kind.hierarchical)


def compressor_of(text: str) -> type[Compression] | None:
    """The class that a plan's text names, whatever its amount; None: there is none."""
    return COMPRESSORS.get(text.strip().partition(":")[0])


def parse_compression(text: str) -> Compression:
    """Read "fp16", "mstopk:0.01" or "powersgd:4".

    Raises:
        ValueError: No such compressor, or an amount that it cannot have; says what is legal.
    """
    name, colon, number = text.strip().partition(":")
    kind = COMPRESSORS.get(name)
    if kind is None:
        raise ValueError(f"{name!r} is no compressor{nearest(name, list(COMPRESSORS))}")
    if kind.amount_kind == "none":
        if colon:
            raise ValueError(f"{name} takes no amount; write {name}")
        return kind()
    example = f"{name}:0.01" if kind.amount_kind == "density" else f"{name}:2"
    try:
        amount = float(number)
    except ValueError:
        raise ValueError(f"{name} needs a {kind.amount_kind}; for example {example}") from None
    if kind.amount_kind == "density" and not 0 < amount <= 1:
        raise ValueError(f"{text}: a density lies between 0 and 1; for example {example}")
    if kind.amount_kind == "rank" and (amount < 1 or amount != int(amount)):
        raise ValueError(f"{text}: a rank is a whole number from 1; for example {example}")
    return kind(amount=amount)
