"""Forward and backward of one stage, with the backward whole or in two halves.

Values that enter a stage are detached from whatever made them and their gradients are caught
there, so that a stage may do with its inputs what it likes, in place included. Nothing of a
micro-batch is kept longer than needed: of the outputs only their place in the graph, and
nothing at all where backward recomputes the forward.

The halves are those of zero-bubble pipelines (Qi et al. 2023, section 2). `input_gradients`
runs the graph from the outputs to the inputs and records what arrives at every node from which
a branch to weights goes off; `WeightGradients` starts again from there, so that nothing is
computed twice. Only torch.autograd's public interface to the graph is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from headway.parallel.pipeline.runtime.p2p import MessageFormat, StageLink
from headway.parallel.pipeline.runtime.weight_stashing import LIVE_VERSION, WeightVersions
from headway.parallel.stages import (
    LOSS,
    MODEL_INPUT,
    LossFunction,
    ModelProxy,
    ModelStages,
    Stage,
    StageCompleted,
    is_tensor_like,
)

Gradients = Sequence[Tensor | None]


@dataclass(slots=True)
class _Start:
    """A node on the way to the inputs, from which a branch to weights goes off.

    Attributes:
        node: Whose backward makes the branch's gradient.
        weights: At the ends of the branch, by id.
        level: How many other starts may lie between it and the inputs.
        gradients: What arrived at the node; None: nothing did.
    """

    node: Node
    weights: dict[int, Tensor]
    level: int
    gradients: Gradients | None = None

    def note(self, gradients: Gradients) -> None:
        self.gradients = gradients


@dataclass(slots=True)
class _Task:
    """One pass of the engine: from some edges to some weights.

    Attributes:
        replaced: Starts of which some lie on the way of others: what comes from there was noted.
        retain: Other tasks need parts of the same graph.
    """

    edges: list[GradientEdge]
    gradients: list[Tensor]
    weights: list[Tensor]
    replaced: Sequence[_Start] = ()
    retain: bool = False

    def run(self) -> None:
        hooks = [start.node.register_prehook(_replacing(start)) for start in self.replaced]
        try:
            torch.autograd.backward(
                self.edges, self.gradients, retain_graph=self.retain, inputs=self.weights
            )
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(slots=True)
class WeightGradients:
    """What is left of a backward pass after the gradients of the inputs.

    Attributes:
        roots: In place of tasks: where a whole backward begins, of a stage without inputs.
    """

    tasks: list[_Task] = field(default_factory=list)
    roots: Sequence[GradientEdge] = ()
    gradients: Gradients = ()

    def run(self) -> None:
        """Add the gradients to `.grad` of the weights, once; frees the graph."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
            self.roots = self.gradients = ()
        while self.tasks:
            self.tasks.pop().run()


def input_gradients(
    roots: Sequence[GradientEdge], gradients: Gradients, inputs: Sequence[GradientEdge]
) -> tuple[Gradients, WeightGradients]:
    """The gradients of a stage's inputs, and what is to be done for its weights later.

    Args:
        inputs: Of the inputs; all of one node. None: all is done later.

    Returns:
        One gradient for each input (None: it has none), and the rest.
    """
    if not inputs or not roots:
        return (), WeightGradients(roots=roots, gradients=gradients)
    graph = _Graph([root.node for root in roots], inputs[0].node)
    starts = graph.starts()
    hooks = [start.node.register_prehook(start.note) for start in starts]
    try:
        # The branches to the weights are still to be run.
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    given = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    apart = [(r, g) for r, g in given if r.node not in graph.on_way]
    # A node that no gradient has reached passes none on.
    tasks = _tasks([start for start in starts if start.gradients is not None])
    if apart:  # outputs that do not depend on the inputs: no hook has seen their gradients
        edges, weights = [root for root, _ in apart], graph.weights([r.node for r, _ in apart])
        tasks.append(_Task(edges, [g for _, g in apart], list(weights.values()), retain=True))
    return found, WeightGradients(tasks)


