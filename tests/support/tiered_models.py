"""Models whose tables lie over tiers, trained beside the same ones in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.parallel.tables import split_tables
from headway.parallel.tables.tiered_table import tier_tables
from headway.plans.tables import TableSplit, Way, place_tables

ROWS, WIDTH, BATCH = 300, 8, 8

Make = Callable[[list[nn.Parameter]], Optimizer]


class Recommender(nn.Module):
    """Bags, weighted bags and rows with padding, of tables that are looked up more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.means = nn.EmbeddingBag(ROWS + 7, WIDTH, mode="mean", padding_idx=2)
        self.rows = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        factors = ids.to(self.top.weight.dtype) / ROWS
        found = self.bags(ids) + self.bags(ids.flip(1), per_sample_weights=factors)
        found = found + self.means(ids).sin() + self.rows(ids).square().sum(1)
        result: Tensor = self.top(found)
        return result


def batches(steps: int, seed: int = 0) -> list[Tensor]:
    """[batch, 5] ids; four of five among a tenth of the rows, and each batch has the padding."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        frequent = torch.randint(ROWS // 10, (BATCH, 4), generator=draw)
        rare = torch.randint(ROWS, (BATCH, 1), generator=draw)
        found.append(torch.cat([frequent, rare], 1))
        found[-1][0, :2] = torch.tensor([2, 3])
    return found


def step(model: nn.Module, optimizer: Optimizer, ids: Tensor, samples: int) -> None:
    (model(ids).square().sum() / samples).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not len(parameter):
                parameter.grad = None  # another rank has the table
    optimizer.step()


TABLES = ("bags.weight", "means.weight", "rows.weight")


def differences(
    make: Make,
    way: Way,
    hot: str,
    *,
    steps: int = 12,
    rank: int = 0,
    size: int = 1,
    sparse: bool = False,
) -> tuple[dict[str, float], int]:
    """Largest differences of tables, and of their states, from the serial run; rows brought."""
    torch.manual_seed(7)
    serial = Recommender().double()
    for module in serial.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = sparse
    model = copy.deepcopy(serial)
    shapes = {name: tuple(serial.get_parameter(name).shape) for name in TABLES}
    placed = place_tables([TableSplit(way=way, hot=hot)], shapes, size)  # type: ignore[arg-type]
    tables = split_tables(model, placed, touched=TABLES)
    # Only tables: what is dense would be summed over the ranks by the run.
    alone = make([serial.get_parameter(name) for name in TABLES])
    optimizer = make([tables.parts[name].parameter for name in TABLES])
    tiered, _ = tier_tables(tables, optimizer)
    share = BATCH // size
    for ids in batches(steps):
        serial.zero_grad()
        for name in TABLES:
            tables.parts[name].parameter.grad = None
        step(serial, alone, ids, BATCH)
        step(model, optimizer, ids[rank * share : (rank + 1) * share], BATCH)
    found = {}
    for table in tiered:
        table.rows.settle()
    for name in TABLES:
        parameter, whole = tables.parts[name].parameter, serial.get_parameter(name)
        found[name] = largest(tables.whole(name, parameter.detach()), whole)
        state, expected = optimizer.state.get(parameter, {}), alone.state.get(whole, {})
        assert state.keys() == expected.keys() or not len(parameter)
        for key in expected:
            if isinstance(expected[key], Tensor) and expected[key].ndim > 1:
                own = state.get(key, torch.empty_like(parameter))
                found[f"{name}/{key}"] = largest(tables.whole(name, own), expected[key])
    return found, sum(table.rows.brought for table in tiered)


def largest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())
