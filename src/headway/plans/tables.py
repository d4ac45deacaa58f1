"""Tables of rows (embeddings) that are split over the ranks that share a batch: what lies where.

A table is cut into ranges of columns, and each of these into parts of rows; each piece has one
owner. All ways to split a table are such a matrix of owners, so that there is one form to price,
simulate, execute, verify and draw. The names of the ways are those of TorchRec (Ivchenko et al.,
RecSys 2022); "hash" is the layout of distributed equivalent substitution (Rong et al. 2020), in
which the owner of a row follows from its number alone, also where a table has no fixed size.

Ranks here are numbers of shares of the batch (`Plan.data_rank`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from headway.documents import document
from headway.keywords import checks_keywords
from headway.units import parse_bytes

Way = Literal["copies", "table", "column", "row", "table_row", "grid", "hash", "dense", "grow"]
"""How a table is split.

copies: every rank has all of it, and gradients of the rows that were used travel. table: one rank
has it. column: ranges of columns. row: ranges of rows. table_row: ranges of rows over the ranks of
one node. grid: ranges of columns over nodes, and of rows over the ranks of each. hash: rows by a
mixed hash of their number. dense: as any other layer, a copy on every rank whose whole gradient is
exchanged; for tables that are not only looked up in. grow: of a table without a number of rows, by
a hash of their keys; the executor says so itself of each such table of a model.
"""

LEFT_OUT = 'In split.tables, {tables = "NAME", way = "dense"} before the others leaves a table out'
"""How a user keeps a table from being split; of errors."""

Travels = Literal["auto", "sums", "rows"]
"""What travels from owners: sums over the rows of a bag, or the rows that a rank asks for, each
once. "auto": what is fewer bytes."""

RowCut = Literal["range", "hash", "none"]
"""How rows are dealt to owners: in ranges, by a hash of their number, or all to each."""


@checks_keywords
@document
class TableSplit:
    """Tables whose names match a pattern, and how they are split. The first match counts.

    Attributes:
        tables: A pattern of names of modules or parameters: "*", "embeddings.*".
        way: See `Way`.
        columns: Ranges of columns of "column" and "grid"; 0: one for each rank, or node, and
            at most one for each column.
        ranks: Those that hold them, in the order of the pieces; none: all, and for "table" the one
            that has least so far.
        travels: See `Travels`.
        hot: What of each piece a rank's memory holds, with the optimiser's state of these rows:
            "512 MiB", "20 %", "400000 rows"; empty: all. The rest lies in a mapped file.
        cold: Directory of that file; empty: that of temporary files.
    """

    tables: str = "*"
    way: Way = "table"
    columns: int = 0
    ranks: tuple[int, ...] = ()
    travels: Travels = "auto"
    hot: str = ""
    cold: str = ""

    def matches(self, name: str) -> bool:
        """Whether it means a parameter, by its own name or that of its module."""
        module = name.rpartition(".")[0]
        return fnmatchcase(name, self.tables) or fnmatchcase(module, self.tables)

    def __str__(self) -> str:
        """ "emb.* by grid (2 ranges of columns; rows travel) on ranks 0, 2"."""
        more = [f"{self.columns} ranges of columns"] if self.columns else []
        more += [f"{self.travels} travel"] if self.travels != "auto" else []
        where = f" on ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        told = f" ({'; '.join(more)})" if more else ""
        return f"{self.tables} by {self.way}{told}{where}"


@document
class TablePlacement:
    """Where the pieces of one table lie.

    Attributes:
        table: Logical name of the parameter.
        rows: Of the table; 0: of a table that grows (its rows are cut by "hash").
        columns: Of the table.
        owners: For each range of columns, for each part of its rows, the rank that has it. Ranges
            have even shares: the n-th of k begins at `n * size // k`.
        cut: How rows are dealt to the parts.
        travels: See `Travels`.
        hot, cold: See `TableSplit`.
    """

    table: str
    rows: int
    columns: int
    owners: tuple[tuple[int, ...], ...]
    cut: RowCut = "range"
    travels: Travels = "auto"
    hot: str = ""
    cold: str = ""

    def column_range(self, number: int) -> range:
        """The columns of the n-th range."""
        return even_range(number, len(self.owners), self.columns)

    def row_range(self, number: int, part: int) -> range:
        """The rows of a part of the n-th range of columns; only where rows are cut in ranges."""
        assert self.cut == "range"
        return even_range(part, len(self.owners[number]), self.rows)

    def piece_of(self, rank: int) -> tuple[int, int] | None:
        """The piece that a rank has, (range of columns, part of rows): at most one."""
        for number, parts in enumerate(self.owners):
            if rank in parts:
                return number, parts.index(rank)
        return None

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all of it."""
        return len(self.owners) == 1 and len(self.owners[0]) == 1


def split_of(name: str, splits: Sequence[TableSplit]) -> TableSplit | None:
    """How a table is split: the first that means it; None where it is not."""
    found = next((split for split in splits if split.matches(name)), None)
    return None if found is None or found.way == "dense" else found


