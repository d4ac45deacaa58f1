"""A step of DLRM on two ranks: headway's split tables against TorchRec and DDP, in turn.

    python benchmarks/recommenders.py [--shape small|large] [--rate "100 Mbit/s"] [--rounds 15]
        [--only NAME,NAME] [--without NAME,NAME]

All of them live in the same two processes, one thread each, and take turns, a few steps at a time;
the order is reversed in every other round. A time is that of the slower rank. With --rate (root)
each rank is on a node of its own behind an emulated link, and the bytes of a step are what its
interface has sent. Samples are per rank; ids are uniform; SGD. TorchRec (1.8.0 with
fbgemm-gpu-cpu 1.8.0; `pip install --no-deps torchrec fbgemm-gpu-cpu==1.8.0`, and what its imports
ask for) has its fused optimiser, its planner with one sharding type, and its batches as it wants
them, made beforehand; "pipelined" is its TrainPipelineSparseDist. Those that do not run say why.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import emulated
import headway
from headway.plans import LayerSplit, data_parallel
from headway.plans.tables import TableSplit, Way
from headway.units import parse_rate

FEATURES, RATE = 13, 0.01
Step = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A DLRM. `batch` is that of one rank; widths are those of the layers' outputs."""

    tables: int
    rows: int
    columns: int
    ids: int
    batch: int
    bottom: tuple[int, ...]
    over: tuple[int, ...]
    steps: int

    @property
    def dots(self) -> int:
        return self.tables * (self.tables + 1) // 2


SHAPES = {
    "small": Shape(8, 50_000, 64, 4, 256, (128, 64), (256, 64, 1), steps=20),
    "large": Shape(8, 100_000, 64, 10, 1024, (512, 64), (1024, 1024, 1024, 1), steps=3),
}


