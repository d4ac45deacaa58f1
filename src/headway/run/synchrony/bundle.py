"""`Bundle`: the parameters of a model as one value that adds and multiplies.

The rules of `headway.synchrony` are written for numbers. A bundle holds one flat tensor for each
type of the parameters, so that a rule is one operation of torch, and a message one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bundle:
    """Flat tensors, one for each type, in the order in which the types first occur.

    Attributes:
        used: Of a gradient: which parameters have one; None: all have.
        rates: Of a gradient: the learning rates of the optimiser's groups with which it is to be
            applied, where another process applies it.
    """

    flat: tuple[Tensor, ...]
    used: tuple[bool, ...] | None = None
    rates: tuple[float, ...] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Bundle:
        """A copy of some tensors."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
        return cls(tuple(torch.cat(parts) for parts in by_type.values()))

    @torch.no_grad()
    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Write the values into tensors of the forms that the bundle was made of."""
        place: dict[torch.dtype, int] = {}
        flat = {tensor.dtype: tensor for tensor in self.flat}
        for tensor in tensors:
            start = place.get(tensor.dtype, 0)
            end = place[tensor.dtype] = start + tensor.numel()
            tensor.copy_(flat[tensor.dtype][start:end].view(tensor.shape))

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values in the forms of some tensors."""
        found = [torch.empty_like(tensor) for tensor in tensors]
        self.copy_to(found)
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat)

    def _each(self, other: Bundle, combine: Callable[[Tensor, Tensor], Tensor]) -> Bundle:
        used = self.used
        if used is not None and other.used is not None:
            used = tuple(map(bool.__or__, used, other.used))
        flat = tuple(map(combine, self.flat, other.flat))
        return Bundle(flat, used or other.used, self.rates or other.rates)

    def __add__(self, other: Bundle) -> Bundle:
        return self._each(other, torch.add)

    def __sub__(self, other: Bundle) -> Bundle:
        return self._each(other, torch.sub)

    def __mul__(self, other: Bundle | float) -> Bundle:
        if isinstance(other, Bundle):
            return self._each(other, torch.mul)
        return replace(self, flat=tuple(tensor * other for tensor in self.flat))

    __rmul__ = __mul__

    def __abs__(self) -> Bundle:
        return replace(self, flat=tuple(tensor.abs() for tensor in self.flat))

    def norm(self) -> float:
        """The Euclidean norm."""
        return float(sum(float(tensor.double().square().sum()) for tensor in self.flat) ** 0.5)

    def max(self) -> float:
        """The largest element."""
        return max((float(tensor.max()) for tensor in self.flat if tensor.numel()), default=0.0)
