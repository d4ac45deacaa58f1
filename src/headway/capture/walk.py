"""A model's forward as a list of calls, and whether few blocks of a stack stand for all of them.

A walk runs the model with stand-ins and notes every call of torch outside of the blocks and inside
of those at both ends, with what each argument is: which result of which call, or what the model
holds. The other blocks are only entered: they return what the second one returned. Invariant of
`check_alike`: the blocks are called once each, in order and in the same state, every one reads what
the one before read (the same tensor, or that of one block further), and what runs before, between
and behind them is the same with few blocks as with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.capture.fake import Pretence
from headway.capture.known import Known
from headway.graph.extend import KEPT


class DiffersError(Exception):
    """The model does not treat its blocks alike."""


class Home(NamedTuple):
    """Where a tensor comes from: stack (-1: none), block, and what there. Seen from outside of the
    stack its last blocks are -1 and -2."""

    stack: int
    block: int
    key: tuple[Any, ...]


@dataclass
class Period:
    """A block's call, and the calls behind it up to the next block.

    Attributes:
        enter: State and arguments.
        inside: Calls in it, if it was carried out.
        leave: Results.
        behind: Calls up to the next block.
    """

    enter: Any
    inside: list[Any] | None
    leave: Any = None
    behind: list[Any] = field(default_factory=list)


class Walk(TorchFunctionMode):
    """One run.

    Args:
        stacks: The blocks of each stack.
        homes: Of what the model holds and is given, by identity.
        pretence: The world of the stand-ins.
    """

    def __init__(
        self, stacks: Sequence[Sequence[nn.Module]], homes: dict[int, Home], pretence: Pretence
    ) -> None:
        super().__init__()
        self.stacks = stacks
        self.periods: list[list[Period]] = [[] for _ in stacks]
        self.order: list[int] = []
        self.between: list[list[Any]] = [[]]
        self._homes = dict(homes)
        self._pretence = pretence
        self._alive: list[Any] = []  # so that identities stay unique
        self._stack = -1  # whose blocks are being called
        self._open = False
        self._given: list[Any] = []
        self._returned: list[tuple[list[Any], Any]] = []

    def run(self, call: Callable[[], Any]) -> None:
        """Carry it out.

        Raises:
            DiffersError: Blocks are not called once each, in order.
            Exception: Whatever the model raises.
        """
        with ExitStack() as stack:
            for number, blocks in enumerate(self.stacks):
                for place, block in enumerate(blocks):
                    stack.enter_context(self._watched(block, number, place))
            stack.enter_context(self._pretence.mode)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(Known())
            stack.enter_context(self)
            result = call()
            self._note(self._told(result))
        if [len(p) for p in self.periods] != [len(blocks) for blocks in self.stacks]:
            raise DiffersError("not every block is called")

    # -- calls of torch ------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        told = self._told((args, kwargs))
        result = func(*args, **kwargs)
        line = self._note((func, _state(), told))
        leaves, _ = tree_flatten(result)
        line.append(tuple(self._made(leaf, n) for n, leaf in enumerate(leaves)))
        return result

    def _note(self, what: Any) -> list[Any]:
        line = [what]
        self._into().append(line)
        return line

    def _into(self) -> list[Any]:
        """Where calls are noted."""
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
                where = Home(self._stack, len(self.periods[self._stack]) - 1, ())
                key: tuple[Any, ...] = ("inside" if self._open else "behind", len(into), number)
            else:
                where, key = Home(-1, 0, ()), ("between", len(self.between), len(into), number)
            self._settle(leaf, where._replace(key=key))
        return _spec(leaf)

    def _settle(self, leaf: Tensor, home: Home) -> None:
        self._homes[id(leaf)] = home
        self._alive.append(leaf)

    def _told(self, tree: Any) -> Any:
        """Arguments as data."""
        leaves, shape = tree_flatten(tree)
        return tuple(self._home(x) if isinstance(x, Tensor) else x for x in leaves), shape

    def _home(self, leaf: Tensor) -> Home:
        found = self._homes.get(id(leaf))
        if found is None:
            found = Home(-1, 0, ("held", id(leaf)))
            self._settle(leaf, found)
        if found.stack in (-1, self._stack):
            return found
        blocks = len(self.stacks[found.stack])
        ends = {0: 0, blocks - 2: -2, blocks - 1: -1}
        if found.block not in ends:
            raise DiffersError("something in the middle of a stack is used elsewhere")
        return found._replace(block=ends[found.block])

    # -- blocks --------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, block: nn.Module, stack: int, place: int) -> Iterator[None]:
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
            raise DiffersError("blocks are not called in their turn")
        if begins:
            self._stack = stack
            self.order.append(stack)
        last = len(self.stacks[stack]) - 1
        whole = carried_out(place, last + 1)
        period = Period(None, [] if whole else None)
        periods.append(period)
        self._given = tree_flatten((args, kwargs))[0]
        specs = tuple(_spec(x) for x in self._given if isinstance(x, Tensor))
        period.enter = (_state(), specs, self._told((args, kwargs)))
        if whole:
            self._open = True
            result = forward(*args, **kwargs)
            self._open = False
        else:
            result = self._stand_in()
        period.leave = self._left(result, place)
        if place == last:
            self._stack = -1
            self.between.append([])
        return result

    def _left(self, result: Any, place: int) -> Any:
        """Description of what a block returns."""
        leaves, shape = tree_flatten(result)
        given = {id(x): n for n, x in enumerate(self._given) if isinstance(x, Tensor)}
        told: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                told.append(leaf)
            elif id(leaf) in given:
                told.append(("given", given[id(leaf)]))
            else:
                home = self._homes.get(id(leaf))
                if home is not None and (home.stack, home.block) != (self._stack, place):
                    raise DiffersError("a block returns what others have made")
                self._settle(leaf, Home(self._stack, place, ("result", number)))
                told.append(("made", *_spec(leaf)))
        if place == 1:
            self._returned = [(told, shape)]
        return told, shape

    def _stand_in(self) -> Any:
        """What a block returns that is not carried out: tensors as those of the second one."""
        told, shape = self._returned[0]
        leaves: list[Any] = []
        for one in told:
            if isinstance(one, tuple) and one[:1] == ("given",):
                leaves.append(self._given[one[1]])
            elif isinstance(one, tuple) and one[:1] == ("made",):
                _, size, stride, dtype, device, grad = one
                with torch._C.DisableTorchFunction():
                    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
                    leaves.append(made.requires_grad_().clone() if grad else made)
            else:
                leaves.append(one)
        return tree_unflatten(leaves, shape)


def carried_out(place: int, blocks: int) -> bool:
    """Whether a walk carries out a block, or only enters it: two at each end, powers of two."""
    return place < 2 or place >= blocks - 2 or place & (place - 1) == 0


def _spec(leaf: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _state() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
    )


def check_alike(short: Walk, whole: Walk) -> None:
    """Whether the walk with `KEPT` blocks of each stack stands for that with all.

    Raises:
        DiffersError: It does not.
    """
    _equal([short.order, short.between], [whole.order, whole.between])
    for few, all_ in zip(short.periods, whole.periods, strict=True):
        first, one, two = few[:3]
        _equal(_of(first), _of(all_[0]))
        for block, period in [*enumerate(few[1:], 1), *enumerate(all_[1:], 1)]:
            last = block == (KEPT if period is few[-1] else len(all_)) - 1
            _follows(_of(one), _of(two), _of(period, last=last or period is all_[-1]), block - 1)


def _of(period: Period, *, last: bool = False) -> list[Any]:
    """What is compared of a block; behind the last one the stack has ended."""
    return [period.enter, period.inside, period.leave, None if last else period.behind]


def _equal(one: Any, other: Any) -> None:
    _follows(one, one, other, 0)


def _follows(one: Any, two: Any, found: Any, by: int) -> None:
    """Whether something is in a later block what `one` is in the second and `two` in the third.

    None stands for what has not been carried out.
    """
    if isinstance(one, Home):
        expected = one
        if one != two:
            if not isinstance(two, Home) or two != one._replace(block=one.block + 1):
                raise DiffersError(f"one block reads {one}, the next one {two}")
            expected = one._replace(block=one.block + by)
        if found != expected:
            raise DiffersError(f"{expected} was expected, it is {found}")
    elif isinstance(one, list | tuple):
        if isinstance(found, list | tuple) and isinstance(two, list | tuple):
            if not len(one) == len(two) == len(found):
                raise DiffersError(f"{len(one)}, {len(two)} and {len(found)} calls or arguments")
            for parts in zip(one, two, found, strict=True):
                if parts[2] is not None or not isinstance(parts[0], list):
                    _follows(*parts, by)
            return
        raise DiffersError(f"{one} is not {found}")
    elif not (_same(one, two) and _same(one, found)):
        raise DiffersError(f"{one}, {two}, {found}")


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
