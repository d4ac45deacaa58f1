"""A micro-batch for passes that count nothing: where state is sharded, all ranks pass together."""

from __future__ import annotations

from headway.data import MicroBatch, RankBatch
from headway.errors import DataError
from headway.plan import Plan


class Spare:
    """The last micro-batch that this rank had.

    Args:
        plan: Of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._wanted = plan.memory.zero > 0 and plan.data_degree > 1
        self._ranks = plan.data_degree
        self._micro: MicroBatch | None = None
        self._met = False

    def note(self, batch: RankBatch) -> None:
        """Look at a batch before it is used.

        Raises:
            DataError: The very first one has no work for some rank; on all ranks.
        """
        if not self._wanted:
            return
        if not self._met and batch.samples < self._ranks:
            raise DataError(
                f"the first batch has {batch.samples} samples for {self._ranks} ranks",
                why="With sharded state a rank can do without a sample only after its first one.",
                fix="Set drop_last, or begin at another batch.",
            )
        self._met = True
        if batch.micros:
            self._micro = batch.micros[-1]

    def lacking(self, batch: RankBatch) -> int:
        """How many micro-batches some other rank has more; 0 where nothing is sharded."""
        return batch.passes - len(batch.micros) if self._wanted else 0

    @property
    def micro(self) -> MicroBatch:
        """The micro-batch."""
        assert self._micro is not None
        return self._micro
