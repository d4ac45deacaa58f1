"""Tables of rows (embeddings) in parts on the ranks that share the batch, and over memory tiers.

Begin with `split_tables`. `lookups` is what a module is asked, `rounds` sends the ids to where the
rows lie, `pending_sum` takes what comes of it, and `table_parts` says what lies here.
"""

from headway.parallel.tables.split_tables import SplitTables, split_tables
from headway.parallel.tables.table_parts import RowSource, TablePart, mixed_hashes

__all__ = ["RowSource", "SplitTables", "TablePart", "mixed_hashes", "split_tables"]
