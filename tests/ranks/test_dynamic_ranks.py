"""ranks: tables that grow on several ranks, against one dict and loops, and restarts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.errors import CheckpointMismatch, DataError, PlanError, UsageError
from headway.nn import DynamicEmbeddingBag, split_dynamic_tables
from headway.optim import RowWiseAdagrad
from headway.parallel.tables.table_parts import hashed_parts
from support import dynamic_reference as reference
from support.dynamic_streams import DIM, as_dict, assert_rows, initial, pull, random_bags, tensors
from support.ranks import ranks, run_ranks

LAWS = {
    "adam": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1), {}),
    "evicted": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1),
                {"admit_after": 1, "evict_after": 3}),
    "row-wise": (reference.row_wise_adagrad, lambda p: RowWiseAdagrad(p, lr=0.1),
                 {"mode": "sqrtn"}),
    "mean": (reference.sgd, lambda p: torch.optim.SGD(p, lr=0.1), {"mode": "mean"}),
}  # fmt: skip


def stream(step):
    return random_bags(random.Random(step), 9, keys=40)


def shares(world, number):
    """Which bags of a batch are a rank's: uneven; of many ranks the last one has none."""
    ends = [
        number * rank // max(1, world.size - (world.size > 4)) for rank in range(world.size + 1)
    ]
    return slice(ends[world.rank], min(ends[world.rank + 1], number))


def serial(name, steps):
    law, _, options = LAWS[name]
    table = reference.SerialTable(
        law, initial, options.get("admit_after", 0), options.get("evict_after", 10**9)
    )
    for step in range(steps):
        bags, weights, given = stream(step)
        table.step(reference.gradients_of_bags(bags, weights, given, options.get("mode", "sum")))
    return table


class Lookups(nn.Module):
    """The vectors of several modules, of the same bags."""

    def __init__(self, bags):
        super().__init__()
        self.bags = nn.ModuleList(bags)

    def forward(self, **given):
        return [bag(**given) for bag in self.bags]


def made(name):
    _, optimizer_of, options = LAWS[name]
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64, **options)
    return bag, optimizer_of(bag.parameters())


def train(world, model, optimizer, start, stop, micro=2):
    for step in range(start, stop):
        optimizer.zero_grad()
        mine = [part[shares(world, 9)] for part in stream(step)]
        for number in range(micro):
            bags, weights, given = (part[number::micro] for part in mine)
            pull(model(**tensors(bags, weights))[0], given)
        optimizer.step()


def body(world, name, before, after, folder):
    """Train on, from what another number of ranks has saved."""
    bag, optimizer = made(name)
    model = Lookups([bag])
    tables = split_dynamic_tables(model)
    for file in sorted(Path(folder).glob(f"{before}-*")):
        for piece in torch.load(file, weights_only=True):
            bag.table.take_piece(piece, optimizer)
    train(world, model, optimizer, before, after)
    pieces = list(bag.table.pieces(optimizer, chunk=7))
    torch.save(pieces, f"{folder}/{after}-{world.rank}")
    found = as_dict(bag.table)
    assert bool(bag.table.is_here(torch.tensor([*found], dtype=torch.int64)).all())
    assert set(tables.sent) <= {
        ("bags.0.table", kind) for kind in ("ids", "sums", "rows", "gradients")
    }
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("evicted", (2, 3, 1)),
        ("row-wise", (1, 2)),
        pytest.param("adam", (3, 7, 2), marks=pytest.mark.slow),
        pytest.param("mean", (2, 7), marks=pytest.mark.slow),
    ],
)
def test_tables_equal_the_definition_whatever_ranks_there_are(name, sizes, tmp_path):
    """Each number goes on where the one before it has saved."""
    for turn, size in enumerate(sizes):
        before, after = 6 * turn, 6 * (turn + 1)
        parts = run_ranks(size, body, name, before, after, str(tmp_path))
        union = {key: row for part in parts for key, row in part.items()}
        assert len(union) == sum(map(len, parts))
        assert_rows(union, serial(name, after))


@ranks(2)
def test_what_is_wrong_on_one_rank_is_told_on_all(world):
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64)
    split_dynamic_tables(bag)
    keys = torch.tensor([[1.5 if world.rank else 1]])
    with pytest.raises(DataError, match=r"rank 1.*keys are float32"):
        bag(keys)
    weights = torch.tensor([[float("nan") if world.rank == 0 else 1.0]])
    with pytest.raises(DataError, match=r"rank 0.*weight number 0 is nan. It would"):
        bag(torch.tensor([[1]]), per_sample_weights=weights)
    key = next(k for k in range(99) if int(hashed_parts(torch.tensor([k]), 2)) != world.rank)
    with pytest.raises(UsageError, match=rf"key {key} .* is not on rank {world.rank}"):
        bag.table.upsert(torch.tensor([key]), torch.zeros(1, DIM))
    with pytest.raises(UsageError, match=f"on rank {1 - world.rank}"):
        bag.table.lookup(torch.tensor([key]))
    with pytest.raises(PlanError, match="no table that grows"):
        split_dynamic_tables(nn.Linear(1, 1))


@ranks(2)
def test_a_whole_table_is_dealt_and_reads_as_before(world):
    """Also what is looked up without gradients, and by two modules that share it."""
    one = DynamicEmbeddingBag(DIM, dtype=torch.float64, max_norm=1.0)
    model = Lookups([one, DynamicEmbeddingBag(table=one.table, mode="mean", default_id=3)])
    rows = torch.randn(50, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one.table.upsert(torch.arange(50), rows)
    keys, lengths = torch.arange(30 + world.rank, 60), torch.tensor([4, 0, 26 - world.rank])
    whole = model(keys=keys, lengths=lengths)
    state = model.state_dict()
    split_dynamic_tables(model)
    own = as_dict(one.table)
    assert 10 < len(own) < 40
    part = model.state_dict()
    for saved in (state, part):  # of one process, and this rank's own
        model.load_state_dict(saved)
        assert as_dict(one.table) == own
    with pytest.raises(
        CheckpointMismatch, match=f"rank {world.rank} of 2 cannot be .* rank 0 of 1"
    ):
        DynamicEmbeddingBag(DIM, max_norm=1.0).load_state_dict(model.bags[0].state_dict())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            split = model(keys=keys, lengths=lengths)
        assert [found.requires_grad for found in split] == [grad, grad]
        torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
