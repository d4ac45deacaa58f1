"""pure: where the pieces of tables lie: every entry has one owner, whatever the way."""

import pytest

from headway.plans.tables import (
    TablePlacement,
    TableSplit,
    Way,
    mixed_hash,
    place_tables,
    rows_in_memory,
)

SHAPES = {"small.weight": (10, 8), "large.weight": (1001, 6), "middle.weight": (100, 7)}
WAYS: tuple[Way, ...] = ("table", "column", "row", "table_row", "grid", "hash")


def entries(placed: TablePlacement, rank: int) -> set[tuple[int, int]]:
    """(row, column) of what a rank has."""
    piece = placed.piece_of(rank)
    if piece is None:
        return set()
    number, part = piece
    rows = range(placed.rows)
    if placed.cut == "range":
        rows = placed.row_range(number, part)
    else:
        parts = len(placed.owners[number])
        rows = [row for row in rows if mixed_hash(row) % parts == part]
    return {(row, column) for row in rows for column in placed.column_range(number)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_entry_has_one_owner(way: Way, ranks: int) -> None:
    placed = place_tables([TableSplit(way=way)], SHAPES, ranks, node=2 if ranks % 2 == 0 else None)
    assert list(placed) == list(SHAPES)
    for name, (rows, columns) in SHAPES.items():
        parts = [entries(placed[name], rank) for rank in range(ranks)]
        assert sum(map(len, parts)) == len(set().union(*parts)) == rows * columns


def test_tables_go_to_the_rank_with_least_the_largest_first() -> None:
    placed = place_tables([TableSplit(way="table")], SHAPES, 2)
    assert [placed[name].owners for name in SHAPES] == [((1,),), ((0,),), ((1,),)]


def test_the_first_split_that_means_a_table_counts() -> None:
    splits = [TableSplit(tables="small*", way="copies"), TableSplit(tables="*", way="row")]
    placed = place_tables(splits, SHAPES, 2)
    assert placed["small.weight"].cut == "none"
    assert placed["large.weight"].owners == ((0, 1),)
    assert not place_tables([TableSplit(tables="other")], SHAPES, 2)


def test_a_dense_table_is_left_out() -> None:
    splits = [TableSplit(tables="small*", way="dense"), TableSplit(tables="*", way="row")]
    assert set(place_tables(splits, SHAPES, 2)) == {*SHAPES} - {"small.weight"}


def test_grid_cuts_columns_over_nodes_and_rows_inside() -> None:
    placed = place_tables([TableSplit(way="grid")], SHAPES, 4, node=2)
    assert placed["large.weight"].owners == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("columns", "owners"),
    [
        (1, ((0, 1, 2, 3, 4, 5),)),
        (2, ((0, 1, 2), (3, 4, 5))),
        (5, ((0, 1), (2, 3), (4, 5))),
        (6, ((0,), (1,), (2,), (3,), (4,), (5,))),
    ],
)
def test_a_grid_has_no_more_ranges_than_columns(
    columns: int, owners: tuple[tuple[int, ...], ...]
) -> None:
    placed = place_tables([TableSplit(way="grid")], {"a.weight": (9, columns)}, 6, node=1)
    assert placed["a.weight"].owners == owners


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (TableSplit(way="table", ranks=(0, 1)), "one rank holds it"),
        (TableSplit(way="row", ranks=(0, 5)), "there is no rank 5; there are 2"),
        (TableSplit(way="row", ranks=(1, 1)), "named twice"),
        (TableSplit(way="column", columns=9), "cannot be cut into 9 ranges"),
        (TableSplit(way="grid", columns=3), "cannot be cut into 3 ranges"),
        (TableSplit(way="copies", ranks=(0,)), "leave out ranks"),
    ],
)
def test_what_does_not_fit_is_said_with_the_table(split: TableSplit, said: str) -> None:
    with pytest.raises(ValueError, match=said) as found:
        place_tables([split], SHAPES, 2)
    assert ".weight" in str(found.value)


def test_the_hash_is_splitmix64() -> None:
    # The first numbers of the published generator with seed 0, whose state grows by its constant.
    golden = 0x9E3779B97F4A7C15
    found = [mixed_hash(n * golden & (2**64 - 1)) for n in range(3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("hot", "rows"),
    [("1 MiB", 1024), ("25 %", 500), ("400 rows", 400), ("7 GiB", 2000), ("100%", 2000)],
)
def test_hot_rows_are_said_as_a_size_a_share_or_a_number(hot: str, rows: int) -> None:
    assert rows_in_memory(hot, rows=2000, row_bytes=1024) == rows
    placed = place_tables([TableSplit(hot=hot, cold="/scratch")], SHAPES, 2)
    assert (placed["large.weight"].hot, placed["large.weight"].cold) == (hot, "/scratch")


@pytest.mark.parametrize("hot", ["many", "-1 rows", "nan %", "2.5 rows", "-3 %"])
def test_what_no_memory_is_said_by_is_refused(hot: str) -> None:
    with pytest.raises(ValueError, match=r"hot is .*'512 MiB', '20 %', '4000 rows'"):
        place_tables([TableSplit(hot=hot)], SHAPES, 2)


def test_copies_and_growing_tables_are_not_over_tiers() -> None:
    with pytest.raises(ValueError, match="rows that only others have looked up"):
        place_tables([TableSplit(way="copies", hot="5 rows")], SHAPES, 2)
    with pytest.raises(ValueError, match="t grows"):
        place_tables([TableSplit(way="hash", hot="5 rows")], {"t": (0, 4)}, 2)
