"""A table that grows against a dict and against torch's embedding bag of fixed size; one core.

python benchmarks/dynamic_table.py --keys 50000000

A batch is of bags of uniformly drawn keys, the worst case for caches; drawing them is not counted.
*look up*: the sums of the bags, without gradients. *update*: forward, backward, and a step of SGD.
The three alternate; medians of processor time, with the spread of all rounds, and of the ratios to
the fixed table in the same round. THP_MEM_ALLOC_ENABLE=1 gives torch's table huge pages, which the
one that grows has anyway where the system has them. A dict (key -> NumPy row) of so many keys needs
more memory than there is, so that it has `--dict-keys`; it adds rows in a loop.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from headway.nn import DynamicEmbeddingBag

RATE = 0.1


def scattered(numbers: Tensor) -> Tensor:
    """Keys over all 64 bits, each number another one."""
    return numbers * -0x61C8864680B583EB + 12345


class Case:
    """A module, its optimiser, and the keys of a batch."""

    def __init__(self, bag: nn.Module, keys: Callable[[Tensor], Tensor]) -> None:
        self.bag, self.keys = bag, keys
        self.optimizer = torch.optim.SGD(bag.parameters(), lr=RATE)

    def look_up(self, keys: Tensor, given: Tensor) -> None:
        with torch.no_grad():
            self.bag.eval()(keys)

    def update(self, keys: Tensor, given: Tensor) -> None:
        vectors = self.bag.train()(keys)
        self.optimizer.zero_grad()
        vectors.backward(given)
        self.optimizer.step()


class Dict:
    """The same in a dict."""

    def __init__(self, size: int, dim: int) -> None:
        self.size = size
        names = scattered(torch.arange(size)).tolist()
        self.rows = {key: np.zeros(dim, dtype=np.float32) for key in names}

    def keys(self, numbers: Tensor) -> list[list[int]]:
        return scattered(numbers % self.size).tolist()  # type: ignore[no-any-return]

    def look_up(self, keys: list[list[int]], given: Tensor) -> None:
        for bag in keys:
            np.add.reduce([self.rows[key] for key in bag])

    def update(self, keys: list[list[int]], given: Tensor) -> None:
        self.look_up(keys, given)
        touched: dict[int, np.ndarray] = {}
        for bag, gradient in zip(keys, given.numpy(), strict=True):
            for key in bag:
                touched[key] = touched[key] + gradient if key in touched else gradient
        for key, gradient in touched.items():
            self.rows[key] -= RATE * gradient


def filled(keys: int, dim: int) -> tuple[DynamicEmbeddingBag, float]:
    """A table that has grown to so many keys, and the seconds that it took."""
    bag = DynamicEmbeddingBag(dim)
    start = time.process_time()
    for part in torch.arange(keys).split(1 << 20):
        bag.table.upsert(scattered(part), torch.zeros(len(part), dim))
    return bag, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--dict-keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bags", type=int, default=4096)
    parser.add_argument("--each", type=int, default=16, help="keys of a bag")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    grown, seconds = filled(options.keys, options.dim)
    print(f"{options.keys / seconds:,.0f} new rows per second; largest step of growth included")
    fixed = nn.EmbeddingBag(
        options.keys, options.dim, mode="sum", sparse=True,
        _weight=torch.zeros(options.keys, options.dim),
    )  # fmt: skip
    cases: dict[str, Case | Dict] = {
        "grows": Case(grown, scattered),
        "fixed": Case(fixed, lambda numbers: numbers),
        "dict": Dict(min(options.keys, options.dict_keys), options.dim),
    }
    given = torch.randn(options.bags, options.dim)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds + 2):
        for action in ("look_up", "update"):
            for name in random.sample(sorted(cases), len(cases)):
                if name == "dict" and number % 10:
                    continue
                numbers = torch.randint(0, options.keys, (options.bags, options.each))
                keys = cases[name].keys(numbers)
                start = time.process_time()
                getattr(cases[name], action)(keys, given)
                if number >= 2 or name == "dict":
                    times.setdefault((name, action), []).append(time.process_time() - start)
    ids = options.bags * options.each
    for action in ("look_up", "update"):
        base = times["fixed", action]
        for name in cases:
            own = times[name, action]
            middle = statistics.median(own)
            rest = base if len(own) == len(base) else [statistics.median(base)] * len(own)
            share = statistics.median(b / o for b, o in zip(rest, own, strict=True))
            print(
                f"{action:8} {name:6} {ids / middle:14,.0f} keys/s  {middle * 1e3:8.2f} ms "
                f"({min(own) * 1e3:.2f} to {max(own) * 1e3:.2f})  {share:.2f} of fixed"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak of memory {peak:.1f} GiB, of which the fixed table "
          f"{options.keys * options.dim * 4 / 2**30:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
