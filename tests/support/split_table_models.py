"""Models with tables, their data in uneven shares, and a comparison of split and serial tables."""

from __future__ import annotations

import copy

import torch
from torch import nn

from headway.parallel.tables import split_tables
from headway.plans.tables import TableSplit, place_tables

ROWS, WIDTH, FIELDS = 13, 6, 3
WAYS = ("copies", "table", "column", "row", "table_row", "grid", "hash")


class EveryLookup(nn.Module):
    """One module of each kind, used in each way that torch has; one is used twice."""

    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.last = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True, sparse=True)
        self.means = nn.EmbeddingBag(ROWS + 4, WIDTH, mode="mean", padding_idx=2)
        self.flat = nn.EmbeddingBag(ROWS, WIDTH, mode="mean")
        self.weighted = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=1)
        self.rows = nn.Embedding(ROWS + 1, WIDTH, padding_idx=3)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 1))

    def forward(self, data):
        learnt = data["weights"] * self.gate
        outs = [
            self.bags(data["ids"], data["offsets"]),
            self.last(data["ids"], torch.cat([data["offsets"], data["end"]])),
            self.means(data["ids"], data["offsets"]),
            self.flat(data["square"]),
            self.weighted(data["ids"], data["offsets"], learnt),
            self.weighted(data["square"], per_sample_weights=data["factors"]),
            self.rows(data["square"]).sin().prod(1),
            self.bags(data["square"]),
        ]
        return torch.stack([out.sin() * (n + 1) for n, out in enumerate(outs)], 1)


def lookup_data(samples, seed):
    """Bags of 0 to 4 ids with repetitions, and ids [samples, FIELDS]."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (samples,), generator=draw)
    count = int(lengths.sum())
    ids = torch.randint(0, ROWS, (count,), generator=draw)
    ids[1:] = (
        torch.where(torch.rand(max(0, count - 1), generator=draw) < 0.3, ids[:-1], ids[1:])
        if count > 1
        else ids[1:]
    )
    return {
        "lengths": lengths,
        "ids": ids,
        "weights": torch.rand(count, generator=draw, dtype=torch.float64),
        "square": torch.randint(0, ROWS, (samples, FIELDS), generator=draw),
        "factors": torch.rand(samples, FIELDS, generator=draw, dtype=torch.float64),
    }


def with_offsets(data):
    lengths = data["lengths"]
    return data | {"offsets": lengths.cumsum(0) - lengths, "end": lengths.sum().reshape(1)}


def merged(batches):
    """The batches of all ranks as that of the serial run."""
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def shares(size, step=0):
    """Samples of each rank: uneven, and one has none."""
    return [(5, 0, 3, 7)[(rank + step) % 4] if size > 1 else 5 for rank in range(size)]


def table_names(model):
    return [
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]


def placements(model, way, size, *, travels="auto", skip=()):
    shapes = {n: tuple(model.get_parameter(n).shape) for n in table_names(model) if n not in skip}
    node = 2 if way in ("table_row", "grid") and size % 2 == 0 else None
    columns = 2 if way == "grid" and size % 2 == 0 else 0
    node = 1 if way == "grid" and node else node
    split = TableSplit(way=way, columns=columns, travels=travels)
    # A table of one column has no ranges of columns.
    narrow = [TableSplit(tables=n, way="row") for n, s in shapes.items() if s[1] == 1 and columns]
    return place_tables([*narrow, split], shapes, size, node=node)


def sum_dense(model, names, world):
    """What a run does with the gradients of all that is no table."""
    for name, parameter in model.named_parameters():
        if name in names or parameter.grad is None:
            continue
        torch.distributed.all_reduce(parameter.grad, group=world.group)


def compare(
    world, make, batches_of, way, *, travels="auto", touched=True, loss_of=None, streams=None
):
    """Largest differences of output and gradients between the split and the serial model."""
    torch.manual_seed(3)
    serial = make().double()
    split = copy.deepcopy(serial)
    names = table_names(serial)
    tables = split_tables(
        split, placements(serial, way, world.size, travels=travels), world.group,
        touched=names if touched else (), streams=streams,
    )  # fmt: skip
    batches = batches_of(world.size)
    loss_of = loss_of or (lambda out: (out * torch.linspace(0.5, 1, out.shape[-1])).square().sum())
    count = sum(len(batch["square"]) for batch in batches)
    whole = serial(with_offsets(merged(batches)))
    (loss_of(whole) / count).backward()
    mine = split(with_offsets(batches[world.rank]))
    (loss_of(mine) / count).backward()
    sum_dense(split, names, world)
    first = sum(len(batch["square"]) for batch in batches[: world.rank])
    found = {"output": differ(mine, whole[first : first + len(batches[world.rank]["square"])])}
    for name, parameter in serial.named_parameters():
        if name not in names:
            found[name] = differ(split.get_parameter(name).grad, parameter.grad)
            continue
        gradient = tables.parts[name].parameter.grad
        assert gradient.is_sparse == touched
        if touched:
            assert gradient.is_coalesced()
            gradient = gradient.to_dense()
        expected = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        found[name] = differ(tables.whole(name, gradient), expected)
    return found, tables


def after_steps(world, make, batches_of, way, optimizer, steps=5):
    """Largest differences of parameters after some steps, split and serial."""
    torch.manual_seed(3)
    serial = make().double()
    split = copy.deepcopy(serial)
    names = table_names(serial)
    tables = split_tables(split, placements(serial, way, world.size), world.group)
    serial_steps, split_steps = optimizer(serial.parameters()), optimizer(split.parameters())
    for step in range(steps):
        batches = batches_of(world.size, step)
        count = sum(len(batch["square"]) for batch in batches)
        for model, data, own in (
            (serial, merged(batches), serial_steps),
            (split, batches[world.rank], split_steps),
        ):
            own.zero_grad()
            (model(with_offsets(data)).tanh().square().sum() / count).backward()
            if model is split:
                sum_dense(split, names, world)
            own.step()
    held = dict(serial.named_parameters())
    return {
        name: differ(tables.whole(name, p.detach()) if name in names else p, held[name])
        for name, p in split.named_parameters()
    }


def differ(found, expected):
    if not expected.numel():
        return 0.0
    return float((found - expected).detach().abs().max())
