"""One stage of one pipe at work: forward, backward, and backward in two halves.

Values that enter are cut off from whatever made them, and their gradients are caught at the cut
(`_Enter`), so that a stage may do with its inputs what it likes, in place included. Nothing of a
micro-batch is kept longer than needed: of the outputs only their place in the graph, and nothing
at all where backward computes the forward again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from headway.parallel.layout import Layout
from headway.parallel.links import Link
from headway.parallel.split_backward import WeightGradients, input_gradients
from headway.parallel.stages import INPUT, Stage, Stages
from headway.parallel.standin import Loss, Passed, StandIn
from headway.parallel.structure import is_like_a_tensor
from headway.parallel.versions import LIVE, Versions

Phase = Literal["forward", "again", "backward"]
Around = Callable[[int, int, Phase], AbstractContextManager[Any]]
Entering = Callable[[int], None]
Share = Callable[[Any, int], Tensor]
_NOTHING = nullcontext()


class _Enter(torch.autograd.Function):
    """Where values enter a stage: backward ends here and leaves the gradients in the cut."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cut: _Cut) -> tuple[Tensor, ...]:
        ctx.cut = cut
        return cut.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.cut.gradients = gradients
        return None, None


@dataclass(slots=True)
class _Cut:
    """The values with gradients that enter, and the gradients."""

    tensors: tuple[Tensor, ...] = ()
    gradients: Sequence[Tensor | None] = ()


