"""The method of a bucket, made from what the plan says of its compressor."""

from __future__ import annotations

from headway.collective.compression import (
    Bf16Compression,
    Compression,
    Fp16Compression,
    Int8Compression,
    LargestElementsCompression,
    NoCompression,
    PowerSgdCompression,
    RandomKCompression,
    SignCompression,
)
from headway.comm.algorithms.method import AllReduce, ExchangeMethod
from headway.comm.compress.powersgd import PowerSgd
from headway.comm.compress.quantization import Bf16, Fp16, Int8, Sign
from headway.comm.compress.sparsification import LargestElements, RandomK


def make_method(compression: Compression, *, seed: int) -> ExchangeMethod:
    """The method of one bucket; the seed of its random numbers is the same on all ranks."""
    match compression:
        case NoCompression():
            return AllReduce()
        case Fp16Compression():
            return Fp16()
        case Bf16Compression():
            return Bf16()
        case Int8Compression():
            return Int8(compression, seed=seed)
        case SignCompression():
            return Sign(compression, seed=seed)
        case LargestElementsCompression():
            return LargestElements(compression, seed=seed)
        case RandomKCompression():
            return RandomK(compression, seed=seed)
        case PowerSgdCompression():
            return PowerSgd(compression, seed=seed)
    raise ValueError(f"no class for the compressor {compression.name!r}")
