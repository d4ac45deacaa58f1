"""Initial values of rows: a pure function of seed, key and column.

Random bits come from a counter (splitmix64 of seed, key and column), so that neither the order in
which keys arrive, nor the number of ranks, nor a restart changes them. Normal numbers are made of
additions, multiplications, divisions and square roots alone, which IEEE 754 rounds in one way; the
logarithms and cosines of libraries differ in their last bits between machines.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from headway.parallel.tables.table_parts import mixed_hashes
from headway.plans.tables import mixed_hash

Distribution = Literal["normal", "uniform", "zeros"]
"""normal: of standard deviation `scale`. uniform: from -scale to scale."""

_LN2 = 0.6931471805599453
_LOG_TERMS, _TURN_TERMS = 11, 10


def initial_rows(
    keys: Tensor, dim: int, distribution: Distribution, scale: float, seed: int
) -> Tensor:
    """The rows with which keys begin.

    Args:
        keys: int64 [n].
        dim: Columns.

    Returns:
        float64 [n, dim]; equal bits on all machines.
    """
    if distribution == "zeros":
        return torch.zeros(len(keys), dim, dtype=torch.float64, device=keys.device)
    if distribution == "uniform":
        return (2 * _uniform(keys, dim, seed) - 1) * scale
    pairs = -(-dim // 2)
    numbers = _uniform(keys, 2 * pairs, seed)
    # Box and Muller 1958; 1 - u is in (0, 1].
    radius = (-2 * _log(1 - numbers[:, 0::2])).sqrt()
    cosine, sine = _turn(numbers[:, 1::2])
    return torch.stack([radius * cosine, radius * sine], 2).flatten(1)[:, :dim] * scale


def _uniform(keys: Tensor, columns: int, seed: int) -> Tensor:
    """float64 [n, columns] in [0, 1), multiples of 2^-53."""
    own = mixed_hashes(keys ^ _signed(mixed_hash(seed % 2**64)))
    steps = [_signed(mixed_hash(column)) for column in range(columns)]
    bits = mixed_hashes(own.unsqueeze(1) + torch.tensor(steps, device=keys.device))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of float64 in (0, 1]: 2 artanh((m - 1) / (m + 1)) + e ln 2."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [1/2, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = exponent - low.to(exponent.dtype)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    total = torch.full_like(square, 1 / (2 * _LOG_TERMS + 1))
    for term in reversed(range(_LOG_TERMS)):
        total = total * square + 1 / (2 * term + 1)
    return 2 * ratio * total + exponent.to(torch.float64) * _LN2


def _turn(fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a fraction of a turn in [0, 1): Taylor's series on an eighth of it."""
    eighths = (fraction * 4 + 0.5).floor()  # the nearest quarter: exact
    angle = (fraction - eighths / 4) * (2 * math.pi)
    square = angle * angle
    cosine, sine = torch.ones_like(angle), torch.ones_like(angle)
    for term in reversed(range(1, _TURN_TERMS)):
        cosine = 1 - cosine * square / ((2 * term - 1) * (2 * term))
        sine = 1 - sine * square / ((2 * term) * (2 * term + 1))
    sine = sine * angle
    quarter = eighths.to(torch.int64) & 3
    swapped = quarter % 2 == 1
    return (
        torch.where(swapped, sine, cosine)
        * torch.where((quarter == 1) | (quarter == 2), -1.0, 1.0),
        torch.where(swapped, cosine, sine) * torch.where(quarter >= 2, -1.0, 1.0),
    )
