"""Captures a model with stacks of equal blocks from four blocks of each stack.

torch.export traces every block anew; 1,000 of them took minutes. Three steps:

1. Find stacks of blocks of equal type, plain attributes and parameter shapes that share nothing
   with other modules.
2. Walk through the forward of the whole model with fake tensors (blocks in the middle are entered,
   not run) and check that few blocks stand for all: called once each, in order, in the same state,
   every one reading what the one before read, or the same tensor one block further.
3. Trace the short model and extend its graph (`graph.repeated_blocks`).

The result is the graph of the whole model, or None: nothing is assumed to be equal unchecked.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from headway.capture.aten_trace import logical_names, quiet, spec_of
from headway.capture.fake_tensors import DataIndependentValues, FakeContext
from headway.capture.operator_recorder import record_graph
from headway.graph.model_graph import ModelGraph
from headway.graph.repeated_blocks import BLOCKS_KEPT, FullModel, RepeatedStack, extend_blocks

MIN_STACK_BLOCKS = 2 * BLOCKS_KEPT
"""Blocks of a stack that is worth it."""
_TABLES = ("_parameters", "_buffers", "_modules")
_USUAL = frozenset(vars(nn.Module())) - {"training"}
"""Of every module; they say nothing where they are empty."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class BlockStack:
    """A stack."""

    holder: nn.Module
    stack: RepeatedStack
    blocks: tuple[nn.Module, ...]

    def inside(self, model: nn.Module) -> BlockStack:
        """The same stack of a copy of the model."""
        holder = model.get_submodule(self.stack.path)
        first = self.stack.first
        blocks = tuple(holder.children())[first : first + self.stack.blocks]
        return BlockStack(holder, self.stack, blocks)


def find_stacks(model: nn.Module) -> tuple[BlockStack, ...]:
    """The outermost stacks, in the order of their names."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    held: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    held += model.named_buffers(remove_duplicate=False)
    uses.update(id(tensor) for _, tensor in held)  # tied tensors count twice
    return tuple(_stacks(model, "", uses))


def _stacks(module: nn.Module, path: str, uses: Counter[int]) -> Iterator[BlockStack]:
    children = list(module.named_children())
    taken: set[int] = set()
    numbered = [name for name, _ in children] == [str(n) for n in range(len(children))]
    if (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and numbered
        and len(children) >= MIN_STACK_BLOCKS
    ):
        blocks = [child for _, child in children]
        signatures = [_own(block, uses) for block in blocks]
        start = 0
        for stop in range(1, len(blocks) + 1):
            if stop < len(blocks) and signatures[stop] == signatures[start]:
                continue
            if stop - start >= MIN_STACK_BLOCKS:
                stack = RepeatedStack(path=path, first=start, blocks=stop - start)
                yield BlockStack(module, stack, tuple(blocks[start:stop]))
                taken.update(range(start, stop))
            start = stop
    for number, (name, child) in enumerate(children):
        if number not in taken:
            yield from _stacks(child, f"{path}.{name}" if path else name, uses)


def _own(block: nn.Module, uses: Counter[int]) -> object:
    """The signature of a block; a new object, equal to none, if a part of it is used elsewhere."""
    inside: list[Any] = [*block.modules(), *block.parameters(), *block.buffers()]
    return object() if any(uses[id(one)] > 1 for one in inside) else module_signature(block)


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that cannot be described apart by what they are made of."""
    return (
        type(module),
        tuple(
            (name, plain(value))
            for name, value in vars(module).items()
            if name not in _TABLES and (value or name not in _USUAL)
        ),
        tuple((name, _parameter_spec(tensor)) for name, tensor in module._parameters.items()),
        tuple((name, _parameter_spec(tensor)) for name, tensor in module._buffers.items()),
        tuple((n, child and module_signature(child)) for n, child in module._modules.items()),
    )


def plain(value: Any) -> Any:
    """A value that can be compared; objects of other kinds are equal to themselves alone."""
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
    return object, id(value)  # nothing is assumed to be equal unchecked


