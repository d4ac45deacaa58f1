"""Point-to-point messages between two stages: activations forward, gradients back.

`LocalStageLink` joins two stages of one rank, `RemoteStageLink` is one end of a link between
two ranks. Every micro-batch and direction of an edge has a tag of its own, so that neither end
depends on order.

A message is one dense tensor after the other; memory order (channels-last, say) is kept, so the
receiving stage computes with the strides of the serial run. The first message of its kind is
preceded by its `MessageFormat`; from then on both ends know it, receives are posted ahead and
only payload travels. The kind is a key that every rank computes by itself from the shapes of
the micro-batch, the model's mode and which parameters are trained (`MicrobatchKeys`). Two ranks
of one machine may share memory; then values are used where they lie.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.channel.stream import TensorStream
from headway.channel.typed_text import (
    MOST_BYTES,
    read_typed,
    write_typed,
)
from headway.errors import RunError
from headway.parallel.stages import TreeSpec, flatten, is_payload

# More than any machine has; sizes whose product overflows would not even be refused by torch.
_MOST_TENSOR_BYTES = 1 << 44


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """One tensor.

    Attributes:
        shape: In memory order: the last dimension is dense.
        order: Dimensions of the tensor in memory order; empty: as they are.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    flows: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorFormat:
        order: tuple[int, ...] = () if tensor.is_contiguous() else _memory_order(tensor)
        shape = tuple(tensor.shape)
        if order:
            shape = tuple(shape[dim] for dim in order)
        return TensorFormat(shape, order, tensor.dtype, tensor.requires_grad)

    def dense(self, tensor: Tensor) -> Tensor:
        """A tensor of this form as it goes over the wire."""
        return (tensor.permute(self.order) if self.order else tensor).contiguous()

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def possible(self) -> bool:
        """Whether a tensor can have this form; one of another rank may have any attributes."""
        sizes = self.shape if isinstance(self.shape, tuple) else (None,)
        order = self.order if isinstance(self.order, tuple) else (None,)
        return (
            all(type(size) is int and size >= 0 for size in sizes)
            and isinstance(self.dtype, torch.dtype)
            and isinstance(self.flows, bool)
            and math.prod(sizes) * self.dtype.itemsize < _MOST_TENSOR_BYTES
            and (not order or sorted(order, key=str) == sorted(range(len(sizes)), key=str))
        )

    def back(self, dense: Tensor) -> Tensor:
        """The tensor of a buffer."""
        if not self.order:
            return dense
        return dense.permute([self.order.index(dim) for dim in range(len(self.order))])


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the densest, where that makes it dense; else empty."""
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """A message: the values of one edge for one micro-batch.

    Attributes:
        forms: Of its tensors, in order; None stands for a number.
    """

    structure: TreeSpec
    forms: tuple[TensorFormat | None, ...]
    kinds: tuple[type, ...]

    @staticmethod
    def of(values: Sequence[Any]) -> tuple[MessageFormat, list[Any]]:
        """The layout of values, and their leaves."""
        leaves, structure = flatten(list(values), is_payload)
        forms = tuple(
            TensorFormat.of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves
        )
        kinds = tuple(type(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        return MessageFormat(structure, forms, kinds), leaves

    @property
    def possible(self) -> bool:
        """Whether messages can have this form; one of another rank may have any attributes."""
        whole: tuple[Any, ...] = (self.forms, self.kinds, self.structure)
        if not all(map(isinstance, whole, (tuple, tuple, TreeSpec))):
            return False
        tensors: list[Any] = [form for form in self.forms if form is not None]
        numbers = len(self.forms) - len(tensors)
        return (
            all(isinstance(form, TensorFormat) and form.possible for form in tensors)
            and len(self.kinds) == numbers
            and all(kind in (int, float) for kind in self.kinds)
            and self.structure.possible
            and self.structure.leaves == len(self.forms)
        )

    def fits(self, other: MessageFormat, *, flows: bool) -> bool:
        """Whether a message of the other layout can go by this one.

        Args:
            flows: Look also at which gradients come back.
        """
        if flows or self == other:
            return self == other
        forms = tuple(None if f is None else replace(f, flows=False) for f in self.forms)
        return replace(self, forms=forms) == other

    def flowing(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Of the leaves those whose gradients come back."""
        return [leaf for f, leaf in zip(self.forms, leaves, strict=True) if f and f.flows]

    @property
    def flowing_forms(self) -> tuple[TensorFormat, ...]:
        """Of the gradients that come back."""
        return tuple(f for f in self.forms if f is not None and f.flows)

    def pack(self, leaves: Sequence[Any]) -> list[Tensor]:
        """What goes over the wire."""
        found = [
            form.dense(leaf.detach())
            for form, leaf in zip(self.forms, leaves, strict=True)
            if form is not None
        ]
        numbers = [n for form, n in zip(self.forms, leaves, strict=True) if form is None]
        if numbers:
            found.append(_encode(numbers))
        return found

    @property
    def packed(self) -> list[TensorFormat]:
        """Of what `pack` returns at the other end."""
        found = [form for form in self.forms if form is not None]
        if self.kinds:
            found.append(TensorFormat((2 * len(self.kinds),), (), torch.int64, flows=False))
        return found

    def unpack(self, buffers: Sequence[Tensor]) -> list[Any]:
        """The leaves, from filled buffers."""
        tensors = iter(buffers)
        leaves: list[Any] = [form and form.back(next(tensors)) for form in self.forms]
        if self.kinds:
            numbers = iter(_decode(next(tensors), self.kinds))
            leaves = [next(numbers) if leaf is None else leaf for leaf in leaves]
        return leaves