class _Graph:
    """The part of autograd's graph that belongs to a stage.

    Attributes:
        on_way: The nodes between the outputs and the inputs, both included.
    """

    def __init__(self, roots: Sequence[Node], end: Node) -> None:
        self._end = end
        self._after: dict[Node, list[Node]] = {end: []}
        self._before: dict[Node, list[Node]] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in self._after:
                after = [n for n, _ in node.next_functions if n is not None]
                self._after[node] = after
                for n in after:
                    self._before.setdefault(n, []).append(node)
                waiting += after
        self.on_way = {end}
        waiting = [end]
        while waiting:
            fresh = [n for n in self._before.get(waiting.pop(), ()) if n not in self.on_way]
            self.on_way.update(fresh)
            waiting += fresh

    def weights(self, nodes: list[Node]) -> dict[int, Tensor]:
        """The leaves behind some nodes, by id."""
        found: dict[int, Tensor] = {}
        seen, waiting = set(nodes), list(nodes)
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)  # of a node that adds to .grad
            if leaf is not None:
                found[id(leaf)] = leaf
            fresh = [n for n in self._after[node] if n not in seen]
            seen.update(fresh)
            waiting += fresh
        return found

    def starts(self) -> list[_Start]:
        """The nodes on the way with branches to weights, from the inputs on."""
        found = []
        level = {self._end: 0}
        # Kahn's order, from the inputs on: a node's level is final when all nodes behind it are
        # done.
        left = {n: sum(m in self.on_way for m in self._after[n]) for n in self.on_way}
        waiting = [self._end]
        while waiting:
            node = waiting.pop()
            branches = [n for n in self._after[node] if n not in self.on_way]
            weights = self.weights(branches) if branches else {}
            if weights:
                found.append(_Start(node, weights, level[node]))
            above = level[node] + bool(weights)
            for n in self._before.get(node, ()):
                level[n] = max(level.get(n, 0), above)
                left[n] -= 1
                if not left[n]:
                    waiting.append(n)
        return found


def _tasks(starts: Sequence[_Start]) -> list[_Task]:
    """Starts of one level together: none lies on the way of another. Last ones first.

    Starts that share a weight are a task of their own, whose engine pass covers all between them.
    """
    users: dict[int, list[_Start]] = {}
    for start in starts:
        for weight in start.weights:
            users.setdefault(weight, []).append(start)
    tied = _joined([together for together in users.values() if len(together) > 1])
    inside = {id(start) for group in tied for start in group}
    levels: dict[int, list[_Start]] = {}
    for start in starts:
        if id(start) not in inside:
            levels.setdefault(start.level, []).append(start)
    plain = [_task(levels[level]) for level in sorted(levels)]
    return plain + [_task(group, tied=True) for group in tied]


def _joined(tied: Sequence[list[_Start]]) -> list[list[_Start]]:
    """Groups with a start in common as one."""
    groups: list[list[_Start]] = []
    for together in tied:
        ids = {id(start) for start in together}
        touched = [g for g in groups if any(id(start) in ids for start in g)]
        groups = [g for g in groups if all(g is not t for t in touched)]
        merged = {id(start): start for group in (*touched, together) for start in group}
        groups.append(list(merged.values()))
    return groups


def _task(starts: Sequence[_Start], *, tied: bool = False) -> _Task:
    task = _Task([], [], [], replaced=starts if tied else (), retain=tied)
    weights: dict[int, Tensor] = {}
    for start in starts:
        for number, gradient in enumerate(start.gradients or ()):
            if gradient is not None:
                task.edges.append(GradientEdge(start.node, number))
                task.gradients.append(gradient)
        weights.update(start.weights)
    task.weights = list(weights.values())
    return task


def _replacing(start: _Start) -> Callable[[Any], Any]:
    noted = tuple(start.gradients or ())
    return lambda _: noted


# One stage of one pipe at work: forward, backward, and backward in two halves.


Phase = Literal["forward", "again", "backward"]
ComputeContext = Callable[[int, int, Phase], AbstractContextManager[Any]]
ForwardHook = Callable[[int], None]
BackwardScalar = Callable[[Any, int], Tensor]
_NO_CONTEXT = nullcontext()