def even_range(number: int, of: int, size: int) -> range:
    """The n-th of `of` even shares of `size` entries."""
    return range(number * size // of, (number + 1) * size // of)


def place_tables(
    splits: Sequence[TableSplit],
    shapes: Mapping[str, tuple[int, int]],
    ranks: int,
    *,
    node: int | None = None,
) -> dict[str, TablePlacement]:
    """Place the tables of a model; those that no split means are not among the result.

    Args:
        shapes: Logical name of each table's parameter -> rows and columns; 0 rows: it grows.
        ranks: That share the batch.
        node: Of these, the ranks of one node; None: all.

    Returns:
        By name, in the order of `shapes`. Tables that one rank holds go, the largest first, to the
        rank that has fewest elements so far.

    Raises:
        ValueError: A split that does not fit these ranks or a table; one line that names both.
    """
    inner = node or ranks
    firsts = {name: split_of(name, splits) for name in shapes}
    chosen = {name: split for name, split in firsts.items() if split is not None}
    held = [0] * ranks
    found: dict[str, TablePlacement] = {}
    # What may lie anywhere comes last, to even out what the others have left.
    free = [n for n, s in chosen.items() if s.way in ("table", "table_row") and not s.ranks]
    free.sort(key=lambda n: (-math.prod(shapes[n]), list(shapes).index(n)))
    for name in [*(n for n in chosen if n not in free), *free]:
        split, (rows, columns) = chosen[name], shapes[name]
        if split.hot:
            _check_hot(name, split, rows)
        owners = _owners(name, split, columns, ranks, inner, held)
        cut: RowCut = "hash" if split.way == "hash" or not rows else "range"
        if split.way == "copies":
            cut = "none"
        placed = TablePlacement(
            table=name,
            rows=rows,
            columns=columns,
            owners=owners,
            cut=cut,
            travels=split.travels,
            hot=split.hot,
            cold=split.cold,
        )
        found[name] = placed
        for parts in owners:
            for rank in parts:
                shared = 1 if cut == "none" else len(owners) * len(parts)
                held[rank] += max(1, rows) * columns // shared
    return {name: found[name] for name in shapes if name in found}


def _owners(
    name: str, split: TableSplit, columns: int, ranks: int, inner: int, held: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    said = f"{name}, split by {split.way!r}"
    among = split.ranks or tuple(range(ranks))
    wrong = sorted({rank for rank in among if not 0 <= rank < ranks})
    if wrong:
        raise ValueError(f"{said}: there is no rank {wrong[0]}; there are {ranks}, from 0")
    if len(set(among)) < len(among):
        raise ValueError(f"{said}: a rank is named twice in ranks")
    match split.way:
        case "table":
            if len(split.ranks) > 1:
                raise ValueError(f"{said}: one rank holds it, and ranks names {len(among)}")
            return ((split.ranks[0] if split.ranks else held.index(min(held)),),)
        case "copies":
            if split.ranks:
                raise ValueError(f"{said}: every rank has it; leave out ranks")
            return (among,)
        case "row" | "hash":
            return (among,)
        case "table_row":
            if split.ranks:
                return (among,)
            nodes = [sum(held[n : n + inner]) for n in range(0, ranks, inner)]
            first = nodes.index(min(nodes)) * inner
            return (tuple(range(first, min(first + inner, ranks))),)
        case "column":
            parts = split.columns or min(columns, len(among))
            _check_columns(said, parts, columns, len(among))
            return tuple((among[number],) for number in range(parts))
        case _:
            parts = split.columns or _equal_groups(len(among), -(-len(among) // inner), columns)
            # Several ranges on a node are so many equal groups of its ranks.
            _check_columns(said, parts, columns, len(among))
            if len(among) % parts:
                raise ValueError(f"{said}: {len(among)} ranks are no {parts} equal groups")
            size = len(among) // parts
            return tuple(among[n * size : (n + 1) * size] for n in range(parts))


def _equal_groups(ranks: int, wanted: int, most: int) -> int:
    """So many equal groups of ranks as are wanted, or the most below that there can be."""
    fewer = (n for n in range(min(wanted, most), 1, -1) if ranks % n == 0)
    return wanted if wanted <= most else next(fewer, 1)


def _check_hot(name: str, split: TableSplit, rows: int) -> None:
    rows_in_memory(split.hot, max(rows, 1), 1)
    if split.way == "copies":
        raise ValueError(
            f"{name}, split by 'copies': every rank updates rows that only others have looked up, "
            "and which hot does not hold; leave out hot, or let each row have one owner"
        )
    if not rows:
        raise ValueError(
            f"{name} grows, and rows of hot are numbers of a fixed table; leave it out"
        )


def _check_columns(said: str, parts: int, columns: int, ranks: int) -> None:
    if not 1 <= parts <= min(columns, ranks):
        raise ValueError(
            f"{said}: {columns} columns over {ranks} ranks cannot be cut into {parts} ranges"
        )


def rows_in_memory(hot: str, rows: int, row_bytes: int) -> int:
    """How many of a piece's rows memory holds: what `TableSplit.hot` says.

    Args:
        rows: Of the piece.
        row_bytes: Of one row in memory, with all that is kept for it.

    Raises:
        ValueError: It says neither a size, nor a share, nor a number of rows.
    """
    number, _, unit = hot.strip().rpartition(" ")
    try:
        if hot.endswith("%"):
            found = float(hot[:-1]) / 100 * rows
        elif unit == "rows":
            found = float(int(number))
        else:
            found = parse_bytes(hot) / row_bytes
        if not 0 <= found < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"hot is {hot!r}; a size, a share or a number of rows: '512 MiB', '20 %', '4000 rows'"
        ) from None
    return min(rows, int(found))


_MASK = (1 << 64) - 1


def mixed_hash(key: int) -> int:
    """splitmix64 (Steele, Lea and Flood, OOPSLA 2014): from 64 bits to 64 well mixed ones.

    `headway.parallel.tables` has the same for tensors; rank of a key is `mixed_hash(key) % ranks`.
    """
    value = (key + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
