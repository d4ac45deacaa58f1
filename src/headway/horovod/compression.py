"""Compression of what travels: `Compression.none` and `Compression.fp16`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Base of compressors; one's own may be given wherever Horovod takes `compression`."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The inverse of `compress`, of what has come."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point values in 16 bits (IEEE 754 binary16)."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        floating = tensor.dtype.is_floating_point
        return (tensor.to(torch.float16) if floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors that Horovod names."""

    none = NoneCompressor
    fp16 = FP16Compressor
