"""A user's model and example batch as fake tensors: nothing is allocated, nothing computed.

The only file that touches `torch._subclasses` and torch's `_disable_current_modes`, which are
private; torch.export is built on them. All fake tensors are on the CPU, so that code which makes
tensors without naming a device fits them, wherever the model is, also on the meta device.

`DataIndependentValues` answers control flow that depends on no data, such as
`bool((mask == causal).all())` in torch's own Transformer: calls whose tensors were made from sizes
alone, or from buffers that it is given, are noted, and run for real once a decision asks for a
number. Data, parameters and random numbers have no value there.
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
from torch.utils._pytree import tree_leaves, tree_map_only

Module = TypeVar("Module", bound=nn.Module)


class FakeContext:
    """One world of fake tensors."""

    def __init__(self) -> None:
        # Code may hold real tensors as constants outside of modules.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, real: Tensor) -> Tensor:
        """A fake tensor of the same sizes, strides and type."""
        if isinstance(real, FakeTensor) and real.fake_mode is self.mode:
            return real
        with self.mode, torch._C.DisableTorchFunction():
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        # A computed tensor of the example does not bring its graph along.
        return made.requires_grad_(real.requires_grad and real.is_leaf)

    def tree(self, example: Any) -> Any:
        return tree_map_only(Tensor, self.tensor, example)

    def model(self, real: Module, spared: Collection[nn.Module] = ()) -> Module:
        """A deep copy in which every tensor is fake; tied ones stay tied.

        Args:
            spared: Modules in it that are not executed: their copies hold the same tensors.

        Raises:
            Exception: Whatever a part of the model raises when it is copied.
        """
        shallow = {id(module): copy.copy(module) for module in spared}
        with _Copies(self.tensor):
            return copy.deepcopy(real, shallow)


@contextmanager
def without_fake_mode() -> Iterator[None]:
    """While it lasts, calls of torch are executed for real and recorded nowhere."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class _Copies(TorchFunctionMode):
    """Deep copies of tensors become fake tensors."""

    def __init__(self, make_fake: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._make_fake = make_fake

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.clone, torch._C.TensorBase.clone):  # of a parameter's deep copy
            return self._make_fake(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                made = self._make_fake(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)  # itself fake
                memo[id(tensor)] = nn.Parameter(made, made.requires_grad) if is_parameter else made
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


_DECISIONS = frozenset(
    (
        *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"),
        *("allclose", "equal", "is_nonzero", "item", "tolist"),
    )
)
_RANDOM = (
    *("bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "gumbel"),
    *("multinomial", "normal", "poisson", "rand", "resize", "rrelu", "uniform"),
)
"""In names of functions whose numbers nobody knows."""


class DataIndependentValues(TorchFunctionMode):
    """What is known of one run of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Tensor] = {}  # fake tensors with numbers, by identity
        # Carried out only when a number is asked for: most forwards never ask.
        self._noted: list[tuple[Any, Any, Any, Any]] = []  # calls not executed yet
        self._real: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}

    def give(self, fake: Tensor, real: Tensor) -> None:
        """Make known the numbers that a fake tensor has at the beginning; they are not changed."""
        if not is_fake(real):
            self._alive[id(fake)] = fake
            self._given[id(fake)] = real

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(id(leaf) in self._alive for leaf in tensors) and not _open(args, kwargs)
        if known and tensors and name in _DECISIONS:
            return self._decided(func, args, kwargs)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        chance = any(word in name for word in _RANDOM)
        if known and not chance and (made or _changes(name, kwargs)):
            self._alive.update((id(leaf), leaf) for leaf in made)
            self._noted.append((func, args, kwargs, result))
        elif _changes(name, kwargs) and any(id(tensor) in self._alive for tensor in tensors):
            # A value that depends on data was written into one of them; which others share its
            # memory is not known.
            self._alive.clear()
            self._noted.clear()
        return result

    def _decided(self, func: Any, args: Any, kwargs: Any) -> Any:
        with without_fake_mode(), torch.no_grad():
            for one, given, named, result in self._noted:
                found = one(*self._numbers(given), **self._numbers(named))
                for leaf, real in zip(tree_leaves(result), tree_leaves(found), strict=True):
                    if isinstance(leaf, Tensor):
                        self._real[id(leaf)] = real
            # Each call is executed once; its numbers stay in `_real`.
            self._noted.clear()
            return func(*self._numbers(args), **self._numbers(kwargs))

    def _numbers(self, tree: Any) -> Any:
        return tree_map_only(Tensor, self._number, tree)

    def _number(self, leaf: Tensor) -> Tensor:
        if id(leaf) not in self._real:  # a copy: calls that are run again may write into it
            self._real[id(leaf)] = self._given[id(leaf)].detach().cpu().clone()
        return self._real[id(leaf)]


def _open(args: Any, kwargs: Any) -> bool:
    """Whether something acts as a tensor without being one: nobody knows its numbers."""
    return any(
        hasattr(type(leaf), "__torch_function__") and not isinstance(leaf, Tensor)
        for leaf in tree_leaves((args, kwargs))
    )


def _changes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into its arguments."""
    plain = name.endswith("_") and not name.endswith("__")
    operators = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return plain or operators or name in ("__setitem__", "__set__") or "out" in kwargs
