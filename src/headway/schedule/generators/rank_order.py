"""Building blocks of generators: the order of one rank, and checks of the sizes.

Alternation of forwards and backwards, split backwards, and programs of phases. The
micro-batches of a stage appear in ascending order, in forward, backward and weight gradients,
so that gradients are summed in the order of a serial run. Impossible sizes are refused
with all reasons at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headway.errors import PlanError
from headway.schedule.pipeline_schedule import Action, ActionKind, SchedulePipe


def visits(
    kind: ActionKind, stage: int, microbatches: Iterable[int], *, pipe: str = "d0"
) -> list[Action]:
    return [Action(kind, pipe, stage, microbatch) for microbatch in microbatches]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """First `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards[ahead:]) :])


def split_backwards(order: Iterable[Action], behind: int) -> tuple[Action, ...]:
    """Every B becomes I; its W comes `behind` backwards later, the last ones at the end."""
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        if action.kind != ActionKind.BACKWARD:
            result.append(action)
            continue
        result.append(replace(action, kind=ActionKind.INPUT_GRAD))
        waiting.append(replace(action, kind=ActionKind.WEIGHT_GRAD))
        if len(waiting) > behind:
            result.append(waiting.popleft())
    return (*result, *waiting)


class RankProgram:
    """The order of one rank, written phase after phase; it numbers the micro-batches itself.

    What a phase asks of micro-batches that its pipe does not have is left out.
    """

    def __init__(self, *chunks: tuple[SchedulePipe, int]) -> None:
        self.actions: list[Action] = []
        self._chunks = chunks
        self._asked: Counter[tuple[ActionKind, int]] = Counter()
        self._waiting: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        self.actions += self._next(ActionKind.FORWARD, chunk)

    def backward(self, chunk: int) -> None:
        self.actions += self._next(ActionKind.BACKWARD, chunk)

    def input_grad(self, chunk: int) -> None:
        """Of the next micro-batch of a chunk; its weight gradient waits."""
        for whole in self._next(ActionKind.BACKWARD, chunk):
            self.actions.append(replace(whole, kind=ActionKind.INPUT_GRAD))
            self._waiting.append(replace(whole, kind=ActionKind.WEIGHT_GRAD))

    def weight_grad(self) -> None:
        """The weight gradient that has waited longest, if there is one."""
        if self._waiting:
            self.actions.append(self._waiting.popleft())

    def weight_grads(self) -> None:
        self.actions += self._waiting
        self._waiting.clear()

    def _next(self, kind: ActionKind, chunk: int) -> list[Action]:
        pipe, stage = self._chunks[chunk]
        number = self._asked[kind, chunk]
        self._asked[kind, chunk] += 1
        return visits(kind, stage, pipe.microbatches[number : number + 1], pipe=pipe.name)


def check_sizes(
    name: str, ranks: int, microbatches: int, *rules: tuple[bool, str], fix: str = ""
) -> None:
    """Refuse a size unless there is a rank, a micro-batch, and every rule holds.

    Raises:
        PlanError: With one line for each broken rule.
    """
    broken = [text for holds, text in rules if not holds]
    if ranks < 1 or microbatches < 1:
        broken, fix = ["a pipeline needs both"], "give at least one rank and one micro-batch"
    if broken:
        raise PlanError(
            f"no schedule {name} with {ranks} ranks and {microbatches} micro-batches",
            problems=broken,
            fix=fix,
        )