@dataclass(frozen=True)
class Batch:
    """Dense features [samples, 13], ids [tables, samples, ids per bag], labels [samples]."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


def batches(shape: Shape, rank: int, count: int = 8) -> list[Batch]:
    draw = torch.Generator().manual_seed(1000 + rank)
    return [
        Batch(
            torch.randn(shape.batch, FEATURES, generator=draw),
            torch.randint(shape.rows, (shape.tables, shape.batch, shape.ids), generator=draw),
            torch.randint(2, (shape.batch,), generator=draw).float(),
        )
        for _ in range(count)
    ]


def forever(values: list[Any]) -> Iterator[Any]:
    while True:
        yield from values


# The model that DDP and headway train --------------------------------------------------------


def layers(width: int, widths: tuple[int, ...], *, last: bool) -> nn.Sequential:
    found: list[nn.Module] = []
    for number, size in enumerate(widths):
        found.append(nn.Linear(width, size))
        if not (last and number == len(widths) - 1):
            found.append(nn.ReLU())
        width = size
    return nn.Sequential(*found)


class ClickModel(nn.Module):
    """Bottom layers, bags, dots of all pairs, layers over them: a logit for each sample."""

    def __init__(self, shape: Shape, *, sparse: bool = False) -> None:
        super().__init__()
        self.bottom = layers(FEATURES, shape.bottom, last=False)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(shape.rows, shape.columns, mode="sum", sparse=sparse)
            for _ in range(shape.tables)
        )
        for table in self.tables:
            nn.init.uniform_(table.weight, -(shape.rows**-0.5), shape.rows**-0.5)
        self.over = layers(shape.columns + shape.dots, shape.over, last=True)
        above = torch.triu_indices(shape.tables + 1, shape.tables + 1, offset=1)
        self.register_buffer("above", above, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """`ids`: [samples, tables, ids per bag]."""
        bags = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return self.over_bags(dense, bags)

    def over_bags(self, dense: Tensor, bags: list[Tensor]) -> Tensor:
        """All but the tables."""
        x = self.bottom(dense)
        vectors = torch.stack([x, *bags], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        return self.over(torch.cat([x, dots[:, self.above[0], self.above[1]]], dim=1))[:, 0]


cross_entropy = nn.functional.binary_cross_entropy_with_logits


# Peers ---------------------------------------------------------------------------------------


def ddp(shape: Shape, rank: int, *, sparse: bool) -> Step:
    torch.manual_seed(0)
    model = DistributedDataParallel(ClickModel(shape, sparse=sparse), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    given = forever(
        [(b.dense, b.ids.transpose(0, 1).contiguous(), b.labels) for b in batches(shape, rank)]
    )

    def step() -> None:
        dense, ids, labels = next(given)
        optimizer.zero_grad()
        cross_entropy(model(dense, ids), labels).backward()
        optimizer.step()

    return step


def torchrec(shape: Shape, rank: int, *, kind: str, pipelined: bool = False) -> Step:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.streamable import Pipelineable

    torch.manual_seed(0)
    device, world = torch.device("cpu"), dist.get_world_size()
    names = [f"t{n}" for n in range(shape.tables)]
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=shape.columns,
                num_embeddings=shape.rows,
                feature_names=[f"f_{name}"],
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
    model = DLRMTrain(
        DLRM(tables, FEATURES, list(shape.bottom), list(shape.over), dense_device=device)
    )
    if kind != "data_parallel":
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": RATE})
    constraint: dict[str, Any] = {"sharding_types": [kind]}
    if kind == "column_wise":
        constraint["min_partition"] = shape.columns // world
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={name: ParameterConstraints(**constraint) for name in names},
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    plan = planner.plan(model, sharders)  # each rank finds the same; a refusal reaches both
    split = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(split.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )

    class Given(Pipelineable):
        """A batch that a pipeline can move."""

        def __init__(self, batch: Batch) -> None:
            self.dense_features, self.labels = batch.dense, batch.labels
            self.sparse_features = KeyedJaggedTensor(
                keys=[f"f_{name}" for name in names],
                values=batch.ids.reshape(-1),
                lengths=torch.full((shape.tables * shape.batch,), shape.ids, dtype=torch.int64),
                stride=shape.batch,
            )

        def to(self, *_: Any, **__: Any) -> Given:
            return self

        def record_stream(self, _: Any) -> None: ...

        def pin_memory(self) -> Given:
            return self

    given = forever([Given(b) for b in batches(shape, rank)])
    if pipelined:
        pipeline = TrainPipelineSparseDist(split, optimizer, device)
        return lambda: pipeline.progress(given)

    def step() -> None:
        batch = next(given)
        optimizer.zero_grad()
        loss, _ = split(batch)
        loss.backward()
        optimizer.step()

    return step


PEERS: dict[str, Callable[[Shape, int], Step]] = {
    "TorchRec table_wise": lambda s, r: torchrec(s, r, kind="table_wise"),
    "TorchRec table_wise, pipelined": lambda s, r: torchrec(
        s, r, kind="table_wise", pipelined=True
    ),
    "TorchRec column_wise": lambda s, r: torchrec(s, r, kind="column_wise"),
    "TorchRec data_parallel": lambda s, r: torchrec(s, r, kind="data_parallel"),
    "TorchRec row_wise": lambda s, r: torchrec(s, r, kind="row_wise"),
    "DDP sparse": lambda s, r: ddp(s, r, sparse=True),
    "DDP dense": lambda s, r: ddp(s, r, sparse=False),
}


# headway -------------------------------------------------------------------------------------


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Samples of all ranks, a global batch of theirs behind the other."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        kept = [batches(shape, rank) for rank in range(ranks)]
        drawn = [batch for same in zip(*kept, strict=True) for batch in same]
        self._dense = torch.cat([b.dense for b in drawn])
        self._ids = torch.cat([b.ids for b in drawn], dim=1).transpose(0, 1).contiguous()
        self._labels = torch.cat([b.labels for b in drawn])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._dense[number], self._ids[number], self._labels[number]


def logistic(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    dense, ids, labels = batch
    return cross_entropy(model(dense, ids), labels)


def own(shape: Shape, way: Way) -> Step:
    torch.manual_seed(0)
    model, ranks = ClickModel(shape), dist.get_world_size()
    plan = data_parallel(
        shape.batch * ranks, processes=ranks, split=LayerSplit(tables=TableSplit(way=way))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    run = headway.Executor(model, optimizer, loss=logistic, plan=plan)
    given = forever(list(run.batches(Clicks(shape, ranks))))
    return lambda: run.step(next(given))


OWN: dict[str, Callable[[Shape, int], Step]] = {
    f"headway {way}": lambda s, _, way=way: own(s, way)
    for way in ("table", "column", "copies", "row", "hash")
}


# The limit -----------------------------------------------------------------------------------


def alone(shape: Shape, rank: int) -> Step:
    """What no split of tables can save: dense layers, dots and their update; nothing travels."""
    torch.manual_seed(0)
    model = ClickModel(replace(shape, rows=1))
    parameters = [*model.bottom.parameters(), *model.over.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    bags = [torch.randn(shape.batch, shape.columns, requires_grad=True) for _ in model.tables]
    given = forever(batches(shape, rank))

    def step() -> None:
        batch = next(given)
        optimizer.zero_grad()
        cross_entropy(model.over_bags(batch.dense, bags), batch.labels).backward()
        optimizer.step()

    return step


LIMIT: dict[str, Callable[[Shape, int], Step]] = {"dense layers alone": alone}


# Measuring -----------------------------------------------------------------------------------


@dataclass
class Found:
    """Of one contender, per round: seconds, CPU seconds of this rank; bytes sent per step."""

    seconds: list[float]
    cpu: list[float]
    sent: list[float]
    problem: str = ""


def measured(world: Any, name: str, rounds: int, names: list[str]) -> dict[str, Found]:
    """Times of all contenders, in turn."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    shape = SHAPES[name]
    contenders = {**LIMIT, **PEERS, **OWN}
    found = {n: Found([], [], []) for n in names}
    steps: dict[str, Step] = {}
    for n in names:
        try:
            steps[n] = contenders[n](shape, world.rank)
            turn(world, steps[n], 3)
        except Exception as problem:  # all ranks meet the same: it is the configuration's
            steps.pop(n, None)
            found[n].problem = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
            if os.environ.get("TRACE") and not world.rank:
                traceback.print_exc()
    for number in range(rounds):
        for n in list(steps)[:: 1 if number % 2 else -1]:
            slow = n in ("DDP dense", "TorchRec data_parallel") and world.emulated
            if slow and number >= 2:
                continue
            seconds, cpu, sent = turn(world, steps[n], 1 if slow else shape.steps)
            found[n].seconds.append(seconds)
            found[n].cpu.append(cpu)
            found[n].sent.append(sent)
    return found


