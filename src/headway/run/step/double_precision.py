"""Double precision also where a model's own code asks for less.

In `precision = "float64"`, in which runs are verified, parameters and data are float64. Much code
converts inside of its forward all the same: norms, attention and losses go to float32, "to be
exact" where parameters have 16 bits. Two splits would then agree to 1e-7 only, and no wrong count
could be told from rounding. Here such conversions become conversions to float64, operators that
have no float64 kernel are computed by others, and new tensors are float64.

What headway itself converts (a compressor's wire) stays as it is.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.user_frames import is_headway_file, is_torch_file

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_GROUPED = "_grouped_mm"
_FACTORIES = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
"""Where no type is given, these make the default type, float32."""

_MODES = {"__torch_dispatch__", "__torch_function__"}


def double_precision(precision: str) -> AbstractContextManager[Any]:
    """The context of all that a step computes in a precision, backward passes included."""
    return DoublePrecision() if precision == "float64" else nullcontext()


class DoublePrecision(TorchDispatchMode):
    """Inside, conversions of floating-point numbers to fewer bits are conversions to float64.

    A mode of dispatch, not of functions: that would not see what backward computes again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        name = func.overloadpacket.__name__
        if name == _GROUPED and args[0].dtype is torch.float64:
            return _grouped_product(*args, **keywords)
        narrow = keywords.get("dtype") in _WIDE
        untyped = name in _FACTORIES and keywords.get("dtype") is None and _is_float(name, args)
        # The frames of the call are looked at only where something could become another type.
        if not (narrow or untyped) or _is_asked_by_headway():
            return func(*args, **keywords)
        wide = _WIDE[keywords["dtype"]] if narrow else torch.float64
        return func(*args, **{**keywords, "dtype": wide})


def _is_float(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a factory without a type makes floating-point numbers."""
    return name != "full" or isinstance(args[1], float)


def _is_asked_by_headway() -> bool:
    """Whether the innermost line outside of torch is headway's own, and no model's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    return frame is not None and is_headway_file(frame.f_code.co_filename)


def _passes_on(frame: FrameType) -> bool:
    """Whether code is torch's, or another mode's, through which all operators go."""
    code = frame.f_code
    return is_torch_file(code.co_filename) or code.co_name in _MODES


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's grouped matrix product, which has no float64: a product for each group.

    Args:
        a: (rows, inner) in groups of rows, or of inner where b has two dimensions as well; or
            (groups, rows, inner).
        b: (groups, inner, columns), or (inner, columns) in groups of inner or of columns.
        offs: The end of each group; None: both have three dimensions.
    """
    if offs is None:
        return torch.bmm(a, b)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.dim() == 2:
        result = a.new_zeros(len(a), b.shape[-1])  # rows behind the last group belong to none
        for group, factor in zip(groups, b, strict=True):
            result[group] = a[group] @ factor
        return result
    result = a.new_zeros(a.shape[1], b.shape[-1])
    for group, factor in zip(groups, a, strict=True):
        result[:, group] = factor @ b[:, group]
    return result
