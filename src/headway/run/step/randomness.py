"""Random numbers per sample instead of per rank: dropout is the same for every plan.

A random number drawn in a forward pass depends on (seed, step, number of the draw in the forward
pass, sample, position in the sample) and on nothing else: not on the rank, not on the size of the
micro-batch. A probe runs the model once with two and once with three samples; the dimension of each
draw that changes is the one along which samples lie. During training every draw is then made
sample by sample from a generator seeded with the key above.

The number of a draw is itself a number from torch's global generator, which every micro-batch
starts from the same state. Activation checkpointing restores that state before it recomputes a part
of the forward pass, and so meets the same keys and the same masks.

A pipeline stage begins at the draw that it has in the whole model (`StageRandomness` counts them
once), so that dropout does not depend on the cut, the schedule, or recomputation.

Touches `torch.utils._python_dispatch`; a test notices when that changes.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.checkpoint.pretrained import load_weights
from headway.data import RankBatch
from headway.errors import RecipeError
from headway.nn import DynamicTable
from headway.parallel.stages import ModelStages
from headway.run.recipe.recipe import Recipe, sum_and_count

_MASK = (1 << 64) - 1


def mix_seeds(*parts: int) -> int:
    """One 64-bit number from several (splitmix64, chained): equal parts give equal numbers."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = (state + 0x9E3779B97F4A7C15) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_everything(*parts: int) -> None:
    """Start the global generators of torch, numpy and random from a key."""
    key = mix_seeds(*parts)
    if _has_accelerator():
        torch.manual_seed(key & (_MASK >> 1))
    else:  # torch.manual_seed would queue it for accelerators to come, with a stack trace: 1 ms
        torch.default_generator.manual_seed(key & (_MASK >> 1))
    # numpy's legacy generator takes 32 bits.
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


_INIT = 0x494E4954
"""Keeps the numbers that initialise a model apart from those of its steps."""


def build_model(recipe: Recipe) -> nn.Module:
    """The model with the initial parameters that every rank and every plan starts from."""
    seed_everything(recipe.seed, _INIT)
    model = recipe.model().train()
    if recipe.weights is not None:
        load_weights(model, recipe.weights, recipe.weights_only)
    return model


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """How the samples lie in the result of one draw of the forward pass.

    Attributes:
        dim: The dimension along which samples lie; None: the draw is shared by all samples.
        block: Consecutive entries of `dim` that belong to one sample.
        draws: False for an operator that could draw and does not (attention without dropout).
    """

    dim: int | None
    block: int = 1
    draws: bool = True


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """All draws of a forward pass, in order, and whether backward draws again (recomputation)."""

    forward: tuple[RandomDraw, ...]
    in_backward: bool
    doubts: tuple[str, ...] = ()


def probe_random_draws(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    data: Any,
    resize: Callable[[Any, int], Any],
) -> RandomDraws:
    """Find the random draws of a training pass of the model and how samples lie in them.

    Args:
        model: In training mode. Its buffers and gradients are left as they were.
        resize: (data, n) -> a micro-batch of n samples made from the samples of `data`.
    """
    try:
        two = _record(model, loss, resize(data, 2), backward=True)
        if not any(two.drew):  # that torch tells of: cuDNN keeps a generator of its own
            return RandomDraws((), in_backward=False, doubts=tuple(two.recurrent))
        # Whether backward draws again does not depend on the samples: one backward pass tells.
        three = _record(model, loss, resize(data, 3), backward=False)
    except RecipeError:
        raise
    except Exception:
        return _unresized(model, loss, data)
    count = two.forward
    if three.forward != count:
        return RandomDraws(
            (RandomDraw(0),) * count,
            in_backward=two.again,
            doubts=("the number of random draws depends on the batch",),
        )
    sites, doubts = list[RandomDraw](), list(two.recurrent)
    for number, (a, b) in enumerate(zip(two.shapes[:count], three.shapes[:count], strict=True)):
        site, doubt = _compare(a, b) if two.drew[number] else (RandomDraw(None, draws=False), "")
        sites.append(site)
        if site.dim is not None and two.names[number] in _OF_ALL_SAMPLES:
            site, doubt = (
                RandomDraw(None),
                f"{two.names[number]} mixes the samples of a micro-batch",
            )
        if doubt:
            doubts.append(f"draw {number} of shape {list(a)}: {doubt}")
    return RandomDraws(tuple(sites), in_backward=two.again, doubts=tuple(doubts))


_OF_ALL_SAMPLES = {"randperm"}
"""Operators whose result for one sample depends on how many there are."""


