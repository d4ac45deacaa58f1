"""Random draws of a model that is cut into stages: every stage draws what the whole model would.

The draws of a forward pass are numbered (`randomness`). Once, the stages are run one after the
other, and it is counted how many draws come before each; a stage then goes on from that number, so
that dropout does not depend on the cut, on the schedule, or on recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from headway.data import RankBatch
from headway.parallel import Stages
from headway.run.randomness import LogicalRandomness, Sites, draws_before, seed_everything


class StageRandomness:
    """Contexts in which stages are carried out.

    Args:
        sites: Of the whole model.
        stages: The same model, cut.
        run_all: Runs all stages once, one after the other.
        seed: Of the run.
    """

    def __init__(
        self, sites: Sites, stages: Stages, run_all: Callable[[], object], seed: int
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

        self._offsets = draws_before(run, stages.model)

    def begin(self, batch: RankBatch) -> None:
        """A step begins."""
        self._batch = batch
        self._modes.clear()

    def around(self, stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        """The context of one action; see `headway.parallel.Calls`."""
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
            with mode:
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
