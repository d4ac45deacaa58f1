"""Tables of rows (embeddings) in parts on the ranks that share the batch, and over memory tiers.

Begin with `split_tables`. `lookups` is what a module is asked, `lazy_lookups` what stands in the
place of its result, `rounds` sends the ids to where the rows lie, `pending_sum` is what comes of
it, and `table_parts` says what lies here.
"""

from headway.parallel.tables.lazy_lookups import taken
from headway.parallel.tables.lookups import Lookup
from headway.parallel.tables.split_tables import SplitTables, split_tables
from headway.parallel.tables.table_parts import (
    RowRound,
    RowSource,
    TablePart,
    mixed_hashes,
    rows_of,
)

__all__ = [
    "Lookup",
    "RowRound",
    "RowSource",
    "SplitTables",
    "TablePart",
    "mixed_hashes",
    "rows_of",
    "split_tables",
    "taken",
]