def _unresized(model: nn.Module, loss: Callable[[nn.Module, Any], Any], data: Any) -> RandomDraws:
    # For batches that are more than samples along dimension 0, such as graphs. What fails here
    # fails with the user's own batch, and is the user's to see.
    own = _record(model, loss, data, backward=True)
    if not any(own.drew):
        return RandomDraws((), in_backward=False)
    return RandomDraws(
        (RandomDraw(0),) * own.forward,
        in_backward=own.again,
        doubts=("its batches cannot be cut into samples", *own.recurrent),
    )


def _compare(two: Sequence[int], three: Sequence[int]) -> tuple[RandomDraw, str]:
    """Where samples lie, from the shapes of the same draw with two and with three samples."""
    if len(two) != len(three):
        return RandomDraw(None), "its number of dimensions depends on the batch"
    changed = [dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not changed:
        return RandomDraw(None), ""
    dim = changed[0]
    if len(changed) > 1 or two[dim] % 2 or two[dim] * 3 != three[dim] * 2:
        return RandomDraw(None), "it cannot be cut into samples"
    return RandomDraw(dim, two[dim] // 2), ""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled models run as they were written.

    Under a dispatch mode Dynamo compiles nothing, and what it has met there once it never compiles
    again: without this the probe would switch torch.compile off for the whole run.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to a model or a part of it."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@cache
def _may_draw(func: Any) -> bool:
    """Whether an operator may draw from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


class _DrawDispatch:
    """Passes every operator on, but for those that may draw from the global generator."""

    # In a class without the mode as a base, which would wrap it against being compiled: twice the
    # time of each operator of the forward pass, and nothing is compiled here (`uncompiled`).
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        # Draws from a generator of the user's own are theirs.
        if _may_draw(func) and keywords.get("generator") is None:
            return self.on_draw(func, args, keywords)
        return func(*args, **keywords)

    @abstractmethod
    def on_draw(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call an operator that may draw."""


class _DrawMode(_DrawDispatch, TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


class _Recorder(_DrawMode):
    """Notes the shape of the result of every operator that may draw, and whether it did.

    Attributes:
        again: Backward runs parts of the forward pass again, or may do so.
        recurrent: What is wrong with the dropout between layers of recurrent modules.

    Raises:
        RecipeError: An operator on a GPU that draws in one kernel for all samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.drew: list[bool] = []
        self.names: list[str] = []
        self.recurrent: list[str] = []
        self.forward = 0
        self.again = False

    def on_draw(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        generator = _generator(_device_of(args, keywords))
        before = generator.get_state()
        result = func(*args, **keywords)
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.shapes.append(tuple(first.shape))
        self.drew.append(not torch.equal(before, generator.get_state()))
        self.names.append(func.__name__.partition(".")[0])
        if self.drew[-1] and self.names[-1].startswith(_FUSED_ATTENTION):
            raise RecipeError(
                f"attention with dropout cannot be trained on {first.device.type} yet",
                why=f"{self.names[-1]} draws for all samples at once, from one seed that backward "
                "uses again: its numbers would depend on how the batch is split.",
                fix="Set the dropout of attention to 0 (nn.Dropout elsewhere is fine), or use "
                "--device cpu.",
            )
        return result


def _record(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], data: Any, *, backward: bool
) -> _Recorder:
    """Run a pass, put everything back, and return what was drawn."""
    recorder = _Recorder()
    with (
        uncompiled(),
        state_restored(model),
        generators_restored(),
        _recurrent_watched(model, recorder.recurrent),
        recorder,
    ):
        value = loss(model, data)
        recorder.forward = len(recorder.shapes)
        total, _ = sum_and_count(value, 1)
        if backward and any(recorder.drew) and total.requires_grad:
            try:
                # Not `backward`, which would leave gradients and run the hooks of an exchange.
                torch.autograd.grad(total, _leaves_of(total), allow_unused=True)
            except RuntimeError:  # reentrant activation checkpointing does not allow it
                recorder.again = True
            recorder.again |= len(recorder.shapes) > recorder.forward
    return recorder


def _leaves_of(value: Tensor) -> list[Tensor]:
    """What a value has a gradient for. These are not the model's parameters where state is sharded:
    the forward pass then uses what FSDP2 has gathered."""
    found, seen, waiting = list[Tensor](), set[Any](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            found += [] if leaf is None else [leaf]
            waiting += [following for following, _ in node.next_functions]
    return found


@contextmanager
def _recurrent_watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Note recurrent modules whose dropout between layers cannot be drawn by sample.

    Of padded sequences it is drawn like any other. The rows of a packed sequence are ordered by
    time and length, so that a row's sample depends on the others; cuDNN draws for all at once.
    """

    def look(name: str, module: nn.RNNBase, inputs: tuple[Any, ...]) -> None:
        packed = isinstance(inputs[0], PackedSequence) if inputs else False
        data = inputs[0].data if packed else inputs[0] if inputs else None
        on_gpu = isinstance(data, Tensor) and data.is_cuda
        if not module.training or not (packed or on_gpu):
            return
        kind = f"{name} (nn.{type(module).__name__}, dropout={module.dropout:g})"
        why = "cuDNN draws it for all samples at once"
        if packed:
            why = "the rows of a packed sequence are ordered by the lengths of all samples"
        text = (
            f"the dropout between the layers of {kind}: {why}; set dropout=0, with nn.Dropout "
            "between recurrent modules of one layer on padded sequences"
        )
        if text not in found:
            found.append(text)

    hooks = [
        module.register_forward_pre_hook(partial(look, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def count_draws_before(
    run: Callable[[Callable[[], None]], object], model: nn.Module
) -> tuple[int, ...]:
    """How many draws of a forward pass come before each of some moments.

    Args:
        run: A forward pass; calls its argument at those moments.
    """
    found: list[int] = []
    recorder = _Recorder()
    with (
        uncompiled(),
        state_restored(model),
        generators_restored(),
        torch.no_grad(),
        recorder,
    ):
        run(lambda: found.append(len(recorder.shapes)))
    return tuple(found)


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Leave a model's buffers and attributes as they were, and parameters that its forward changes.

    A tensor that a module keeps as an attribute (the state of a recurrence) would keep the graph
    of the pass as well, and in it the shapes that parameters had before they were split.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    parameters = _ChangedParameters(model)
    try:
        with parameters:
            yield
    finally:
        for now, before in attributes:
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            parameters.restore()
        for module in model.modules():
            if isinstance(module, DynamicTable):
                module.forget_step()  # rows that a backward pass has touched are its parameter


class _ChangedParameters(TorchDispatchMode):
    """Copies a parameter when it is about to be changed: most never are, and copies of all would
    take as much memory as the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {_memory_of(p): p for p in model.parameters()}
        self._copies: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                key = _memory_of(tensor) if isinstance(tensor, Tensor) else 0
                if key and key in self._watched and key not in self._copies:
                    self._copies[key] = self._watched[key].detach().clone()
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        for key, copy in self._copies.items():
            if not torch.equal(self._watched[key], copy):
                self._watched[key].copy_(copy)


def _memory_of(tensor: Tensor) -> int:
    """Its address; 0 of what has none of its own: parts of a sharded parameter, stand-ins."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the global generators of torch, numpy and random as they were."""
    state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    try:
        yield
    finally:
        torch.set_rng_state(state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class LogicalRandomness(_DrawMode):
    """Draws random numbers by sample while it is active.

    Args:
        positions: For each sample of the micro-batch, its key: position in the epoch.
    """

    def __init__(self, sites: RandomDraws, positions: Sequence[int], epoch: int) -> None:
        super().__init__()
        self._sites = sites
        self._positions = positions
        self._epoch = epoch
        self._met: dict[int, RandomDraw] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, draws are made so; code that the user has compiled runs uncompiled."""
        with uncompiled(), self:
            yield

    def advance(self, number: int) -> None:
        """Skip draws, so that the next one has this number in the whole forward pass."""
        while len(self._met) < number:
            self._meet()

    def _meet(self) -> tuple[int, RandomDraw]:
        """The key and the site of the next draw."""
        # The number of a draw is itself drawn from the global generator: activation checkpointing
        # restores its state before recomputing, and so meets the same keys and the same masks.
        # With the generator named, it is no draw of the model's, should this mode be active.
        number = torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator)
        token = int(number)
        site = self._met.get(token)
        if site is None:
            place = len(self._met)
            known = place < len(self._sites.forward)
            site = self._met[token] = self._sites.forward[place] if known else RandomDraw(0)
        return token, site

    def on_draw(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        device = _device_of(args, keywords)
        token, site = self._meet()
        if not site.draws:
            return func(*args, **keywords)
        # The state is put back, because the numbers of later draws come from the same generator.
        generator = _generator(device)
        state = generator.get_state()
        try:
            return self._draw(func, args, keywords, site, token, generator)
        finally:
            generator.set_state(state)

    def _draw(
        self,
        func: Any,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        site: RandomDraw,
        token: int,
        generator: torch.Generator,
    ) -> Any:
        count = len(self._positions)
        extent = None if site.dim is None else _extent(args, keywords, site.dim)
        # Not along the samples, or not of all of them: drawn as a whole, by a key without a sample.
        if extent is None or extent != count * site.block:
            generator.manual_seed(mix_seeds(token) >> 1)
            return func(*args, **keywords)
        assert site.dim is not None
        parts = []
        for number, position in enumerate(self._positions):
            generator.manual_seed(mix_seeds(token, self._epoch, position) >> 1)
            box = site.dim, number * site.block, site.block, extent
            own = {key: _part(value, *box) for key, value in keywords.items()}
            parts.append(func(*(_part(arg, *box) for arg in args), **own))
        # In place: every part was a view of the first argument.
        if func.__name__.partition(".")[0].endswith("_"):
            return args[0]
        return _joined(parts, site.dim)


def _part(value: Any, dim: int, start: int, length: int, extent: int) -> Any:
    """One sample's part of an argument of a draw; other arguments as they are."""
    if isinstance(value, Tensor):
        if value.ndim > dim and value.shape[dim] == extent:
            return value.narrow(dim, start, length)
    elif _is_size(value) and len(value) > dim and value[dim] == extent:
        return [*value[:dim], length, *value[dim + 1 :]]
    return value


def _joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(group), dim) for group in zip(*parts, strict=True))
    return torch.cat(parts, dim=dim)


def _is_size(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(entry, int) for entry in value)


def _extent(args: tuple[Any, ...], keywords: Mapping[str, Any], dim: int) -> int | None:
    """The length along `dim` of what is drawn: of the first tensor, or of the size asked for."""
    for value in (*args, *keywords.values()):
        shape = value.shape if isinstance(value, Tensor) else value if _is_size(value) else None
        if shape is not None:
            return int(shape[dim]) if len(shape) > dim else None
    return None


def _device_of(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> torch.device:
    for value in args:
        if isinstance(value, Tensor):
            return value.device
    return torch.device(keywords.get("device") or "cpu")


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


class StageRandomness:
    """Contexts in which every stage of a cut model draws what the whole model would."""

    def __init__(
        self, sites: RandomDraws, stages: ModelStages, run_all: Callable[[], object], seed: int
    ) -> None:
        self._sites = sites
        self._seed = seed
        self._batch: RankBatch | None = None
        self._modes: dict[tuple[int, int], LogicalRandomness] = {}
        self._now: LogicalRandomness | None = None
        self._offsets: tuple[int, ...] = ()
        if not sites.forward:
            return

        def run(note: Callable[[], None]) -> None:
            with ExitStack() as stack:
                for stage in stages:
                    stack.enter_context(_before_forward(stage.module, note))
                run_all()

        self._offsets = count_draws_before(run, stages.model)

    def begin(self, batch: RankBatch) -> None:
        """A step begins."""
        self._batch = batch
        self._modes.clear()

    def around(self, stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        """The context of one action; see `headway.parallel.PipelineCallbacks`."""
        if phase == "backward" and not (self._sites.in_backward and self._sites.forward):
            return nullcontext()
        assert self._batch is not None
        if phase != "backward":  # else it finds again what its forward pass has met
            positions = self._batch.micros[microbatch].positions
            mode = LogicalRandomness(self._sites, positions, self._batch.start.epoch)
            self._modes[stage, microbatch] = mode
        return self._drawing(self._modes[stage, microbatch])

    @contextmanager
    def _drawing(self, mode: LogicalRandomness) -> Iterator[None]:
        assert self._batch is not None
        start = self._batch.start
        seed_everything(self._seed, start.epoch, start.position)
        if not self._sites.forward:
            yield
            return
        self._now = mode
        try:
            with mode.active():
                yield
        finally:
            self._now = None

    def entering(self, stage: int) -> None:
        """A stage begins, in one of these contexts: its first draw has the number that it has."""
        if self._now is not None:
            self._now.advance(self._offsets[stage])


@contextmanager
def _before_forward(module: nn.Module, do: Callable[[], None]) -> Iterator[None]:
    """Do something before a module's forward, however it is called (hooks see `module()` only)."""
    forward: Callable[..., Any] = module.forward

    def both(*args: Any, **kwargs: Any) -> Any:
        do()
        return forward(*args, **kwargs)

    module.__dict__["forward"] = both
    try:
        yield
    finally:
        del module.__dict__["forward"]
