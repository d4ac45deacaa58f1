"""How far rounding may take a run in its own precision from what one process makes of it.

The unit of a type is its epsilon u, twice what one operation rounds by. Law of each link of a step:

- A rank's share is made by the same operators in one process: it is off by a unit of its largest
  element for each micro-batch that was added, and a few for scaling.
- A sum over n ranks is off by n u of the magnitudes that were added, element by element, and by no
  direction: the mean error stays within a few standard deviations (`replay`).
- What is sent of a gradient is rounded to its type; what is kept back is the exact rest, in float32
  at least. Where a choice hangs on the last bit (thresholds, factors), only that sent and kept are
  the gradient is law.
- An update is made of the numbers that the run has recorded: a parameter is off by its own rounding
  and that of its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from headway.verification.reference.exchanges import (
    ROUNDED,
    BucketInputs,
    CompressionSpec,
    ExpectedExchange,
    Row,
    adasum_factors,
    draws,
    expected_exchange,
    largest,
    random_places,
    residual_of,
    whole_residual,
)

SCALING_UNITS = 8
"""Units that scaling, averaging and an average of moments take together."""
NORM_UNITS = 128
"""Units of a norm over many elements, by which all gradients may be scaled."""


WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def unit_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def share_bound(row: Tensor, dtype: torch.dtype, micros: int) -> Row:
    """Of the gradients that a rank puts into the exchange."""
    largest_element = float(row.abs().max()) if row.numel() else 0.0
    return np.full(row.numel(), (micros + SCALING_UNITS) * unit_of(dtype) * largest_element)


def step_bound(
    kind: str,
    value: Tensor,
    before: Tensor | None,
    model: nn.Module,
    *,
    half: bool,
    loss_size: float,
) -> Row:
    """Of a tensor of a step.

    Args:
        before: Of a parameter, what it was before the step.
        half: The forward pass computes in bfloat16.
        loss_size: Mean of the magnitudes of what the loss was added up of.
    """
    unit = unit_of(value.dtype)
    if kind in ("loss", "norm"):
        # Told in float64, and computed in the types of the model.
        types = {p.dtype for p in model.parameters()} | ({torch.bfloat16} if half else set())
        unit = max(map(unit_of, types), default=unit)
    wide = value.detach().double()
    size = wide.abs()
    most = float(size.max()) if size.numel() else 0.0
    if kind == "loss":
        most = max(most, loss_size)
    if before is None:
        units = SCALING_UNITS if kind in ("loss", "buffer") else NORM_UNITS
        return np.full(tuple(value.shape), units * unit * most)
    step = (wide - before.double()).abs()
    far = float(step.max()) if step.numel() else 0.0
    bound: Row = (2 * unit * size + NORM_UNITS * unit * far).numpy()
    return bound


def expected_sums(inputs: BucketInputs, dtype: torch.dtype) -> ExpectedExchange | None:
    """What comes out of a bucket of a type; None: only `sent_and_kept` is law."""
    kind = CompressionSpec.of(inputs.bucket.compress).name
    if inputs.reduce == "adasum":
        return _adasum(inputs, dtype)
    if kind in ("topk", "randomk") and not inputs.hierarchical:
        return _selected(inputs, dtype, kind)
    if kind not in (*ROUNDED, "int8"):
        return None
    found = expected_exchange(inputs)
    bound = _sum_bound(inputs.rows, dtype)
    if inputs.hierarchical and kind in WIRES:
        # The sum inside a node, rounded otherwise, may round to the neighbour in 16 bits.
        bound = bound + unit_of(WIRES[kind]) * np.abs(np.stack(inputs.rows)).sum(0)
    if kind == "int8":
        bound = bound + SCALING_UNITS * unit_of(dtype) * np.abs(found.out)
    return ExpectedExchange(found.out, bound + (0.0 if found.bound is None else found.bound))


def _sum_bound(rows: Sequence[Row], dtype: torch.dtype) -> Row:
    stacked = np.abs(np.stack(rows))
    bound: Row = len(stacked) * unit_of(dtype) * stacked.sum(0) + torch.finfo(dtype).smallest_normal
    return bound


def _adasum(inputs: BucketInputs, dtype: torch.dtype) -> ExpectedExchange:
    """Of two ranks: factors in float64, a sum that rounds once to the type."""
    x, y = inputs.rows
    sizes = np.empty_like(x)
    for _, span, _ in inputs.spans:
        left, right = adasum_factors(x[span], y[span])
        sizes[span] = abs(left) * np.abs(x[span]) + abs(right) * np.abs(y[span])
    unit = unit_of(dtype) + 2 * unit_of(torch.promote_types(dtype, torch.float32))
    return ExpectedExchange(expected_exchange(inputs).out, unit * sizes, directed=True)


def _selected(inputs: BucketInputs, dtype: torch.dtype, kind: str) -> ExpectedExchange:
    """The largest elements, or random ones: u is a number of the residual's type."""
    compression = CompressionSpec.of(inputs.bucket.compress)
    wide = torch.promote_types(dtype, torch.float32)
    out, bound = np.sum(inputs.rows, 0), _sum_bound(inputs.rows, dtype)
    kept: list[dict[str, Row]] = [{} for _ in inputs.rows]
    for name, span, shape in inputs.spans:
        size = math.prod(shape)
        if not compression.compresses(shape):
            continue
        count, parts = compression.kept(size), []
        for number, rank in enumerate(inputs.bucket.ranks):
            residual = torch.from_numpy(residual_of(inputs.before[number], name, size)).to(wide)
            u = (torch.from_numpy(inputs.rows[number][span]).to(wide) + residual).double().numpy()
            if kind == "topk":
                theirs = residual_of(inputs.after[number], name, size)
                none = draws(inputs.seed, name, inputs.steps, rank)
                chosen = largest(u, count, theirs, none)
            else:
                chosen = random_places(inputs, name, size, count)
            sent = torch.from_numpy(np.where(chosen, u, 0.0)).to(dtype).double().numpy()
            kept[number][f"{name}/residual"] = u - sent
            parts.append(sent)
        out[span], bound[span] = np.sum(parts, 0), _sum_bound(parts, dtype)
    return ExpectedExchange(out, bound, kept=kept)


def sent_and_kept(inputs: BucketInputs, out: Row, dtype: torch.dtype) -> tuple[Row, Row]:
    """What must have been sent, for gradients and what was kept before and is kept now.

    Returns:
        It, and by how much it may be off.
    """
    total = np.sum(inputs.rows, 0)
    size = np.sum(np.abs(inputs.rows), 0)
    for states, sign in ((inputs.before, 1.0), (inputs.after, -1.0)):
        for rank in range(len(inputs.rows)):
            for what in ("residual", "server"):
                kept = whole_residual(inputs, rank, states, what)
                total += sign * kept
                size += np.abs(kept)
    wide = unit_of(torch.promote_types(dtype, torch.float32))
    factors = "powersgd" in inputs.bucket.compress
    # A product of matrices adds up as many terms as they have columns.
    size = np.full_like(size, NORM_UNITS * size.max()) if factors else size + np.abs(out)
    return total, SCALING_UNITS * len(inputs.rows) * (wide * size + unit_of(dtype) * np.abs(out))