def _encode(numbers: Sequence[int | float]) -> Tensor:
    """Integers as they are, in the first half; the bits of floats in the second."""
    # A float64 alone would round integers above 2**53.
    whole = torch.tensor([n if isinstance(n, int) else 0 for n in numbers], dtype=torch.int64)
    exact = torch.tensor([n if isinstance(n, float) else 0.0 for n in numbers], dtype=torch.float64)
    return torch.cat((whole, exact.view(torch.int64)))


def _decode(buffer: Tensor, kinds: Sequence[type]) -> list[int | float]:
    count = len(kinds)
    whole, exact = buffer[:count].tolist(), buffer[count:].view(torch.float64).tolist()
    return [n if kind is int else x for kind, n, x in zip(kinds, whole, exact, strict=True)]


# The way of values between two stages of a pipe, and of their gradients back.


class StageLink(ABC):
    """One edge of one pipe, at one or both of its ends.

    Args:
        name: "d0: stage 1 to stage 2".
        keys: For each micro-batch of the step, what its layouts depend on; shared by all links and
            equal on all ranks.
    """

    def __init__(self, name: str, keys: Sequence[Hashable]) -> None:
        self._name = name
        self._keys = keys
        self._layouts: dict[Hashable, MessageFormat] = {}

    @abstractmethod
    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        """At the earlier stage: hand over values; returns those whose gradients will come."""

    @abstractmethod
    def take(self, microbatch: int) -> tuple[MessageFormat, list[Any]]:
        """At the later stage: the layout and the leaves of what was given."""

    @abstractmethod
    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """At the later stage: hand back gradients, of the leaves that flow."""

    @abstractmethod
    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        """At the earlier stage: the gradients, in the order of what `give` returned."""

    def again(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        """What `give` returned, of values that have been computed again."""
        return self._layouts[self._keys[microbatch]].flowing(MessageFormat.of(values)[1])

    def knows(self, microbatch: int) -> bool:
        """Whether a message of this kind has been given before."""
        return self._keys[microbatch] in self._layouts

    def size(self, *, gradients: bool) -> int:
        """Bytes of the newest kind of message, or of the gradients that come back for it."""
        if self.newest is None:
            return 0
        forms = self.newest.flowing_forms if gradients else self.newest.forms
        return sum(math.prod(f.shape) * f.dtype.itemsize for f in forms if f is not None)

    @property
    def newest(self) -> MessageFormat | None:
        """Of the newest kind of message; None: there has been none."""
        return next(reversed(self._layouts.values()), None)

    def forget(self, keys: Sequence[Hashable]) -> None:
        """Keys that will not come again."""
        for key in keys:
            self._layouts.pop(key, None)

    def _look(
        self, microbatch: int, values: Sequence[Any]
    ) -> tuple[MessageFormat, list[Any], bool]:
        """The layout that both ends use, the leaves, and whether it is new.

        Raises:
            RunError: The layout is another than before for a micro-batch of the same sizes.
        """
        layout, leaves = MessageFormat.of(values)
        key = self._keys[microbatch]
        known = self._layouts.setdefault(key, layout)
        # The first forward of a recomputed stage runs without a graph, where nothing requires
        # gradients.
        if known is not layout and not known.fits(layout, flows=torch.is_grad_enabled()):
            raise RunError(
                f"what goes over {self._name} has changed for a micro-batch of the same sizes",
                why=f"It was {known} and is {layout}.",
                fix="Sizes between stages may depend on the sizes of the batch only, not on its "
                "numbers; cut the model elsewhere.",
            )
        return known, leaves, known is layout


class LocalStageLink(StageLink):
    """Between two stages of this rank."""

    def __init__(self, name: str, keys: Sequence[Hashable]) -> None:
        super().__init__(name, keys)
        self._values: dict[int, tuple[MessageFormat, list[Any]]] = {}
        self._gradients: dict[int, Sequence[Tensor]] = {}

    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        layout, leaves, _ = self._look(microbatch, values)
        # Not copied: what a stage changes in place is as forbidden, or allowed, as in the model.
        passed = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._values[microbatch] = layout, passed
        return layout.flowing(leaves)

    def take(self, microbatch: int) -> tuple[MessageFormat, list[Any]]:
        return self._values.pop(microbatch)

    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        self._gradients[microbatch] = gradients

    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        return self._gradients.pop(microbatch)


PendingTransfers = list[tuple[dist.Work, Tensor]]
"""What is under way, with the tensors that must stay as they are until then."""
PendingReceive = Callable[[], list[Tensor]]
"""A message that is expected: waits for it."""


class StageConnection:
    """Messages to and from one other rank.

    Args:
        group: That both belong to; None: the default group.
        peer: The global rank of the other.
        own: Objects of which each end has its own in place of the other's, in the same order.
        stream: For values and gradients; None: they go over the group, as all announcements do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        device: torch.device,
        own: Sequence[Any] = (),
        stream: TensorStream | None = None,
    ) -> None:
        self.device = device
        self._group = group
        self._peer = peer
        self._own = own
        self._stream = stream

    def send(self, tensors: Sequence[Tensor], tag: int) -> PendingTransfers:
        """Start to send."""
        if self._stream is not None:
            # The stream copies: nothing has to be kept until it has left.
            self._stream.put(tag, tensors)
            return []
        return self._start(dist.isend, tensors, tag)

    def expect(self, forms: Sequence[TensorFormat], tag: int) -> PendingReceive:
        """Start to receive."""
        if self._stream is not None:
            return partial(self._stream.take, tag, [(f.shape, f.dtype) for f in forms])
        buffers = [form.empty(self.device) for form in forms]
        coming = self._start(dist.irecv, buffers, tag)

        def come() -> list[Tensor]:
            wait_for_transfers(coming)
            return buffers

        return come

    def _start(
        self, operation: Callable[..., dist.Work | None], tensors: Sequence[Tensor], tag: int
    ) -> PendingTransfers:
        found = []
        for tensor in tensors:
            if tensor.numel():  # both ends leave out the same ones
                work = operation(tensor, self._peer, self._group, tag)
                assert work is not None  # this rank belongs to the group
                found.append((work, tensor))
        return found

    def announce(self, thing: MessageFormat, tag: int) -> PendingTransfers:
        """Send the form of the messages that follow."""
        text = torch.frombuffer(bytearray(self.written(thing)), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        # NCCL sends tensors of its own device only.
        return self._start(dist.isend, [size.to(self.device), text.to(self.device)], tag)

    def hear(self, tag: int) -> Any:
        """Wait for what the other end announces.

        Raises:
            RunError: It announces nothing that may go between stages.
        """
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        wait_for_transfers(self._start(dist.irecv, [size], tag))
        if not 0 < int(size) <= MOST_BYTES:
            raise RunError(
                f"rank {self._peer} announces a message of {int(size)} bytes",
                why=f"An announcement has at most {MOST_BYTES}.",
                fix="All ranks run the same versions of headway and torch.",
            )
        text = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        wait_for_transfers(self._start(dist.irecv, [text], tag))
        return self.read(text.cpu().numpy().tobytes())

    def written(self, thing: MessageFormat) -> bytes:
        """What is announced, with numbers in the place of what each end has of its own."""
        return write_typed(thing, self._own)

    def read(self, text: bytes) -> MessageFormat:
        """The inverse of `written`, at the other end."""
        found = read_typed(text, self._own)
        if not (isinstance(found, MessageFormat) and found.possible):
            raise RunError(
                f"rank {self._peer} announces no message between stages",
                why=f"{found!r}"[:200],
                fix="All ranks run the same versions of headway and torch.",
            )
        return found


class RemoteStageLink(StageLink):
    """One end of an edge whose other end is on another rank.

    Args:
        tag: Of the first micro-batch; each takes two, one for either direction.
    """

    def __init__(
        self, name: str, keys: Sequence[Hashable], wire: StageConnection, tag: int
    ) -> None:
        super().__init__(name, keys)
        self._wire = wire
        self._tag = tag
        self._leaving: dict[int, tuple[MessageFormat | None, list[Tensor]]] = {}
        self._posted: dict[int, PendingReceive] = {}
        self._arrived: dict[int, list[Tensor]] = {}

    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        layout, leaves, new = self._look(microbatch, values)
        self._leaving[microbatch] = layout if new else None, layout.pack(leaves)
        return layout.flowing(leaves)

    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        forms = self._layouts[self._keys[microbatch]].flowing_forms
        return [f.back(b) for f, b in zip(forms, self._arrived.pop(microbatch), strict=True)]

    def take(self, microbatch: int) -> tuple[MessageFormat, list[Any]]:
        layout = self._layouts[self._keys[microbatch]]
        return layout, layout.unpack(self._arrived.pop(microbatch))

    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        forms = self._layouts[self._keys[microbatch]].flowing_forms
        dense = [form.dense(g) for form, g in zip(forms, gradients, strict=True)]
        self._leaving[microbatch] = None, dense

    def send(self, microbatch: int, *, gradients: bool) -> PendingTransfers:
        """Let go what has been given, or given back."""
        news, tensors = self._leaving.pop(microbatch)
        # Each direction of a micro-batch has a tag of its own: even ones forward, odd ones back.
        tag = self._tag + 2 * microbatch + gradients
        sent = [] if news is None else self._wire.announce(news, tag)
        return sent + self._wire.send(tensors, tag)

    def post(self, microbatch: int, *, gradients: bool) -> None:
        """Be ready for the values, or the gradients, if it is known by now what they are."""
        layout = self._layouts.get(self._keys[microbatch])
        # `receive` comes here for what no POST has made ready.
        if layout is not None and microbatch not in self._posted:
            forms = layout.flowing_forms if gradients else layout.packed
            self._posted[microbatch] = self._wire.expect(
                forms, self._tag + 2 * microbatch + gradients
            )

    def receive(self, microbatch: int, *, gradients: bool) -> None:
        """Wait for the values, or the gradients."""
        if not self.knows(microbatch):
            layout = self._wire.hear(self._tag + 2 * microbatch)
            self._layouts[self._keys[microbatch]] = layout
        self.post(microbatch, gradients=gradients)
        self._arrived[microbatch] = self._posted.pop(microbatch)()


def wait_for_transfers(pending: PendingTransfers) -> None:
    """Wait until messages have left or come; the tensors may then be used for something else."""
    for work, _ in pending:
        work.wait()


# What the sizes of messages between stages depend on, known to every rank without asking.


_PLAIN = (int, float, complex, str, bytes, type(None))


class MicrobatchKeys:
    """Makes keys that are equal on all ranks.

    Attributes:
        unseen: Keys of the last step that will not come again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers = itertools.count()
        self.unseen: list[Hashable] = []

    def of(self, microbatches: Sequence[Any]) -> list[Hashable]:
        """A key for each micro-batch of a step."""
        # What decides which tensors between stages have gradients.
        state = (
            self._model.training,
            torch.is_grad_enabled(),
            tuple(p.requires_grad for p in self._model.parameters()),
        )
        self.unseen = []
        common = hash(state)
        return [self._key(common, data) for data in microbatches]

    def _key(self, common: int, data: Any) -> Hashable:
        leaves, _ = flatten(data, lambda _: True)
        if any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            # An object of the user's may hold tensors of any size: its key never comes again.
            self.unseen.append((common, next(self._numbers)))
            return self.unseen[-1]
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        return common, tuple(shapes)