def turn(world: Any, step: Step, count: int) -> tuple[float, float, float]:
    """Seconds of a step on the slower rank; CPU seconds of a step here; bytes sent from here."""
    dist.barrier()
    before, cpu, start = world.counters()[0], time.process_time(), time.perf_counter()
    for _ in range(count):
        step()
    seconds = torch.tensor(time.perf_counter() - start)
    spent = time.process_time() - cpu
    dist.barrier()
    sent = world.counters()[0] - before
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds) / count, spent / count, sent / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rate")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    chosen = parser.parse_args()
    names = [
        name
        for name in {**LIMIT, **PEERS, **OWN}
        if any(part in name for part in chosen.only.split(","))
        and not (chosen.without and any(part in name for part in chosen.without.split(",")))
    ]
    done = emulated.run(
        nodes=2 if chosen.rate else 1, per_node=1 if chosen.rate else 2, rate=chosen.rate,
        body=measured, arguments=(chosen.shape, chosen.rounds, names), timeout=3000.0,
    )  # fmt: skip
    print(
        f"{chosen.shape}, {chosen.rate or 'loopback'}, {SHAPES[chosen.shape]}, "
        f"load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )
    first: dict[str, Found] = done[0]
    for name, at in first.items():
        if at.problem:
            print(f"  {name:31} does not run: {at.problem}")
            continue
        cpu = statistics.mean(statistics.median(rank[name].cpu) for rank in done)
        line = f"  {name:31} {1e3 * statistics.median(at.seconds):8.1f} ms "
        line += f"({1e3 * min(at.seconds):.1f} to {1e3 * max(at.seconds):.1f})"
        line += f", {1e3 * cpu:6.1f} ms CPU"
        if chosen.rate:
            sent = statistics.median(at.sent)
            link = sent / parse_rate(chosen.rate)
            line += f", {sent / 1e6:6.3f} MB: {1e3 * link:.1f} ms of the link"
        print(line)
    for mine in (n for n in first if n in OWN and not first[n].problem):
        for other in (n for n in first if n != mine and not first[n].problem):
            ratios = sorted(map(truediv, first[other].seconds, first[mine].seconds))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(
                f"  {mine} is {statistics.median(ratios):.2f} times as fast as {other}"
                f" (quartiles {low:.2f}, {high:.2f}; {len(ratios)} pairs)"
            )


if __name__ == "__main__":
    main()
