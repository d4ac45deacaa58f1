"""Activation checkpointing of a stage, block by block.

A block is a call of one of the model's modules by its stage; where a cut looks into a chain,
as many calls as follow each other. From forward to backward a block keeps its arguments alone;
the first of its saved tensors that backward asks for recomputes them all, from the same
arguments, weights, buffers and random numbers. Gradients and buffers are bitwise those of a
stage that keeps everything.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", as autograd hooks.
Unlike `torch.utils.checkpoint`, a block is recomputed once even where backward comes in two
halves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from headway.errors import RunError
from headway.parallel.pipeline.partition.stage_modules import AttributeSource
from headway.parallel.stages import Stage, TreeSpec, flatten, is_payload


class RecomputedStage(nn.Module):
    """The module of a stage, with its blocks.

    Args:
        flush: Weights do not change between a forward and its backward.
    """

    def __init__(self, stage: Stage, device: torch.device, *, flush: bool) -> None:
        super().__init__()
        self._watched: _WatchedArguments = []
        graph = fx.Graph()
        graph.output(graph.graph_copy(stage.module.graph, {}))
        blocks: dict[str, _Block] = {}
        for run in _runs(graph):
            first, last = run[0], run[-1]
            modules = [stage.module.get_submodule(str(node.target)) for node in run]
            name = f"block_{first.name}"
            blocks[name] = _Block(
                f"{' to '.join(dict.fromkeys((str(first.target), str(last.target))))} "
                f"in stage {stage.number}",
                modules[0] if len(run) == 1 else nn.Sequential(*modules),
                device,
                self._watched,
                keeps_weights=not flush,
                keeps_buffers=stage.updates,
            )
            first.target = name
            if len(run) > 1:
                last.replace_all_uses_with(first)
            # From the last one on: fx refuses to erase a node that has users.
            for node in reversed(run[1:]):
                graph.erase_node(node)
        self.stage = fx.GraphModule(
            AttributeSource(stage.module, blocks), graph, class_name="Blocks"
        )

    def forward(self, *values: Any) -> Any:
        """What the stage's module returns."""
        self._watched.clear()
        result = self.stage.forward(*values)
        # Behind the whole stage: a later block may have changed an argument, too.
        for block, tensor, version in self._watched:
            block.alters = tensor._version != version or bool(block.alters)
        self._watched.clear()
        return result


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each block the calls that it consists of."""
    runs: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        if runs and _follows(node, runs[-1][-1]):
            runs[-1].append(node)
        else:
            runs.append([node])
    if len(runs) != 1:
        return runs
    # A stage of one chain: about as many blocks as a block has calls, so that their sum is least.
    (run,) = runs
    size = math.isqrt(len(run) - 1) + 1
    return [run[n : n + size] for n in range(0, len(run), size)]


def _follows(node: fx.Node, before: fx.Node) -> bool:
    """Whether two calls are of one chain, one directly behind the other."""
    chains = {str(n.target).rpartition(".")[0] for n in (node, before)}
    return (
        len(chains) == 1
        and node.prev is before
        and node.args == (before,)
        and not node.kwargs
        and list(before.users) == [node]
    )


_WatchedArguments = list[tuple["_Block", Tensor, int]]
"""Block, argument and its version, where it is not known yet whether it is changed in place."""


class _Block(nn.Module):
    """A module that keeps its arguments only.

    Args:
        watched: Where the arguments of its first call are noted.
        keeps_weights: Compute again with the weights of the first time.
        keeps_buffers: Compute again with the buffers of the first time, and on copies of them.

    Attributes:
        alters: Its arguments are changed in place, by itself or later; None: not known.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        watched: _WatchedArguments,
        *,
        keeps_weights: bool,
        keeps_buffers: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.device = device
        self.alters: bool | None = None
        self._watched = watched
        self._keeps_weights = keeps_weights
        self._keeps_buffers = keeps_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        leaves, structure = flatten((args, kwargs), is_payload)
        if self.alters is None:
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._watched += [(self, t, t._version) for t in tensors]
        # Until the first micro-batch has shown that nothing is changed in place, copies are kept.
        call = _Call(
            block=self,
            arguments=[_Argument.of(leaf, copied=self.alters is not False) for leaf in leaves],
            structure=structure,
            held=self._held(),
            surroundings=_ForwardEnvironment(self.device),
        )
        with saved_tensors_hooks(call.pack, call.unpack):
            return self.module(*args, **kwargs)

    def run(self, held: dict[str, Tensor], args: Any, kwargs: Any) -> None:
        """Compute once more, with other weights and buffers if there are any."""
        if held:
            functional_call(self.module, held, args, kwargs)
        else:
            self.module(*args, **kwargs)

    def _held(self) -> dict[str, Tensor]:
        """Weights and buffers that may be others when the block is computed again."""
        held: dict[str, Tensor] = {}
        if self._keeps_weights:
            # No copies: inside `WeightVersions.call` these are the tensors of a version, which no
            # step changes.
            held.update(self.module.named_parameters())
        if self._keeps_buffers:
            held.update((name, buffer.clone()) for name, buffer in self.module.named_buffers())
        return held