def _parameter_spec(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


@contextmanager
def with_short_stacks(stacks: tuple[BlockStack, ...]) -> Iterator[None]:
    """While it lasts, each stack has its first three blocks and its last one."""
    before = {id(found.holder): (found.holder, dict(found.holder._modules)) for found in stacks}
    gone = {id(block) for found in stacks for block in found.blocks[BLOCKS_KEPT - 1 : -1]}
    try:
        for holder, modules in before.values():
            left = [module for module in modules.values() if id(module) not in gone]
            holder._modules.clear()
            # Containers find their modules by number: the rest is numbered anew.
            holder._modules.update({str(n): module for n, module in enumerate(left)})
        yield
    finally:
        for holder, modules in before.values():
            holder._modules.clear()
            holder._modules.update(modules)


class BlocksDifferError(Exception):
    """The model does not treat its blocks in the same way."""


class TensorOrigin(NamedTuple):
    """Where a tensor comes from: stack (-1: none), block, and what there. Seen from outside of the
    stack its last blocks are -1 and -2."""

    stack: int
    block: int
    key: tuple[Any, ...]


@dataclass
class BlockPeriod:
    """A block's call, and the calls behind it up to the next block."""

    enter: Any
    inside: list[Any] | None
    leave: Any = None
    behind: list[Any] = field(default_factory=list)


class ForwardWalk(TorchFunctionMode):
    """One run.

    Args:
        homes: Of what the model holds and is given, by identity.
    """

    def __init__(
        self,
        stacks: Sequence[Sequence[nn.Module]],
        homes: dict[int, TensorOrigin],
        fakes: FakeContext,
    ) -> None:
        super().__init__()
        self.stacks = stacks
        self.periods: list[list[BlockPeriod]] = [[] for _ in stacks]
        self.order: list[int] = []
        self.between: list[list[Any]] = [[]]
        self._homes = dict(homes)
        self._fakes = fakes
        self._alive: list[Any] = []  # so that identities stay unique
        self._stack = -1  # whose blocks are being called
        self._open = False
        self._given: list[Any] = []
        self._returned: list[tuple[list[Any], Any]] = []

    def run(self, call: Callable[[], Any]) -> None:
        """Run the forward.

        Raises:
            BlocksDifferError: Blocks are not called once each, in order.
            Exception: Whatever the model raises.
        """
        with ExitStack() as stack:
            for number, blocks in enumerate(self.stacks):
                for place, block in enumerate(blocks):
                    stack.enter_context(self._watched(block, number, place))
            stack.enter_context(self._fakes.mode)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(DataIndependentValues())
            stack.enter_context(self)
            result = call()
            self._note(self._describe(result))
        if [len(p) for p in self.periods] != [len(blocks) for blocks in self.stacks]:
            raise BlocksDifferError("not every block is called")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        described = self._describe((args, kwargs))
        result = func(*args, **kwargs)
        line = self._note((func, _state(), described))
        leaves, _ = tree_flatten(result)
        line.append(tuple(self._made(leaf, n) for n, leaf in enumerate(leaves)))
        return result

    def _note(self, what: Any) -> list[Any]:
        line = [what]
        self._into().append(line)
        return line

    def _into(self) -> list[Any]:
        if self._stack < 0:
            return self.between[-1]
        period = self.periods[self._stack][-1]
        if not self._open:
            return period.behind
        assert period.inside is not None
        return period.inside

    def _made(self, leaf: Any, number: int) -> Any:
        """Description of a result, which is at home here if it is new."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._homes:
            into = self._into()
            if self._stack >= 0:
                where = TensorOrigin(self._stack, len(self.periods[self._stack]) - 1, ())
                key: tuple[Any, ...] = ("inside" if self._open else "behind", len(into), number)
            else:
                where, key = (
                    TensorOrigin(-1, 0, ()),
                    ("between", len(self.between), len(into), number),
                )
            self._settle(leaf, where._replace(key=key))
        return _spec(leaf)

    def _settle(self, leaf: Tensor, home: TensorOrigin) -> None:
        self._homes[id(leaf)] = home
        self._alive.append(leaf)

    def _describe(self, tree: Any) -> Any:
        leaves, shape = tree_flatten(tree)
        return tuple(self._home(x) if isinstance(x, Tensor) else x for x in leaves), shape

    def _home(self, leaf: Tensor) -> TensorOrigin:
        found = self._homes.get(id(leaf))
        if found is None:
            found = TensorOrigin(-1, 0, ("held", id(leaf)))
            self._settle(leaf, found)
        if found.stack in (-1, self._stack):
            return found
        # Only the ends exist in the short model, too; seen from outside the last ones count back.
        blocks = len(self.stacks[found.stack])
        ends = {0: 0, blocks - 2: -2, blocks - 1: -1}
        if found.block not in ends:
            raise BlocksDifferError("something in the middle of a stack is used elsewhere")
        return found._replace(block=ends[found.block])

    @contextmanager
    def _watched(self, block: nn.Module, stack: int, place: int) -> Iterator[None]:
        # Not by hooks: of blocks in the middle the forward must not run.
        forward = block.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._called(forward, stack, place, args, kwargs)

        own = vars(block).get("forward")
        block.forward = called
        try:
            yield
        finally:
            del block.forward
            if own is not None:
                block.forward = own

    def _called(
        self, forward: Any, stack: int, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        periods = self.periods[stack]
        begins = self._stack < 0 and place == len(periods) == 0
        if self._open or place != len(periods) or not (begins or stack == self._stack):
            raise BlocksDifferError("blocks are not called in their turn")
        if begins:
            self._stack = stack
            self.order.append(stack)
        last = len(self.stacks[stack]) - 1
        whole = block_is_executed(place, last + 1)
        period = BlockPeriod(None, [] if whole else None)
        periods.append(period)
        self._given = tree_flatten((args, kwargs))[0]
        specs = tuple(_spec(x) for x in self._given if isinstance(x, Tensor))
        period.enter = (_state(), specs, self._describe((args, kwargs)))
        if whole:
            self._open = True
            result = forward(*args, **kwargs)
            self._open = False
        else:
            result = self._fake_result()
        period.leave = self._left(result, place)
        if place == last:
            self._stack = -1
            self.between.append([])
        return result

    def _left(self, result: Any, place: int) -> Any:
        leaves, shape = tree_flatten(result)
        given = {id(x): n for n, x in enumerate(self._given) if isinstance(x, Tensor)}
        described: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                described.append(leaf)
            elif id(leaf) in given:
                described.append(("given", given[id(leaf)]))
            else:
                home = self._homes.get(id(leaf))
                if home is not None and (home.stack, home.block) != (self._stack, place):
                    raise BlocksDifferError("a block returns what others have made")
                self._settle(leaf, TensorOrigin(self._stack, place, ("result", number)))
                described.append(("made", *_spec(leaf)))
        # The second block, because the first may be given tensors of another kind.
        if place == 1:
            self._returned = [(described, shape)]
        return described, shape

    def _fake_result(self) -> Any:
        """What a block returns that is not executed: tensors as those of the second one."""
        described, shape = self._returned[0]
        leaves: list[Any] = []
        for one in described:
            if isinstance(one, tuple) and one[:1] == ("given",):
                leaves.append(self._given[one[1]])
            elif isinstance(one, tuple) and one[:1] == ("made",):
                _, size, stride, dtype, device, grad = one
                with torch._C.DisableTorchFunction():
                    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
                    # Cloned to be no leaf, as torch refuses to change a leaf in place.
                    leaves.append(made.requires_grad_().clone() if grad else made)
            else:
                leaves.append(one)
        return tree_unflatten(leaves, shape)


def block_is_executed(place: int, blocks: int) -> bool:
    """Whether a walk carries out a block, or only enters it: two at each end, powers of two."""
    return place < 2 or place >= blocks - 2 or place & (place - 1) == 0


def _spec(leaf: Tensor) -> tuple[Any, ...]:
    # The walk would note these reads as calls of the model.
    with torch._C.DisableTorchFunction():
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _state() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
    )


def check_blocks_equal(short: ForwardWalk, whole: ForwardWalk) -> None:
    """Whether the walk with `BLOCKS_KEPT` blocks of each stack stands for that with all.

    Raises:
        BlocksDifferError: It does not.
    """
    _equal([short.order, short.between], [whole.order, whole.between])
    for few, all_ in zip(short.periods, whole.periods, strict=True):
        first, one, two = few[:3]
        _equal(_of(first), _of(all_[0]))
        for block, period in [*enumerate(few[1:], 1), *enumerate(all_[1:], 1)]:
            last = block == (BLOCKS_KEPT if period is few[-1] else len(all_)) - 1
            _follows(_of(one), _of(two), _of(period, last=last or period is all_[-1]), block - 1)


def _of(period: BlockPeriod, *, last: bool = False) -> list[Any]:
    """What is compared of a block; behind the last one the stack has ended."""
    return [period.enter, period.inside, period.leave, None if last else period.behind]


def _equal(one: Any, other: Any) -> None:
    _follows(one, one, other, 0)


def _follows(one: Any, two: Any, found: Any, by: int) -> None:
    """Whether something is in a later block what `one` is in the second and `two` in the third.

    None stands for what has not been executed.
    """
    if isinstance(one, TensorOrigin):
        expected = one
        if one != two:
            if not isinstance(two, TensorOrigin) or two != one._replace(block=one.block + 1):
                raise BlocksDifferError(f"one block reads {one}, the next one {two}")
            expected = one._replace(block=one.block + by)
        if found != expected:
            raise BlocksDifferError(f"{expected} was expected, it is {found}")
    elif isinstance(one, list | tuple):
        if isinstance(found, list | tuple) and isinstance(two, list | tuple):
            if not len(one) == len(two) == len(found):
                raise BlocksDifferError(
                    f"{len(one)}, {len(two)} and {len(found)} calls or arguments"
                )
            for parts in zip(one, two, found, strict=True):
                if parts[2] is not None or not isinstance(parts[0], list):
                    _follows(*parts, by)
            return
        raise BlocksDifferError(f"{one} is not {found}")
    elif not (_same(one, two) and _same(one, found)):
        raise BlocksDifferError(f"{one}, {two}, {found}")


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


Called = Callable[..., Any]
"""(fakes, modules that are not executed) -> what is called with the data; it holds the user's
model, of fake tensors, as its `model`."""


def capture_by_blocks(model: nn.Module, example: Any, called_with: Called) -> ModelGraph | None:
    """The graph; None where there are no stacks, or their blocks differ."""
    try:
        stacks = find_stacks(model)
        return _capture_by_blocks(stacks, example, called_with) if stacks else None
    except Exception:  # of the user's code with fewer blocks, too: the whole model will tell
        return None


def _capture_by_blocks(
    stacks: tuple[BlockStack, ...], example: Any, called_with: Called
) -> ModelGraph | None:
    fakes = FakeContext()
    spared = [
        block
        for found in stacks
        for place, block in enumerate(found.blocks)
        if not block_is_executed(place, len(found.blocks))
    ]
    called = called_with(fakes, spared)
    data = (fakes.tree(example),)
    stacks = tuple(found.inside(called.model) for found in stacks)
    before = module_signature(called.model)
    with quiet():
        stacks = _walked(called, stacks, data, fakes)
    # The forward has left something behind in the model: a second trace would not be the first.
    if module_signature(called.model) != before:
        return None
    paths = _paths(called.model)
    with with_short_stacks(stacks):
        short = record_graph(called, data, fakes)
        few = _paths(called.model)
        registered = tuple(_bare(called.named_buffers()))
    parameters = _bare(called.named_parameters())
    return extend_blocks(
        short,
        FullModel(
            stacks=tuple(found.stack for found in stacks),
            # A module with several names has as many here, in the same order.
            paths={name: paths[key].pop(0) for key, names in few.items() for name in names},
            parameters={name: spec_of(tensor) for name, tensor in parameters.items()},
            buffers={name: spec_of(b) for name, b in _bare(called.named_buffers()).items()},
            registered=registered,
            tied=logical_names(called)[1],
            frozen=tuple(name for name, p in parameters.items() if not p.requires_grad),
        ),
    )


def _walked(
    called: Any, stacks: tuple[BlockStack, ...], data: tuple[Any, ...], fakes: FakeContext
) -> tuple[BlockStack, ...]:
    """The stacks in the order in which they are called."""
    names = _bare(called.named_parameters()) | _bare(called.named_buffers())
    walks = []
    # The few blocks first, the whole stacks second: as `check_blocks_equal` takes them.
    for all_ in (False, True):
        blocks = [
            f.blocks if all_ else (*f.blocks[: BLOCKS_KEPT - 1], f.blocks[-1]) for f in stacks
        ]
        walk = ForwardWalk(blocks, _origins(names, blocks, data), fakes)
        with with_short_stacks(() if all_ else stacks):
            walk.run(lambda: called(*data))
        walks.append(walk)
    check_blocks_equal(*walks)
    return tuple(stacks[number] for number in walks[0].order)


def _origins(
    names: dict[str, Tensor], blocks: Iterable[Iterable[nn.Module]], data: tuple[Any, ...]
) -> dict[int, TensorOrigin]:
    found = {id(t): TensorOrigin(-1, 0, ("model", name)) for name, t in names.items()}
    for number, stack in enumerate(blocks):
        for place, block in enumerate(stack):
            inside = [*block.named_parameters(), *block.named_buffers()]
            found |= {id(t): TensorOrigin(number, place, ("block", name)) for name, t in inside}
    leaves = (leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor))
    return found | {id(leaf): TensorOrigin(-1, 0, ("given", n)) for n, leaf in enumerate(leaves)}


def _bare(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By logical name: those of the user's model without the name that it has here."""
    return {name.removeprefix("model."): tensor for name, tensor in named}


def _paths(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(name)
    return found