class _StageEntry(torch.autograd.Function):
    """Where values enter a stage: backward ends here and leaves the gradients in the cut."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cut: _DetachedInputs) -> tuple[Tensor, ...]:
        ctx.cut = cut
        return cut.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.cut.gradients = gradients
        return None, None


@dataclass(slots=True)
class _DetachedInputs:
    """The values with gradients that enter, and the gradients."""

    tensors: tuple[Tensor, ...] = ()
    gradients: Sequence[Tensor | None] = ()


@dataclass(slots=True)
class _MicrobatchState:
    """What is kept of a micro-batch between its forward and the end of its backward.

    Attributes:
        entered: What came from each earlier stage; kept only where the forward is computed again.
        buffers: Before the forward; kept only where it is computed again and changes them.
        layouts: Of what came from each earlier stage.
        roots: The places in the graph of what left.
        places: For each link: which roots went over it.
        weights: What is left to do for the weights.
        version: Of the weights; -1: the live ones.
    """

    entered: list[tuple[MessageFormat, list[Any]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    layouts: list[MessageFormat] = field(default_factory=list)
    cut: _DetachedInputs = field(default_factory=_DetachedInputs)
    inputs: list[GradientEdge] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    weights: WeightGradients | None = None
    version: int = LIVE_VERSION


class StageExecutor:
    """A stage on this rank.

    Args:
        stages: Of the model, in the mode that is run.
        before: Source stage -> link by which its values come.
        after: Target stage -> link by which values go.
        data: Of each micro-batch of the step, as the loss gets it; filled anew for each step.
        share: Makes the number on which backward is called of what the loss returned, and the
            number of the micro-batch.
        around: Contexts around (stage, micro-batch, phase); None: none.
        entering: Told the stage where its own part of a forward begins; None: nobody is.
        recompute: Keep inputs only, and compute the whole forward again before the backward.

    Attributes:
        losses: Micro-batch -> what `share` made, without its graph; on the last stage.
    """

    def __init__(
        self,
        stages: ModelStages,
        number: int,
        before: Mapping[int, StageLink],
        after: Mapping[int, StageLink],
        *,
        data: Sequence[Any],
        loss: LossFunction,
        share: BackwardScalar,
        around: ComputeContext | None,
        entering: ForwardHook | None,
        recompute: bool,
        versions: WeightVersions,
        device: torch.device,
        caller: str = LOSS,
    ) -> None:
        self.stage: Stage = stages[number]
        self.losses: dict[int, Tensor] = {}
        self._stages = stages
        self._before = dict(sorted(before.items()))
        self._after = dict(sorted(after.items()))
        self._sources = _sources(stages, number, list(self._before))
        self._data = data
        self._loss = loss
        self._share = share
        self._around = around
        self._entering = entering
        self._recompute = recompute
        self._versions = versions
        self._is_last = number == len(stages) - 1
        # Entered a second time, values must be what they were the first time.
        self._copies = recompute and self.stage.alters
        self._caller = caller
        self._stand_in = ModelProxy(stages.model, self._call, stages.foreign, caller=caller)
        # What enters goes to `_StageEntry` by the side; this makes autograd record its node.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._passes: dict[int, _MicrobatchState] = {}
        self._given = [
            [n for n, exit_ in enumerate(self.stage.gives) if target in exit_.targets]
            for target in self._after
        ]
        self._now, self._phase = _MicrobatchState(), "forward"
        self._values: Sequence[Any] = ()
        self._arrived: list[Sequence[Any]] = []

    # -- actions -----------------------------------------------------------------------------

    def forward(self, microbatch: int, version: int) -> None:
        """F: compute and give; keep what backward needs."""
        now = _MicrobatchState(version=version)
        now.entered = [link.take(microbatch) for link in self._before.values()]
        now.layouts = [layout for layout, _ in now.entered]
        if not torch.is_grad_enabled():
            self._compute(microbatch, now, "forward")
            self._give(microbatch)
        elif self._recompute:
            self._forward_only(microbatch, now)
        else:
            self._compute(microbatch, now, "forward")
            self._root(now, self._give(microbatch))
            now.entered = []
            self._passes[microbatch] = now
        # Activations must not live until the next micro-batch.
        self._values = ()

    def _forward_only(self, microbatch: int, now: _MicrobatchState) -> None:
        buffers = self._versions.buffers() if self.stage.updates else {}
        known = all(link.knows(microbatch) for link in self._after.values())
        # The first of its kind is run with a graph: it shows which gradients will come back.
        with torch.set_grad_enabled(not known):
            self._compute(microbatch, now, "forward")
            self._give(microbatch)
        self._passes[microbatch] = _MicrobatchState(
            now.entered, buffers, now.layouts, version=now.version
        )

    def backward(self, microbatch: int) -> None:
        """B: the gradients of inputs and weights."""
        now, gradients = self._begin_backward(microbatch)
        del self._passes[microbatch]
        if now.roots:
            with self._context(microbatch, "backward"):
                torch.autograd.backward(now.roots, gradients)
        now.roots = []
        self._versions.collect(now.version)
        self._give_back(microbatch, now, now.cut.gradients)

    def input_gradient(self, microbatch: int) -> None:
        """I: the gradients of the inputs."""
        now, gradients = self._begin_backward(microbatch)
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

    def _compute(self, microbatch: int, now: _MicrobatchState, phase: Phase) -> None:
        """Run the loss, and in it the stage; leaves what the stage returned in `_values`."""
        self._now, self._phase = now, phase
        self._arrived = self._enter(now)
        with self._context(microbatch, phase):
            value = self._stand_in.compute(self._loss, self._data[microbatch])
            if self._is_last:
                share = self._share(value, microbatch)
                self._values = (share,)
                self.losses[microbatch] = share.detach()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the loss's call of the model does here."""
        inputs: Sequence[Any] = ()
        if self.stage.uses_inputs:
            inputs = self._stages.leaves_of(args, kwargs, self._caller)
            inputs = _copies(inputs) if self._copies else inputs
        # No reference stays here, so that the stage can free its inputs as soon as they are used
        # up.
        arrived, self._arrived = self._arrived, []
        values = [
            inputs[place] if source == MODEL_INPUT else arrived[source][place]
            for source, place in self._sources
        ]
        if self._entering is not None:
            self._entering(self.stage.number)
        result = self._versions.call(self._now.version, values, buffers=self._now.buffers)
        if self._is_last:
            return result
        self._values = result
        raise StageCompleted

    def _enter(self, now: _MicrobatchState) -> list[Sequence[Any]]:
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

    def _cut(self, now: _MicrobatchState, flowing: list[Tensor]) -> tuple[Tensor, ...]:
        # What is entered becomes part of the graph; what will enter once more must not.
        now.cut = _DetachedInputs(
            tuple(t.detach() for t in flowing) if self._recompute else tuple(flowing)
        )
        entered: tuple[Tensor, ...] = _StageEntry.apply(self._anchor, now.cut)  # type: ignore[no-untyped-call]
        # Their grad_fn is now the node that holds `cut`: the cycle would keep the activations
        # alive.
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

    def _root(self, now: _MicrobatchState, leaving: list[list[Tensor]]) -> None:
        """Note where backward will begin."""
        index: dict[int, int] = {}
        found = list(self._values) if self._is_last else [t for group in leaving for t in group]
        for tensor in found:
            # A value that goes over several links is one root, where its gradients are added.
            if tensor.requires_grad and id(tensor) not in index:
                index[id(tensor)] = len(now.roots)
                now.roots.append(get_gradient_edge(tensor))
        now.places = [[index.get(id(t), -1) for t in group] for group in leaving]

    # -- backward ----------------------------------------------------------------------------

    def _begin_backward(self, microbatch: int) -> tuple[_MicrobatchState, list[Tensor | None]]:
        """The pass, with its graph, and the gradients of its roots."""
        now = self._passes[microbatch]
        if self._recompute:
            self._compute_again(microbatch, now)
        gradients: list[Tensor | None] = [None] * len(now.roots)
        for link, places in zip(self._after.values(), now.places, strict=True):
            for place, gradient in zip(places, link.take_back(microbatch), strict=True):
                if place >= 0:
                    so_far = gradients[place]
                    gradients[place] = gradient if so_far is None else so_far + gradient
        if self._is_last and now.roots:
            gradients = [torch.ones_like(self.losses[microbatch])]
        return now, gradients

    def _compute_again(self, microbatch: int, now: _MicrobatchState) -> None:
        self._compute(microbatch, now, "again")
        leaving = [
            link.again(microbatch, [self._values[n] for n in places])
            for link, places in zip(self._after.values(), self._given, strict=True)
        ]
        self._root(now, leaving)
        self._values, now.entered = (), []

    def _give_back(
        self, microbatch: int, now: _MicrobatchState, gradients: Sequence[Tensor | None]
    ) -> None:
        """Hand the gradients of what entered to where it came from."""
        # The stage before waits for a gradient of each of its values, also where there is none.
        left = iter(gradients or itertools.repeat(None))
        for link, layout in zip(self._before.values(), now.layouts, strict=True):
            found = [(form, next(left)) for form in layout.flowing_forms]
            device = self._anchor.device
            link.give_back(
                microbatch,
                [form.back(form.empty(device).zero_()) if g is None else g for form, g in found],
            )

    def _context(self, microbatch: int, phase: Phase) -> AbstractContextManager[Any]:
        if self._around is None:
            return _NO_CONTEXT
        return self._around(self.stage.number, microbatch, phase)


def _sources(stages: ModelStages, number: int, before: Sequence[int]) -> list[tuple[int, int]]:
    """For each argument of a stage: MODEL_INPUT or the number of the link, and the place there."""
    found = []
    for entry in stages[number].takes:
        if entry.source == MODEL_INPUT:
            found.append((MODEL_INPUT, entry.leaf))
            continue
        gives = stages[entry.source].gives
        taken = [n for n, exit_ in enumerate(gives) if number in exit_.targets]
        found.append((before.index(entry.source), taken.index(entry.leaf)))
    return found


def _copies(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if is_tensor_like(value) else value for value in values]
