"""Rows from all ranks to all ranks of one machine: `RowExchange` against Gloo's all_to_all_single.

    python benchmarks/rows.py [ranks [rounds [sizes ...]]]        # sizes of a pair as "1 KiB"

Uneven: rank a gives rank b (1 + (a + 2 b) mod 3) / 2 of the size. "plain": a tensor's parts to the
parts of another tensor; "look-up": rows of a table, by number, to a tensor (gathered into a tensor
for Gloo, into the region here). Gloo is told all sizes; channels find them out. Milliseconds,
medians within a round in which the methods take turns, then the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from headway.channel import RowExchange
from headway.units import parse_bytes

SIZES = ["1 KiB", "16 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"]
WIDTH = 64
"""Of a row, in float32: 256 bytes."""
TABLE = 20_000


class Methods:
    """The two ways for one size, each plain and as a look-up."""

    def __init__(self, nbytes: int, exchange: RowExchange) -> None:
        own, size = dist.get_rank(), dist.get_world_size()
        rows = max(2, nbytes // (4 * WIDTH))
        self.exchange = exchange
        self.gives = [(1 + (own + 2 * to) % 3) * rows // 2 for to in range(size)]
        self.takes = [(1 + (by + 2 * own) % 3) * rows // 2 for by in range(size)]
        self.source = torch.randn(sum(self.gives), WIDTH)
        self.result = torch.zeros(sum(self.takes), WIDTH)
        self.to = [slice(*ends) for ends in pairwise(accumulate(self.gives, initial=0))]
        self.by = [slice(*ends) for ends in pairwise(accumulate(self.takes, initial=0))]
        self.table = torch.randn(TABLE, WIDTH)
        self.ids = [torch.randint(0, TABLE, (count,)) for count in self.gives]
        self.all_ids = torch.cat(self.ids)

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            "gloo plain": self.gloo,
            "rows plain": self.rows,
            "gloo look-up": self.gloo_look_up,
            "rows look-up": self.rows_look_up,
        }

    def gloo(self) -> None:
        dist.all_to_all_single(self.result, self.source, self.takes, self.gives)

    def rows(self) -> None:
        self.exchange.swap(lambda to, _: self.source[self.to[to]], self.take)

    def take(self, by: int, came: torch.Tensor) -> None:
        self.result[self.by[by]].copy_(came)

    def gloo_look_up(self) -> None:
        torch.index_select(self.table, 0, self.all_ids, out=self.source)
        self.gloo()

    def rows_look_up(self) -> None:
        self.exchange.swap(
            lambda to, room: torch.index_select(
                self.table, 0, self.ids[to], out=room((self.gives[to], WIDTH), torch.float32)
            ),
            self.take,
        )

    def agree(self) -> None:
        """Both ways give the same, or this is no comparison."""
        for kind in ("plain", "look-up"):
            found = []
            for name in ("gloo", "rows"):
                self.result.zero_()
                self.ways()[f"{name} {kind}"]()
                found.append(self.result.clone())
            if not torch.equal(*found):
                raise SystemExit(f"{kind}: the two ways differ")


def measured(way: Callable[[], object], count: int) -> float:
    """Milliseconds, median; the slowest rank's."""
    seconds = []
    for number in range(count + 2):
        dist.barrier()
        start = time.perf_counter()
        way()
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    found = torch.tensor(statistics.median(seconds) * 1e3)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def work(rounds: int, sizes: list[str]) -> None:
    torch.set_num_threads(1)
    exchange = RowExchange()
    for size in sizes:
        methods = Methods(parse_bytes(size), exchange)
        methods.agree()
        ways = methods.ways()
        table: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                count = max(5, min(100, (64 << 20) // parse_bytes(size)))
                table[name].append(measured(ways[name], count))
        if dist.get_rank() == 0:
            report(size, table)
    exchange.close()


def report(size: str, table: dict[str, list[float]]) -> None:
    print(f"{size} of a pair, {dist.get_world_size()} ranks, load {os.getloadavg()[0]:.1f}")
    for kind in ("plain", "look-up"):
        gloo, own = table[f"gloo {kind}"], table[f"rows {kind}"]
        ratios = [g / o for g, o in zip(gloo, own, strict=True)]
        print(
            f"  {kind:8} Gloo {statistics.median(gloo):9.3f} ms, channels "
            f"{statistics.median(own):9.3f} ms: {statistics.median(ratios):.1f} times as fast "
            f"({min(ratios):.1f} to {max(ratios):.1f})",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, ranks, folder, rounds, *sizes = sys.argv[2:]
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(ranks)
        )
        work(int(rounds), sizes)
        dist.barrier()
        dist.destroy_process_group()
        return
    number = sys.argv[1] if len(sys.argv) > 1 else "2"
    rounds = sys.argv[2] if len(sys.argv) > 2 else "5"
    sizes = sys.argv[3:] or SIZES
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), number, folder, rounds, *sizes],
                env=environment,
            )
            for rank in range(int(number))
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
