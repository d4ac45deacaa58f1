"""The way of values between two stages of a pipe, and of their gradients back.

`LocalLink` joins two stages of one rank, `RemoteLink` is one end of a link between two ranks. On
the wire every micro-batch and direction of an edge has a tag of its own, so that neither end needs
to care about order. The first message of its kind (same sizes of the micro-batch, same mode) is
preceded by its layout; from then on both ends know it, and receives are posted ahead. Two ranks of
one machine may have a stream: then values are used where they lie in memory that both share.
"""

from __future__ import annotations

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel import Stream
from headway.errors import RunError
from headway.parallel.layout import Form, Layout


class Link(ABC):
    """One edge of one pipe, at one or both of its ends.

    Args:
        name: "d0: stage 1 to stage 2".
        keys: For each micro-batch of the step, what its layouts depend on; shared by all links and
            equal on all ranks.
    """

    def __init__(self, name: str, keys: Sequence[Hashable]) -> None:
        self._name = name
        self._keys = keys
        self._layouts: dict[Hashable, Layout] = {}

    @abstractmethod
    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        """At the earlier stage: hand over values; returns those whose gradients will come."""

    @abstractmethod
    def take(self, microbatch: int) -> tuple[Layout, list[Any]]:
        """At the later stage: the layout and the leaves of what was given."""

    @abstractmethod
    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """At the later stage: hand back gradients, of the leaves that flow."""

    @abstractmethod
    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        """At the earlier stage: the gradients, in the order of what `give` returned."""

    def again(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        """What `give` returned, of values that have been computed again."""
        return self._layouts[self._keys[microbatch]].flowing(Layout.of(values)[1])

    def knows(self, microbatch: int) -> bool:
        """Whether a message of this kind has been given before."""
        return self._keys[microbatch] in self._layouts

    @property
    def bytes(self) -> int:
        """Of the payload of the newest kind of message, one way."""
        return self.size(gradients=False)

    def size(self, *, gradients: bool) -> int:
        """Bytes of the newest kind of message, or of the gradients that come back for it."""
        if self.newest is None:
            return 0
        return self.newest.flowing_bytes if gradients else self.newest.bytes

    @property
    def newest(self) -> Layout | None:
        """Of the newest kind of message; None: there has been none."""
        return next(reversed(self._layouts.values()), None)

    def forget(self, keys: Sequence[Hashable]) -> None:
        """Keys that will not come again."""
        for key in keys:
            self._layouts.pop(key, None)

    def _look(self, microbatch: int, values: Sequence[Any]) -> tuple[Layout, list[Any], bool]:
        """The layout that both ends use, the leaves, and whether it is new.

        Raises:
            RunError: The layout is another than before for a micro-batch of the same sizes.
        """
        layout, leaves = Layout.of(values)
        key = self._keys[microbatch]
        known = self._layouts.setdefault(key, layout)
        if known is not layout and not known.fits(layout, flows=torch.is_grad_enabled()):
            raise RunError(
                f"what goes over {self._name} has changed for a micro-batch of the same sizes",
                why=f"It was {known} and is {layout}.",
                fix="Sizes between stages may depend on the sizes of the batch only, not on its "
                "numbers; cut the model elsewhere.",
            )
        return known, leaves, known is layout


class LocalLink(Link):
    """Between two stages of this rank.

    Args:
        name: As of `Link`.
        keys: As of `Link`.
    """

    def __init__(self, name: str, keys: Sequence[Hashable]) -> None:
        super().__init__(name, keys)
        self._values: dict[int, tuple[Layout, list[Any]]] = {}
        self._gradients: dict[int, Sequence[Tensor]] = {}

    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        layout, leaves, _ = self._look(microbatch, values)
        # Not copied: what a stage changes in place is as forbidden, or allowed, as in the model.
        passed = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._values[microbatch] = layout, passed
        return layout.flowing(leaves)

    def take(self, microbatch: int) -> tuple[Layout, list[Any]]:
        return self._values.pop(microbatch)

    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        self._gradients[microbatch] = gradients

    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        return self._gradients.pop(microbatch)


Sent = list[tuple[dist.Work, Tensor]]
"""What is under way, with the tensors that must stay as they are until then."""
Coming = Callable[[], list[Tensor]]
"""A message that is expected: waits for it."""


class Wire:
    """Messages to and from one other rank.

    Args:
        group: That both belong to; None: the default group.
        peer: The global rank of the other.
        device: Of what arrives.
        own: Objects of which each end has its own in place of the other's, in the same order.
        stream: For values and gradients; None: they go over the group, as all announcements do.

    Attributes:
        device: As given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        device: torch.device,
        own: Sequence[Any] = (),
        stream: Stream | None = None,
    ) -> None:
        self.device = device
        self._group = group
        self._peer = peer
        self._own = own
        self._stream = stream

    def send(self, tensors: Sequence[Tensor], tag: int) -> Sent:
        """Start to send."""
        if self._stream is not None:
            self._stream.put(tag, tensors)
            return []
        return self._start(tensors, tag)

    def expect(self, forms: Sequence[Form], tag: int) -> Coming:
        """Start to receive."""
        if self._stream is not None:
            return partial(self._stream.take, tag, [(f.shape, f.dtype) for f in forms])
        buffers = [form.empty(self.device) for form in forms]
        works = self._post(buffers, tag)

        def come() -> list[Tensor]:
            _wait(works)
            return buffers

        return come

    def _start(self, tensors: Sequence[Tensor], tag: int) -> Sent:
        return [
            (_started(dist.isend(t, self._peer, self._group, tag)), t) for t in tensors if t.numel()
        ]

    def _post(self, buffers: Sequence[Tensor], tag: int) -> list[dist.Work]:
        return [_started(dist.irecv(b, self._peer, self._group, tag)) for b in buffers if b.numel()]

    def announce(self, thing: Any, tag: int) -> Sent:
        """Send a plain value of unknown size."""
        text = torch.frombuffer(bytearray(self.written(thing)), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        return self._start([size.to(self.device), text.to(self.device)], tag)

    def hear(self, tag: int) -> Any:
        """Wait for what the other end announces."""
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        _wait(self._post([size], tag))
        text = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        _wait(self._post([text], tag))
        return self.read(text.cpu().numpy().tobytes())

    def written(self, thing: Any) -> bytes:
        """What is announced, with numbers in the place of what each end has of its own."""
        found = io.BytesIO()
        pickler = pickle.Pickler(found)
        places = {id(one): number for number, one in enumerate(self._own)}
        pickler.persistent_id = lambda one: places.get(id(one))  # type: ignore[method-assign]
        pickler.dump(thing)
        return found.getvalue()

    def read(self, text: bytes) -> Any:
        """The inverse of `written`, at the other end."""
        unpickler = pickle.Unpickler(io.BytesIO(text))
        unpickler.persistent_load = self._own.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class RemoteLink(Link):
    """One end of an edge whose other end is on another rank.

    Args:
        name: As of `Link`.
        keys: As of `Link`.
        wire: To that rank.
        tag: Of the first micro-batch; each takes two, one for either direction.
    """

    def __init__(self, name: str, keys: Sequence[Hashable], wire: Wire, tag: int) -> None:
        super().__init__(name, keys)
        self._wire = wire
        self._tag = tag
        self._leaving: dict[int, tuple[Layout | None, list[Tensor]]] = {}
        self._posted: dict[int, Coming] = {}
        self._arrived: dict[int, list[Tensor]] = {}

    # -- the earlier stage -------------------------------------------------------------------

    def give(self, microbatch: int, values: Sequence[Any]) -> list[Tensor]:
        layout, leaves, new = self._look(microbatch, values)
        self._leaving[microbatch] = layout if new else None, layout.pack(leaves)
        return layout.flowing(leaves)

    def send(self, microbatch: int) -> Sent:
        """Let go what has been given."""
        news, tensors = self._leaving.pop(microbatch)
        tag = self._tag + 2 * microbatch
        sent = [] if news is None else self._wire.announce(news, tag)
        return sent + self._wire.send(tensors, tag)

    def post_back(self, microbatch: int) -> None:
        """Be ready for the gradients, if it is known by now what they are."""
        layout = self._layouts.get(self._keys[microbatch])
        if layout is not None and microbatch not in self._posted:
            forms = [form for form in layout.forms if form and form.flows]
            self._posted[microbatch] = self._wire.expect(forms, self._tag + 2 * microbatch + 1)

    def receive_back(self, microbatch: int) -> None:
        """Wait for the gradients."""
        self.post_back(microbatch)
        self._arrived[microbatch] = self._posted.pop(microbatch)()

    def take_back(self, microbatch: int) -> Sequence[Tensor]:
        forms = [f for f in self._layouts[self._keys[microbatch]].forms if f and f.flows]
        return [f.back(b) for f, b in zip(forms, self._arrived.pop(microbatch), strict=True)]

    # -- the later stage ---------------------------------------------------------------------

    def post(self, microbatch: int) -> None:
        """Be ready for the values, if it is known by now what they are."""
        layout = self._layouts.get(self._keys[microbatch])
        if layout is not None and microbatch not in self._posted:
            self._posted[microbatch] = self._wire.expect(layout.packed, self._tag + 2 * microbatch)

    def receive(self, microbatch: int) -> None:
        """Wait for the values."""
        if microbatch not in self._posted:
            if not self.knows(microbatch):
                layout = self._wire.hear(self._tag + 2 * microbatch)
                self._layouts[self._keys[microbatch]] = layout
            self.post(microbatch)
        self._arrived[microbatch] = self._posted.pop(microbatch)()

    def take(self, microbatch: int) -> tuple[Layout, list[Any]]:
        layout = self._layouts[self._keys[microbatch]]
        return layout, layout.unpack(self._arrived.pop(microbatch))

    def give_back(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        forms = [f for f in self._layouts[self._keys[microbatch]].forms if f and f.flows]
        dense = [form.dense(g) for form, g in zip(forms, gradients, strict=True)]
        self._leaving[microbatch] = None, dense

    def send_back(self, microbatch: int) -> Sent:
        """Let go the gradients that have been given back."""
        _, tensors = self._leaving.pop(microbatch)
        return self._wire.send(tensors, self._tag + 2 * microbatch + 1)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def let_go(sent: Sent) -> None:
    """Wait until messages have left; their tensors may then be used for something else."""
    for work, _ in sent:
        work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank belongs to the group
    return work
