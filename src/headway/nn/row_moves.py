"""Rows out of a tensor and into one, by number; and the numbers of those that are marked.

Torch copies rows that it writes by number one element after the other, which takes twice the time
of copying each as a whole; NumPy does the latter for entries of an opaque type. Torch also asks of
each mark whether it is set, which a processor cannot guess; NumPy counts without a branch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def take_rows(table: Tensor, numbers: Tensor) -> Tensor:
    """Rows [n, ...] of `table` [rows, ...], contiguous, with int64 numbers [n] within it."""
    if table.device.type != "cpu" or not table.numel():
        return table.index_select(0, numbers)
    # Clipping saves NumPy a copy; numbers are within the table.
    found = np.take(_opaque(table), numbers.numpy(), mode="clip")
    rows = torch.from_numpy(found.view(np.uint8)).view(table.dtype)
    return rows.view(len(numbers), *table.shape[1:])


def put_rows(table: Tensor, numbers: Tensor, rows: Tensor) -> None:
    """Write rows [n, ...] into `table` [rows, ...], contiguous, at different int64 numbers [n]."""
    if table.device.type != "cpu" or not rows.numel():
        table.index_copy_(0, numbers, rows)
    else:
        _opaque(table)[numbers.numpy()] = _opaque(rows.contiguous())


def marked(marks: Tensor) -> Tensor:
    """Where marks [n], bool, are set; int64, ascending."""
    if marks.device.type != "cpu":
        return marks.nonzero().squeeze(1)
    return torch.from_numpy(marks.numpy().nonzero()[0])


def _opaque(table: Tensor) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """[rows] of entries without a meaning, in the same memory."""
    entries = table.detach().view(len(table), -1).view(torch.uint8).numpy()
    return entries.view(f"V{entries.shape[1]}")[:, 0]
