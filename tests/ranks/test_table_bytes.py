"""ranks: what lookups in split tables send is what the formulas say, byte for byte."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from headway.parallel.tables import split_tables
from support.ranks import ranks
from support.split_table_models import FIELDS, ROWS, placements, with_offsets
from support.substitutions import Bags, Dots, Factorisation

SAMPLES, EACH, COLUMNS, NUMBER = 6, 5, 8, 8
"""Of each rank; ids of a bag; columns of a table; bytes of a float64."""


class Fields(nn.Module):
    """Several bags of equally many ids, whose sums are taken, or go through a layer."""

    def __init__(self, layer=0):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, COLUMNS, mode="sum") for _ in range(FIELDS))
        self.over = nn.Linear(FIELDS * COLUMNS, layer) if layer else None

    def forward(self, data):
        found = torch.cat([bag(data["many"] + n) for n, bag in enumerate(self.bags)], 1)
        return torch.tanh(found if self.over is None else self.over(found))


def data_of(rank):
    draw = torch.Generator().manual_seed(rank)
    many = torch.randint(0, ROWS - FIELDS, (SAMPLES, EACH), generator=draw)
    factors = torch.rand(SAMPLES, FIELDS, generator=draw, dtype=torch.float64)
    lengths = torch.full((SAMPLES,), 2)
    ids = torch.randint(0, ROWS, (2 * SAMPLES,), generator=draw)
    return with_offsets(
        {"many": many, "square": many[:, :FIELDS], "factors": factors, "lengths": lengths}
        | {"ids": ids}
    )


def sent_by(world, model, way, steps=2, travels="auto"):
    """Bytes of the last of some steps by kind, of all ranks."""
    model = copy.deepcopy(model).double()
    tables = split_tables(model, placements(model, way, world.size, travels=travels), world.group)
    for _ in range(steps):
        tables.sent.clear()
        model(data_of(world.rank)).sum().backward()
    kinds = ["ids", "sums", "rows", "gradients", "samples"]
    own = torch.tensor([sum(n for (_, k), n in tables.sent.items() if k == kind) for kind in kinds])
    torch.distributed.all_reduce(own, group=world.group)
    return {kind: n for kind, n in zip(kinds, own.tolist(), strict=True) if n}


def equal(found, **expected):
    assert found == expected


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_formulas(size):
    ranks(size, timeout=60)(check_bytes)()


def check_bytes(world):
    b, n, d, fields = SAMPLES, EACH, COLUMNS, FIELDS
    others, batch = world.size - 1, SAMPLES * world.size
    ids = 4 * n * batch * fields
    # Table by table: ids go to the one owner of each, and its vectors to whose samples they are.
    table = {"ids": ids * others // world.size, "sums": NUMBER * b * fields * d * others}
    equal(sent_by(world, Fields(), "table"), **table, gradients=table["sums"])
    # By columns: ids go to everybody, the vectors are as many.
    wide = table | {"ids": ids * others}
    equal(sent_by(world, Fields(), "column"), **wide, gradients=wide["sums"])
    # By rows: every rank has a part of each vector; with the ids go lengths.
    sums = NUMBER * batch * fields * d * others
    many = [data_of(rank)["many"] for rank in range(world.size)]
    away = sum(
        int((owner_of_row(world.size, x + number) != rank).sum())
        for rank, x in enumerate(many)
        for number in range(fields)
    )
    lengths = 4 * batch * fields * others
    by_row = sent_by(world, Fields(), "row")
    equal(by_row, ids=4 * away + lengths, sums=sums, gradients=sums)
    # Rows travel: each once to each rank that wants it.
    found = sent_by(world, Fields(), "row", travels="rows")
    once = sum(
        int((owner_of_row(world.size, ids) != rank).sum())
        for rank, x in enumerate(many)
        for number in range(fields)
        if (ids := (x + number).unique()) is not None
    )
    equal(found, ids=4 * once, rows=NUMBER * d * once, gradients=NUMBER * d * once)
    # A first dense layer with fewer results than the vectors have numbers.
    narrow = NUMBER * batch * 3 * others
    found = sent_by(world, Fields(3), "row")
    equal(found, ids=by_row["ids"], sums=narrow, gradients=narrow)
    # With more of them the vectors are taken first.
    equal(sent_by(world, Fields(fields * d * world.size), "row"), **by_row)


def owner_of_row(size, ids):
    ends = torch.tensor([(part + 1) * ROWS // size for part in range(size - 1)])
    return torch.bucketize(ids, ends, right=True)


@ranks(2, timeout=60)
def test_a_factorisation_machine_sends_a_vector_and_a_number(world):
    found = sent_by(world, Factorisation(), "row", travels="sums")
    width = Factorisation().second.embedding_dim
    batch = SAMPLES * world.size
    # The sum of vectors; first order and squares in one number. 3.3 has one for each.
    assert found["sums"] == NUMBER * batch * (width + 1)
    assert found["gradients"] - found["sums"] == 0, "ids' values are data: they have no gradient"


@ranks(2, timeout=60)
def test_dots_of_tables_cut_by_columns_send_dots(world):
    model = Dots(columns=24)
    found = sent_by(world, model, "column")
    batch, rows = SAMPLES * world.size, FIELDS + 1
    pairs = rows * (rows - 1) // 2
    assert found["sums"] == found["gradients"] == NUMBER * batch * pairs
    # The numbers of a sample go where the columns are, and their gradients come back.
    assert found["samples"] == 2 * NUMBER * SAMPLES * world.size * 24 // 2


@ranks(2, timeout=60)
def test_what_is_taken_as_it_was_found_is_sent_once(world):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = Bags(COLUMNS)

        def forward(self, data):
            rows = torch.stack(self.bags(data), 1)
            return torch.bmm(rows, rows.transpose(1, 2))

    first = sent_by(world, Twice(), "table", steps=1)
    assert first["sums"] == NUMBER * SAMPLES * FIELDS * COLUMNS
    assert sent_by(world, Twice(), "table", steps=3) == first
