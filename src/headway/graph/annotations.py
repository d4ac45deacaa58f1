"""Strategy annotations as data: replicate, split or stage a module of the model.

Each annotation forces a choice of the search for all modules below one path. Every module has at
most one strategy; nested annotations are refused. Jia et al. 2022 (Whale): `replicate` and `split`;
`stage` and the default strategy as in EPL. The context managers that users write in their model
are in `headway.capture.annotations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway.documents import nearest
from headway.errors import PlanError

Strategy = Literal["replicate", "split", "stage"]


@dataclass(frozen=True, slots=True)
class ForcedStrategy:
    """A choice that the search must take.

    Attributes:
        module: Path in the user's model; "" is all of it.
        strategy: "replicate": each device computes a share of the samples; "split": each holds a
            share of the parameters; "stage": a stage of a pipeline.
        devices: That it asks for; of a stage those over which the stage is replicated.
    """

    module: str
    strategy: Strategy
    devices: int

    def __str__(self) -> str:
        return f"{self.module or '(model)'}={self.strategy}:{self.devices}"

    def covers(self, module: str) -> bool:
        """Whether a module is the annotated one or stands below it."""
        return self.module in ("", module) or module.startswith(f"{self.module}.")


@dataclass(frozen=True, slots=True)
class ForcedChoices:
    """Annotations as the search takes them.

    Attributes:
        force: (module, what), as in `PlanRequest.force`.
        tensor: Degrees of the tensor axis; None: any.
    """

    force: tuple[tuple[str, str], ...] = ()
    tensor: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """What was said of a model.

    Attributes:
        forced: In the order of the model.
        default: Of all modules without an annotation; None: the search decides.
    """

    forced: tuple[ForcedStrategy, ...] = ()
    default: ForcedStrategy | None = None

    def choices(self, modules: Iterable[str]) -> Mapping[str, ForcedStrategy]:
        """The forced choice of each module that has one.

        Args:
            modules: Paths of the model's modules.

        Raises:
            PlanError: Annotations are nested, name no module, or ask for no device.
        """
        paths = tuple(modules)
        problems = [*_nested(self.forced), *_unknown(self.forced, paths)]
        everyone = [*self.forced, *([self.default] if self.default else [])]
        problems += [f"{one}: at least 1 device" for one in everyone if one.devices < 1]
        if problems:
            raise PlanError(
                "annotations that make no sense",
                problems=problems,
                fix="annotate each part of the model once, by the path of a module",
            )
        found: dict[str, ForcedStrategy] = {}
        for path in paths:
            # They are not nested: at most one covers a path.
            one = next((f for f in self.forced if f.covers(path)), self.default)
            if one is not None:
                found[path] = one
        return found

    def forced_choices(self) -> ForcedChoices:
        """What the search must take: what is split, and what is replicated beside it, share the
        devices of the tensor axis; what is only replicated is data parallelism.

        Raises:
            PlanError: Parts ask for different numbers of devices.
        """
        said = [*self.forced, *([replace(self.default, module="*")] if self.default else [])]
        wide = [one for one in said if one.strategy == "split" or one.devices > 1]
        if not any(one.strategy in ("split", "stage") for one in wide):
            wide = []  # each replica is a copy of the model
        degrees = {one.devices for one in wide}
        if len(degrees) > 1:
            raise PlanError(
                "annotations that do not go together",
                problems=[str(one) for one in wide],
                fix="Give all parts as many devices: they share those of one tensor axis.",
            )
        force = tuple((one.module or "*", one.strategy) for one in said)
        if not force:
            return ForcedChoices()
        alone = any(one.strategy != "stage" for one in said)
        return ForcedChoices(force, tuple(degrees) or ((1,) if alone else None))


def _nested(forced: Sequence[ForcedStrategy]) -> list[str]:
    return [
        f"{inner} stands inside of {outer}"
        for place, outer in enumerate(forced)
        for other, inner in enumerate(forced)
        if place != other
        and outer.covers(inner.module)
        # Of two annotations of one module only the pair in this order is reported.
        and (outer.module != inner.module or place < other)
    ]


def _unknown(forced: Sequence[ForcedStrategy], paths: Sequence[str]) -> list[str]:
    return [
        f"{one}: no module {one.module!r}{nearest(one.module, list(paths))}"
        for one in forced
        if one.module and not any(one.covers(path) for path in paths)
    ]
