"""Stacks of equal blocks in a model, and the model with few of them.

Blocks are equal if they have the same types, plain attributes, and shapes of what they hold, and if
nothing of theirs is used elsewhere. Whether they are also called alike is asked of a walk through
the model (`capture.walk`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.graph.extend import KEPT, Stack

LEAST = 2 * KEPT
"""Blocks of a stack that is worth it."""
_TABLES = ("_parameters", "_buffers", "_modules")
_USUAL = frozenset(vars(nn.Module())) - {"training"}
"""Of every module; they say nothing where they are empty."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Found:
    """A stack.

    Attributes:
        holder: What holds the blocks.
        stack: Its path, and which of its children they are.
        blocks: They themselves.
    """

    holder: nn.Module
    stack: Stack
    blocks: tuple[nn.Module, ...]

    def inside(self, model: nn.Module) -> Found:
        """The same stack of a copy of the model."""
        holder = model.get_submodule(self.stack.path)
        first = self.stack.first
        blocks = tuple(holder.children())[first : first + self.stack.blocks]
        return Found(holder, self.stack, blocks)


def find_stacks(model: nn.Module) -> tuple[Found, ...]:
    """The outermost stacks, in the order of their names."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    held: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    held += model.named_buffers(remove_duplicate=False)
    uses.update(id(tensor) for _, tensor in held)
    return tuple(_stacks(model, "", uses))


def _stacks(module: nn.Module, path: str, uses: Counter[int]) -> Iterator[Found]:
    children = list(module.named_children())
    taken: set[int] = set()
    numbered = [name for name, _ in children] == [str(n) for n in range(len(children))]
    if isinstance(module, nn.ModuleList | nn.Sequential) and numbered and len(children) >= LEAST:
        blocks = [child for _, child in children]
        signatures = [_own(block, uses) for block in blocks]
        start = 0
        for stop in range(1, len(blocks) + 1):
            if stop < len(blocks) and signatures[stop] == signatures[start]:
                continue
            if stop - start >= LEAST:
                stack = Stack(path=path, first=start, blocks=stop - start)
                yield Found(module, stack, tuple(blocks[start:stop]))
                taken.update(range(start, stop))
            start = stop
    for number, (name, child) in enumerate(children):
        if number not in taken:
            yield from _stacks(child, f"{path}.{name}" if path else name, uses)


def _own(block: nn.Module, uses: Counter[int]) -> object:
    """The signature of a block of which nothing is used elsewhere; else like no other."""
    inside: list[Any] = [*block.modules(), *block.parameters(), *block.buffers()]
    return object() if any(uses[id(one)] > 1 for one in inside) else signature(block)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that cannot be told apart by what they are made of."""
    return (
        type(module),
        tuple(
            (name, plain(value))
            for name, value in vars(module).items()
            if name not in _TABLES and (value or name not in _USUAL)
        ),
        tuple((name, _spec(tensor)) for name, tensor in module._parameters.items()),
        tuple((name, _spec(tensor)) for name, tensor in module._buffers.items()),
        tuple((n, child and signature(child)) for n, child in module._modules.items()),
    )


def plain(value: Any) -> Any:
    """What can be compared; objects of other kinds are equal to themselves alone."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(plain(inner) for inner in value)
    if isinstance(value, dict):
        return type(value), tuple((plain(key), plain(inner)) for key, inner in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(plain(inner) for inner in value)
    if isinstance(value, functools.partial):
        return functools.partial, plain(value.func), plain(value.args), plain(value.keywords)
    return object, id(value)


def _spec(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


@contextmanager
def shortened(stacks: tuple[Found, ...]) -> Iterator[None]:
    """While it lasts, each stack has its first three blocks and its last one."""
    before = {id(found.holder): (found.holder, dict(found.holder._modules)) for found in stacks}
    gone = {id(block) for found in stacks for block in found.blocks[KEPT - 1 : -1]}
    try:
        for holder, modules in before.values():
            left = [module for module in modules.values() if id(module) not in gone]
            holder._modules.clear()
            holder._modules.update({str(n): module for n, module in enumerate(left)})
        yield
    finally:
        for holder, modules in before.values():
            holder._modules.clear()
            holder._modules.update(modules)