@dataclass(slots=True)
class _Argument:
    """What is kept of an argument.

    Attributes:
        version: Of a tensor that is no copy.
        copied: It is entered as a copy: the block may change it.
    """

    value: Any
    version: int = -1
    flows: bool = False
    copied: bool = False

    @staticmethod
    def of(leaf: Any, *, copied: bool) -> _Argument:
        if not isinstance(leaf, Tensor):
            return _Argument(leaf)
        value = leaf.detach().clone() if copied else leaf.detach()
        return _Argument(value, value._version, leaf.requires_grad, copied)

    def entered(self, name: str) -> Any:
        """Once more what the block was given.

        Raises:
            RunError: It has been changed in place, which it was not in the first micro-batch.
        """
        if not isinstance(self.value, Tensor):
            return self.value
        if self.value._version != self.version:
            raise RunError(
                f"{name}: an argument was changed in place after the block had been computed",
                why="In the first micro-batch nothing did so, and the block cannot be computed "
                "again from something else.",
                fix='Do not work in place there, or set recompute = "stages".',
            )
        leaf = self.value.detach().requires_grad_(self.flows)
        return leaf.clone() if self.copied else leaf  # no leaf may be changed in place


class _Saved:
    """Stands for a tensor that autograd has saved; it dies with what has saved it.

    Attributes:
        call: Of the block in which that was.
        value: The tensor, once it has been computed again.
    """

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.value: Tensor | None = None


class _RecomputationComplete(BaseException):  # so that no `except Exception` of a block stops it
    """Everything that was saved the first time is there again."""


@dataclass(slots=True)
class _Call:
    """A block in one micro-batch: what it was called with, and what autograd has saved in it."""

    block: _Block
    arguments: Sequence[_Argument]
    structure: TreeSpec
    held: dict[str, Tensor]
    surroundings: _ForwardEnvironment
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> _Saved:
        """In place of a tensor; called as long as the block is computed the first time."""
        saved = _Saved(self)
        # Weak: what backward has freed by then need not be filled in.
        self.saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        """The tensor; called by backward."""
        if saved.value is None:
            self._compute()
        assert saved.value is not None
        return saved.value

    def _compute(self) -> None:
        """Fill in all that is still wanted."""
        found = 0

        def pack(tensor: Tensor) -> None:
            nonlocal found
            saved = self.saved[found]() if found < len(self.saved) else None
            if saved is not None:
                saved.value = tensor.detach()
            found += 1
            if found == len(self.saved):
                raise _RecomputationComplete

        with self.surroundings.restored(), saved_tensors_hooks(pack, _never):
            entered = [argument.entered(self.block.name) for argument in self.arguments]
            args, kwargs = self.structure.rebuild(entered)
            # One pass fills in all that is wanted, so that the arguments can be freed.
            held, self.arguments, self.held = self.held, (), {}
            try:
                self.block.run(held, args, kwargs)
            except _RecomputationComplete:
                return
        raise RunError(
            f"{self.block.name} computes something else the second time",
            why=f"Its forward kept {len(self.saved)} tensors for backward, and now {found}.",
            fix='Make its forward depend on its arguments alone, or set recompute = "stages".',
        )


def _never(saved: None) -> Tensor:
    raise AssertionError("nothing goes backward through a graph that is made to be thrown away")


class _ForwardEnvironment:
    """On what a forward depends beside its arguments: random generators and autocast."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = sorted({"cpu", device.type})
        self._device = device
        self._random = torch.get_rng_state()
        self._device_random: Tensor | None = None
        if device.type != "cpu":
            self._device_random = torch.get_device_module(device).get_rng_state(device)
        self._cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in self._kinds
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As they were; afterwards they are as before. Gradients are enabled."""
        own = self._device_random
        devices = [] if own is None else [self._device.index or 0]
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._cached)
                )
            # Without devices fork_rng keeps the CPU's state alone, whatever type it is told.
            kind = self._device.type if own is not None else "cuda"
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            stack.enter_context(torch.enable_grad())
            torch.set_rng_state(self._random)
            if own is not None:
                torch.get_device_module(self._device).set_rng_state(own, self._device)
            yield
