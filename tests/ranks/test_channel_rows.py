"""ranks: rows fetched over channels, and their gradients, equal a dense embedding's."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headway.channel import RowExchange
from headway.errors import PeerLost, RunError
from support.ranks import ranks, run_ranks

ROWS, WIDTH, STEPS, PATIENCE = 23, 5, 3, 20.0
"""More rows than any number of ranks divides."""


def wanted_of(rank, size, step):
    """Uneven, with repetitions; in some steps a rank wants nothing, or of one other rank alone."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    if (rank + step) % size == 1:
        return torch.empty(0, dtype=torch.int64)
    most = 3 if (rank + step) % size == 2 else ROWS
    return torch.randint(0, most, (4 + 9 * rank,), generator=draw)


def table_of():
    torch.manual_seed(1)
    return nn.Embedding(ROWS, WIDTH, dtype=torch.float64)


def bags_of(ids):
    return torch.tensor([start for start in (0, 2, 3) if start <= len(ids)])


def loss_of(rows, bags):
    return (rows.sin() * torch.arange(1, WIDTH + 1)).sum() + (bags**2).sum()


def serial(size, mode):
    """The losses of all ranks, and the table after training in one process."""
    table, losses = table_of(), []
    for step in range(STEPS):
        table.zero_grad()
        for rank in range(size):
            ids = wanted_of(rank, size, step)
            bags = F.embedding_bag(ids, table.weight, bags_of(ids), mode=mode)
            losses.append(loss_of(table(ids), bags))
            losses[-1].backward()
        table.weight.data -= 0.1 * table.weight.grad
    return torch.stack(losses).detach(), table.weight.detach()


def train(world, mode, provider):
    whole, losses = table_of().weight.detach(), []
    with RowExchange(provider=provider, timeout=PATIENCE) as exchange:
        own = exchange.rows_of(world.rank, ROWS)
        held = nn.Parameter(whole[own.start : own.stop].clone())
        for step in range(STEPS):
            held.grad = None
            ids = wanted_of(world.rank, world.size, step)
            found, place = exchange.fetch(held, ids, ROWS)
            assert len(found) == len(ids.unique()), "each row comes once"
            bags = F.embedding_bag(place, found, bags_of(ids), mode=mode)
            losses.append(loss_of(F.embedding(place, found), bags))
            losses[-1].backward()
            held.data -= 0.1 * held.grad
    return torch.stack(losses).detach(), held.detach()


@pytest.mark.parametrize(
    ("size", "mode", "provider"),
    [(2, "max", "socket"), (3, "sum", "auto"), (4, "mean", "auto")],
)
def test_training_equals_a_dense_embedding(size, mode, provider):
    losses, table = serial(size, mode)
    found = run_ranks(size, train, mode, provider, timeout=PATIENCE)
    together = torch.stack([losses for losses, _ in found], dim=1).flatten()
    torch.testing.assert_close(together, losses, rtol=1e-12, atol=1e-12)
    held = torch.cat([held for _, held in found])
    torch.testing.assert_close(held, table, rtol=1e-12, atol=1e-12)


@ranks(3)
def test_parts_of_all_sizes_and_types_arrive(world):
    def part(by, to, turn):
        kind = (torch.float32, torch.int64, torch.uint8)[(by + to + turn) % 3]
        return torch.arange(1, 1 + by * 100 + to).repeat(turn, 1).to(kind)

    turns = (3, 1, 0, 3, 2, 3)
    with RowExchange(timeout=PATIENCE) as exchange:
        came = [
            exchange.all_to_all([part(world.rank, to, turn) + turn for to in range(world.size)])
            for turn in turns
        ]
        for turn, tensors in zip(turns, came, strict=True):  # they stay as they came
            for by, tensor in enumerate(tensors):
                expected = part(by, world.rank, turn) + turn
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
        with pytest.raises(RunError, match="2 parts for 3 ranks"):
            exchange.all_to_all([torch.ones(1)] * 2)


@ranks(2)
def test_rows_are_gathered_where_the_other_rank_reads_them(world):
    with RowExchange(timeout=PATIENCE) as exchange:
        if set(exchange.providers.values()) != {"shared_memory"}:
            pytest.skip("these ranks share no memory")
        way = exchange._channels[1 - world.rank]
        put, plain = [], way.put
        way.put = lambda tensor: (put.append(tensor.data_ptr()), plain(tensor))
        own = exchange.rows_of(world.rank, ROWS)
        exchange.fetch(torch.randn(len(own), 8), torch.arange(ROWS), ROWS)
        rooms = {room.bytes.data_ptr() for room in way._wire._rooms if room is not None}
        assert [place in rooms for place in put] == [False, True], "numbers, then rows"


@ranks(2)
def test_what_cannot_be_is_refused_by_name(world):
    with RowExchange(timeout=PATIENCE) as exchange:
        own = exchange.rows_of(world.rank, ROWS)
        with pytest.raises(RunError, match=f"Hold rows {own.start} to {own.stop - 1}"):
            exchange.fetch(torch.zeros(ROWS, 2), torch.tensor([0]), ROWS)
        for wrong in (-1, ROWS):
            with pytest.raises(RunError, match=f"of a table of {ROWS}"):
                exchange.fetch(torch.zeros(len(own), 2), torch.tensor([3, wrong]), ROWS)


def until_the_end(world):
    lost = pytest.raises(PeerLost, match="rank 1 vanished")
    with RowExchange(timeout=PATIENCE) as exchange, lost as caught:
        go_on(exchange, world.rank)
    return str(caught.value)


def go_on(exchange, rank):
    while True:
        exchange.all_to_all([torch.ones(3)] * exchange.size)
        if rank == 1:  # the other may not have taken yet what this one has put
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named():
    assert "rank 1 vanished" in run_ranks(2, until_the_end, mortal=[1], timeout=PATIENCE)[0]
