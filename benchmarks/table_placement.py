"""Placement of embedding tables against TorchRec's planner, on TorchRec's own cost model.

    python benchmarks/table_placement.py [INSTANCES]

Random instances of 26 tables, as large and as often looked up as Criteo's, on 8 ranks with scarce
to ample memory. Both planners choose among the same ways, kernels and ranks; the time of a step is
that of the slowest rank, as TorchRec adds it up, and its estimates of all shards are compared, too.
Needs torchrec and fbgemm-gpu-cpu (see docs/table-placement.md); nothing is trained.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import warnings
from time import perf_counter

from headway.planner.tables.demand import TableDemand
from headway.planner.tables.solve import Shortage, solve
from headway.planner.tables.torchrec import Topology, shard_cost, torchrec_problem

TABLES, RANKS, LEAST_COLUMNS = 26, 8, 32


def instance(seed: int) -> tuple[list[TableDemand], int, int]:
    """Tables, and bytes of HBM and of DDR of a rank."""
    draw = random.Random(seed)
    tables = [
        TableDemand(
            table=f"t{number}",
            rows=int(10 ** draw.uniform(1, 7.6)),
            columns=draw.choice([16, 32, 64, 128, 128, 256]),
            bag=draw.choice([1, 1, 1, 2, 5, 10, 20, 50.5]),
        )
        for number in range(TABLES)
    ]
    size = sum(table.bytes for table in tables)
    share = draw.choice([0.2, 0.5, 1.1, 1.5, 3.0])
    return tables, int(max(share * size / RANKS, 1.5 * 2**30)), int(size / 2) + 2**33


def torchrec_plan(tables: list[TableDemand], hbm: int, ddr: int) -> tuple[float, float, float]:
    """Milliseconds of a step of its best plan, seconds of planning, and the largest relative
    difference between its estimates of shards and ours."""
    import torch
    import torchrec.distributed.planner as planner
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.storage_reservations import (
        FixedPercentageStorageReservation,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=table.table,
            embedding_dim=table.columns,
            num_embeddings=table.rows,
            feature_names=[table.table],
        )
        for table in tables
    ]
    model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    constraints = {
        table.table: planner.ParameterConstraints(
            min_partition=LEAST_COLUMNS, pooling_factors=[table.bag]
        )
        for table in tables
    }
    machine = planner.Topology(RANKS, "cuda", local_world_size=RANKS, hbm_cap=hbm, ddr_cap=ddr)
    sharders = [EmbeddingBagCollectionSharder()]
    theirs = planner.EmbeddingShardingPlanner(
        topology=machine,
        batch_size=512,
        constraints=constraints,
        debug=False,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
    )
    begin = perf_counter()
    theirs.plan(model, sharders)
    seconds = perf_counter() - begin
    options = EmbeddingEnumerator(topology=machine, batch_size=512, constraints=constraints)
    named = {table.table: table for table in tables}
    topology = Topology(ranks=RANKS, local=RANKS)
    apart = 0.0
    for option in options.enumerate(model, sharders):
        way, kernel = option.sharding_type, option.compute_kernel
        for shard in option.shards:
            ours = shard_cost(named[option.name], way, kernel, tuple(shard.size), topology)
            apart = max(apart, abs(ours.total / shard.perf.total - 1.0))
            if (ours.hbm, ours.ddr) != (shard.storage.hbm, shard.storage.ddr):
                raise AssertionError(f"{option.name} {way} {kernel}: other bytes than TorchRec's")
    return NoopPerfModel(machine).rate(theirs._best_plan), seconds, apart


def main(instances: int) -> int:
    """Print a line for each instance; 1 where TorchRec's plan is better in any."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    print("instance  TorchRec ms  in s    ours ms  in s   gap at most  TorchRec / ours")
    ratios, slowest, apart = [], 0.0, 0.0
    for seed in range(instances):
        tables, hbm, ddr = instance(seed)
        theirs, planned, differs = torchrec_plan(tables, hbm, ddr)
        apart = max(apart, differs)
        topology = Topology(ranks=RANKS, local=RANKS, hbm=hbm, ddr=ddr)
        begin = perf_counter()
        ours = solve(torchrec_problem(tables, topology, least_columns=LEAST_COLUMNS))
        seconds = perf_counter() - begin
        assert not isinstance(ours, Shortage)  # TorchRec has found a plan
        ratios.append(theirs / (1000 * ours.seconds))
        slowest = max(slowest, seconds)
        print(
            f"{seed:8}  {theirs:11.4f} {planned:5.1f} {1000 * ours.seconds:10.4f} {seconds:5.1f} "
            f"{ours.gap:13.1%} {ratios[-1]:16.3f}",
            flush=True,
        )
    print(
        f"TorchRec's step takes {statistics.median(ratios):.3f} times as long in the median, "
        f"{min(ratios):.3f} to {max(ratios):.3f}; ours is planned in {slowest:.1f} s at most; "
        f"estimates of shards differ by {apart:.1e}"
    )
    return int(min(ratios) < 1.0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