@dataclass(slots=True)
class _Pass:
    """What is kept of a micro-batch between its forward and the end of its backward.

    Attributes:
        entered: What came from each earlier stage; kept only where the forward is computed again.
        buffers: Before the forward; kept only where it is computed again and changes them.
        layouts: Of what came from each earlier stage.
        cut: Where values entered.
        inputs: Their places in the graph.
        roots: The places in the graph of what left.
        places: For each link: which roots went over it.
        weights: What is left to do for the weights.
        version: Of the weights; -1: the live ones.
    """

    entered: list[tuple[Layout, list[Any]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    cut: _Cut = field(default_factory=_Cut)
    inputs: list[GradientEdge] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    weights: WeightGradients | None = None
    version: int = LIVE


class StageRun:
    """A stage on this rank.

    Args:
        stages: Of the model, in the mode that is run.
        number: Of the stage.
        before: Source stage -> link by which its values come.
        after: Target stage -> link by which values go.
        loss: The recipe's.
        share: Makes the number on which backward is called of what the loss returned, and the
            number of the micro-batch.
        around: Contexts around (stage, micro-batch, phase); None: none.
        entering: Told the stage where its own part of a forward begins; None: nobody is.
        recompute: Keep inputs only, and compute the whole forward again before the backward.
        versions: Of the weights.
        device: Of this rank.

    Attributes:
        losses: Micro-batch -> what `share` made, without its graph; on the last stage.
    """

    def __init__(
        self,
        stages: Stages,
        number: int,
        before: Mapping[int, Link],
        after: Mapping[int, Link],
        *,
        loss: Loss,
        share: Share,
        around: Around | None,
        entering: Entering | None,
        recompute: bool,
        versions: Versions,
        device: torch.device,
    ) -> None:
        self.stage: Stage = stages[number]
        self.losses: dict[int, Tensor] = {}
        self._stages = stages
        self._before = dict(sorted(before.items()))
        self._after = dict(sorted(after.items()))
        self._sources = _sources(stages, number, list(self._before))
        self._loss = loss
        self._share = share
        self._around = around
        self._entering = entering
        self._recompute = recompute
        self._versions = versions
        self._is_last = number == len(stages) - 1
        # Entered a second time, values must be what they were the first time.
        self._copies = recompute and self.stage.alters
        self._stand_in = StandIn(stages.model, self._call, stages.foreign)
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._passes: dict[int, _Pass] = {}
        self._given = [
            [n for n, exit_ in enumerate(self.stage.gives) if target in exit_.targets]
            for target in self._after
        ]
        self._now, self._phase = _Pass(), "forward"
        self._values: Sequence[Any] = ()
        self._arrived: list[Sequence[Any]] = []

    # -- actions -----------------------------------------------------------------------------

    def forward(self, microbatch: int, data: Any, version: int = LIVE) -> None:
        """F: compute and give; keep what backward needs."""
        now = _Pass(version=version)
        now.entered = [link.take(microbatch) for link in self._before.values()]
        now.layouts = [layout for layout, _ in now.entered]
        if not torch.is_grad_enabled():
            self._compute(microbatch, data, now, "forward")
            self._give(microbatch)
        elif self._recompute:
            self._forward_only(microbatch, data, now)
        else:
            self._compute(microbatch, data, now, "forward")
            self._root(now, self._give(microbatch))
            now.entered = []
            self._passes[microbatch] = now
        self._values = ()

    def _forward_only(self, microbatch: int, data: Any, now: _Pass) -> None:
        """The first of its kind is run with a graph: it shows which gradients will come back."""
        buffers = self._versions.buffers() if self.stage.updates else {}
        known = all(link.knows(microbatch) for link in self._after.values())
        with torch.set_grad_enabled(not known):
            self._compute(microbatch, data, now, "forward")
            self._give(microbatch)
        self._passes[microbatch] = _Pass(now.entered, buffers, now.layouts, version=now.version)

    def backward(self, microbatch: int, data: Any) -> None:
        """B: the gradients of inputs and weights."""
        now, gradients = self._begin_backward(microbatch, data)
        del self._passes[microbatch]
        if now.roots:
            with self._context(microbatch, "backward"):
                torch.autograd.backward(now.roots, gradients)
        now.roots = []
        self._versions.collect(now.version)
        self._give_back(microbatch, now, now.cut.gradients)

    def input_gradient(self, microbatch: int, data: Any) -> None:
        """I: the gradients of the inputs."""
        now, gradients = self._begin_backward(microbatch, data)
        with self._context(microbatch, "backward"):
            found, now.weights = input_gradients(now.roots, gradients, now.inputs)
        now.roots, now.inputs = [], []
        self._give_back(microbatch, now, found)

    def weight_gradient(self, microbatch: int) -> None:
        """W: the gradients of the weights."""
        now = self._passes.pop(microbatch)
        assert now.weights is not None
        with self._context(microbatch, "backward"):
            now.weights.run()
        self._versions.collect(now.version)

    # -- forward -----------------------------------------------------------------------------

    def _compute(self, microbatch: int, data: Any, now: _Pass, phase: Phase) -> None:
        """Run the loss, and in it the stage; leaves what the stage returned in `_values`."""
        self._now, self._phase = now, phase
        self._arrived = self._enter(now)
        with self._context(microbatch, phase):
            value = self._stand_in.compute(self._loss, data)
            if self._is_last:
                share = self._share(value, microbatch)
                self._values = (share,)
                self.losses[microbatch] = share.detach()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the loss's call of the model does here."""
        inputs: Sequence[Any] = ()
        if self.stage.uses_inputs:
            inputs = self._stages.leaves_of(args, kwargs)
            inputs = _copies(inputs) if self._copies else inputs
        arrived, self._arrived = self._arrived, []
        values = [
            inputs[place] if source == INPUT else arrived[source][place]
            for source, place in self._sources
        ]
        if self._entering is not None:
            self._entering(self.stage.number)
        result = self._versions.call(self._now.version, values, buffers=self._now.buffers)
        if self._is_last:
            return result
        self._values = result
        raise Passed

    def _enter(self, now: _Pass) -> list[Sequence[Any]]:
        """The values of each link, cut off from where they come from."""
        entered = now.entered
        if self._copies:
            entered = [(layout, _copies(leaves)) for layout, leaves in entered]
        flowing = [t for layout, leaves in entered for t in layout.flowing(leaves)]
        rest: Iterator[Tensor] = iter(())
        if flowing and torch.is_grad_enabled():
            rest = iter(self._cut(now, flowing))
        else:
            rest = iter(flowing)
        return [
            layout.structure.rebuild(
                [
                    next(rest) if form and form.flows else leaf
                    for form, leaf in zip(layout.forms, leaves, strict=True)
                ]
            )
            for layout, leaves in entered
        ]

    def _cut(self, now: _Pass, flowing: list[Tensor]) -> tuple[Tensor, ...]:
        # What is entered becomes part of the graph; what will enter once more must not.
        now.cut = _Cut(tuple(t.detach() for t in flowing) if self._recompute else tuple(flowing))
        entered: tuple[Tensor, ...] = _Enter.apply(self._anchor, now.cut)  # type: ignore[no-untyped-call]
        now.cut.tensors = ()
        node = entered[0].grad_fn
        assert node is not None
        now.inputs = [GradientEdge(node, number) for number in range(len(entered))]
        return entered

    def _give(self, microbatch: int) -> list[list[Tensor]]:
        """Hand the results over; for each link those whose gradients will come."""
        return [
            link.give(microbatch, [self._values[n] for n in places])
            for link, places in zip(self._after.values(), self._given, strict=True)
        ]

    def _root(self, now: _Pass, leaving: list[list[Tensor]]) -> None:
        """Note where backward will begin."""
        index: dict[int, int] = {}
        found = list(self._values) if self._is_last else [t for group in leaving for t in group]
        for tensor in found:
            if tensor.requires_grad and id(tensor) not in index:
                index[id(tensor)] = len(now.roots)
                now.roots.append(get_gradient_edge(tensor))
        now.places = [[index.get(id(t), -1) for t in group] for group in leaving]

    # -- backward ----------------------------------------------------------------------------

    def _begin_backward(self, microbatch: int, data: Any) -> tuple[_Pass, list[Tensor | None]]:
        """The pass, with its graph, and the gradients of its roots."""
        now = self._passes[microbatch]
        if self._recompute:
            self._compute_again(microbatch, data, now)
        gradients: list[Tensor | None] = [None] * len(now.roots)
        for link, places in zip(self._after.values(), now.places, strict=True):
            for place, gradient in zip(places, link.take_back(microbatch), strict=True):
                if place >= 0:
                    so_far = gradients[place]
                    gradients[place] = gradient if so_far is None else so_far + gradient
        if self._is_last and now.roots:
            gradients = [torch.ones_like(self.losses[microbatch])]
        return now, gradients

    def _compute_again(self, microbatch: int, data: Any, now: _Pass) -> None:
        self._compute(microbatch, data, now, "again")
        leaving = [
            link.again(microbatch, [self._values[n] for n in places])
            for link, places in zip(self._after.values(), self._given, strict=True)
        ]
        self._root(now, leaving)
        self._values, now.entered = (), []

    def _give_back(self, microbatch: int, now: _Pass, gradients: Sequence[Tensor | None]) -> None:
        """Hand the gradients of what entered to where it came from."""
        left = iter(gradients or itertools.repeat(None))
        for link, layout in zip(self._before.values(), now.layouts, strict=True):
            forms = [form for form in layout.forms if form is not None and form.flows]
            found = [(form, next(left)) for form in forms]
            device = self._anchor.device
            link.give_back(
                microbatch,
                [form.back(form.empty(device).zero_()) if g is None else g for form, g in found],
            )

    def _context(self, microbatch: int, phase: Phase) -> AbstractContextManager[Any]:
        if self._around is None:
            return _NOTHING
        return self._around(self.stage.number, microbatch, phase)


def _sources(stages: Stages, number: int, before: Sequence[int]) -> list[tuple[int, int]]:
    """For each argument of a stage: INPUT or the number of the link, and the place there."""
    found = []
    for entry in stages[number].takes:
        if entry.source == INPUT:
            found.append((INPUT, entry.leaf))
            continue
        gives = stages[entry.source].gives
        taken = [n for n, exit_ in enumerate(gives) if number in exit_.targets]
        found.append((before.index(entry.source), taken.index(entry.leaf)))
    return found


def _copies(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if is_like_a_tensor(value) else value for value in values]
