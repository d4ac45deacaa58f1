"""Annotations in a user's model: replicate a part, split it, or begin a pipeline stage there.

    with headway.replicate(8):
        self.backbone = ResNet50()
    with headway.split(8):
        self.head = nn.Linear(2048, 100_000)

What is assigned to a module inside such a context is marked; training is unaffected, and the
planner takes the marks as forced choices (`graph.annotations`). The primitives of Whale (Jia et
al. 2022) and EPL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from headway.errors import PlanError
from headway.graph.annotations import Annotations, ForcedStrategy, Strategy
from headway.keywords import checks_keywords

_MARK = "_headway_annotation"


class _Words(threading.local):
    """Of one thread: the context that is open, and the default of the models being built."""

    open: Annotation | None = None
    default: ForcedStrategy | None = None


_words = _Words()


class Annotation:
    """A strategy, as a context for the assignment of modules, or for `set_default_strategy`."""

    def __init__(self, strategy: Strategy, devices: int) -> None:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise PlanError(
                "annotations that make no sense",
                problems=[f"{strategy}({devices!r}): a whole number of devices, at least 1"],
                fix=f"Write headway.{strategy}(8).",
            )
        self.forced = ForcedStrategy("", strategy, devices)
        self._inside: dict[int, nn.Module] = {}
        self._marked: list[tuple[nn.Module, nn.Module]] = []

    def __enter__(self) -> Annotation:
        if _words.open is not None:
            raise PlanError(
                "annotations are nested",
                problems=[f"{self} inside of {_words.open}"],
                fix="Close the outer context first: every part of a model has one strategy.",
            )
        _words.open = self
        self._inside, self._marked = {}, []
        self._handle = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.remove()
        _words.open = None
        for parent, module in self._marked if kind is None else []:
            # Of modules that were assigned inside of each other only the outermost is marked.
            if id(parent) not in self._inside:
                module.__dict__[_MARK] = self.forced
        self._inside, self._marked = {}, []

    def __str__(self) -> str:
        return f"{self.forced.strategy}({self.forced.devices})"

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        # The hook is one of the process: other threads may build models meanwhile.
        if module is not None and _words.open is self:
            # Kept alive, so that its id is not given to another module.
            self._inside[id(module)] = module
            self._marked.append((parent, module))


@checks_keywords
def replicate(devices: int) -> Annotation:
    """Each of so many devices holds what is assigned and computes a share of the samples."""
    return Annotation("replicate", devices)


@checks_keywords
def split(devices: int) -> Annotation:
    """So many devices each hold a share of what is assigned."""
    return Annotation("split", devices)


@checks_keywords
def stage(devices: int = 1) -> Annotation:
    """What is assigned begins a stage of a pipeline.

    Args:
        devices: Of one copy of the stage, over which its operators are split.

    Raises:
        PlanError: No such number of devices.
    """
    return Annotation("stage", devices)


def set_default_strategy(strategy: Annotation) -> None:
    """For all of the model that is being built for a planner and has no annotation of its own.

    Args:
        strategy: `headway.replicate(8)` or `headway.split(8)`.

    Raises:
        PlanError: A stage begins somewhere; it is no default.
    """
    if strategy.forced.strategy == "stage":
        raise PlanError(
            "annotations that make no sense",
            problems=["set_default_strategy(stage): a stage begins at a module"],
            fix="Write `with headway.stage(): self.block = ...`.",
        )
    _words.default = strategy.forced


@contextmanager
def building() -> Iterator[None]:
    """A model is built for a planner: `set_default_strategy` holds until `annotations_of`."""
    before, _words.default = _words.default, None
    try:
        yield
    finally:
        _words.default = before


def annotations_of(model: nn.Module) -> Annotations:
    """What was said of a model; call it inside of `building`.

    Raises:
        PlanError: A marked part stands inside of another one.
    """
    forced = tuple(
        replace(found, module=path)
        for path, module in model.named_modules()
        if (found := module.__dict__.get(_MARK)) is not None
    )
    said = Annotations(forced, _words.default)
    said.choices([path for path, _ in model.named_modules()])
    return said
