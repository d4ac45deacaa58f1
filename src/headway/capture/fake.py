"""A user's model and example as tensors without numbers: nothing is allocated, nothing computed.

The only file of the package that touches `torch._subclasses` and `torch.utils._python_dispatch`,
which are private; torch.export is built on them. All stand-ins are on the CPU, so that code which
makes tensors without naming a device fits them, wherever the model is, on the meta device too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

Module = TypeVar("Module", bound=nn.Module)


class Pretence:
    """One world of stand-ins.

    Attributes:
        mode: A context in which new tensors are stand-ins, too.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, real: Tensor) -> Tensor:
        """A stand-in of the same sizes, strides and type."""
        if isinstance(real, FakeTensor) and real.fake_mode is self.mode:
            return real
        with self.mode, torch._C.DisableTorchFunction():
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        return made.requires_grad_(real.requires_grad and real.is_leaf)

    def tree(self, example: Any) -> Any:
        """Every tensor of nested lists, tuples and tables replaced."""
        return tree_map_only(Tensor, self.tensor, example)

    def model(self, real: Module, spared: Collection[nn.Module] = ()) -> Module:
        """A deep copy in which every tensor is a stand-in; tied ones stay tied.

        Args:
            real: The model.
            spared: Modules in it that are not carried out: their copies hold the same tensors.

        Raises:
            Exception: Whatever a part of the model raises when it is copied.
        """
        shallow = {id(module): copy.copy(module) for module in spared}
        with _Copies(self.tensor):
            return copy.deepcopy(real, shallow)


@contextmanager
def unpretended() -> Iterator[None]:
    """While it lasts, calls of torch are carried out for real and noted nowhere."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class _Copies(TorchFunctionMode):
    """Deep copies of tensors become stand-ins."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.clone, torch._C.TensorBase.clone):  # of a parameter's deep copy
            return self._stand_in(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                made = self._stand_in(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)  # itself a stand-in
                memo[id(tensor)] = nn.Parameter(made, made.requires_grad) if is_parameter else made
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
