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

_OPERATORS = {"__torch_dispatch__", "__torch_function__"}
"""Through these goes what others ask for: of modes, and of headway's split tensors."""


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
    """Whether the innermost line outside of torch is headway's own, and no model's.

    The rule of an operator on parts of tensors is headway's, but computes what a model asked for.
    """
    frame: FrameType | None = sys._getframe(2)
    asked, operand = False, ""
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in _OPERATORS:
            asked, operand = False, file
        elif is_headway_file(file):
            asked = asked or file != operand  # which has the methods that come here, too
        elif not is_torch_file(file):
            break
        frame = frame.f_back
    return asked


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
    # All products are computed, and what a group does not have is left out: that asks for no
    # numbers, which fake tensors do not have.
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    entries = torch.arange(b.shape[-1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1])
    inside = (entries >= starts[:, None]) & (entries < offs[:, None])
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a.where(group, 0.0) @ b for group in inside])
    if a.dim() == 2:
        products = [
            (a @ one).where(group[:, None], 0.0) for group, one in zip(inside, b, strict=True)
        ]
    else:
        products = [(one @ b).where(group, 0.0) for group, one in zip(inside, a, strict=True)]
    return torch.stack(products).sum(dim=0)
