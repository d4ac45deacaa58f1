"""What a table asks of the ranks that hold it, and what each way to split it sends.

The bytes are those of distributed equivalent substitution and of row exchange, counted per rank
and step over M ranks with b samples each, in both passes, with f = (M - 1) / M of the samples
being other ranks':

    table    ids 8 b n f         vectors 2 f b d s
    sums     ids 12 b n f        vectors 2 f M b d s
    rows     ids 8 b n f         rows 2 f u d s
    copies   gradients of rows (M - 1) u (8 + d s)

n: lookups of a sample; u: different rows among the lookups of a rank; d: columns; s: bytes of an
element. Hence rows are fewer bytes than sums where a sample looks up fewer rows than there are
ranks, n < M; vectors of a table on one rank are fewer than either, unless a batch looks up few
different rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.documents import document
from headway.planner.tables.skew import AccessSkew
from headway.plans.tables import Travels

ID_BYTES, SAMPLE_BYTES = 8, 4
"""Of a row's number, and of the number of the sample that its vector is to be added to."""


@document
class TableDemand:
    """A table, and how it is used.

    Attributes:
        table: Logical name of its parameter.
        rows: Of the table.
        columns: Of the table.
        bag: Mean lookups of a sample.
        pooled: Whether the vectors of a sample's lookups are summed where they lie.
        itemsize: Bytes of an element.
        element_state: Bytes beside each element: the optimiser's, and of a dense gradient.
        row_state: Bytes beside each row: of row-wise Adagrad.
        sparse: Whether a step updates only the rows that were looked up.
        divides: Whether ranges of columns are updated as the whole rows are; not by row-wise
            Adagrad.
        skew: How lookups fall on rows; None: evenly.
    """

    table: str
    rows: int
    columns: int
    bag: float = 1.0
    pooled: bool = True
    itemsize: int = 4
    element_state: float = 0.0
    row_state: float = 0.0
    sparse: bool = True
    divides: bool = True
    skew: AccessSkew | None = None

    @property
    def accesses(self) -> AccessSkew:
        """The skew; where none was measured, an even one."""
        return self.skew or AccessSkew(rows=self.rows)

    @property
    def bytes(self) -> float:
        """Of the whole table with its state."""
        return self.rows * self.row_bytes(self.columns)

    def row_bytes(self, columns: float) -> float:
        """Of so many columns of one row, with its state."""
        return columns * (self.itemsize + self.element_state) + self.row_state


def sent_bytes(demand: TableDemand, ranks: int, samples: int) -> Mapping[str, float]:
    """Bytes that a rank sends in a step, in the mean, by what travels; see the module.

    Args:
        ranks: That share the batch.
        samples: Of one rank.
    """
    others = (ranks - 1) / ranks
    lookups = samples * demand.bag
    unique = demand.accesses.unique(lookups)
    row = demand.columns * demand.itemsize
    found = {
        "rows": ID_BYTES * lookups * others + 2 * others * unique * row,
        "copies": (ranks - 1) * unique * (ID_BYTES + row),
    }
    if demand.pooled:
        vectors = 2 * others * samples * row
        found["table"] = ID_BYTES * lookups * others + vectors
        found["sums"] = (ID_BYTES + SAMPLE_BYTES) * lookups * others + vectors * ranks
    else:
        found["table"] = found["rows"]
    return found


def travels(demand: TableDemand, ranks: int, samples: int, parts: int = 1) -> Travels:
    """What should travel from the owners of a table: vectors that are summed over bags, or the
    different rows that a rank asks for, whichever is fewer bytes.

    Args:
        parts: Of the rows of each column; of several each has a sum to send.
    """
    sent = sent_bytes(demand, ranks, samples)
    sums = sent.get("table" if parts == 1 else "sums", float("inf"))
    # Nearly as much counts as equal: sums need no search for equal rows.
    return "sums" if demand.pooled and sums <= 1.02 * sent["rows"] else "rows"
