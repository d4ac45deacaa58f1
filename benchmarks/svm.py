"""Training of support vector machines: headway.svm.SVC against its peers, and against itself.

    python benchmarks/svm.py peers [--sets letter,kdd04,adult] [--rounds 3] [--without NAME,NAME]
    python benchmarks/svm.py elimination [--sets ...]      # on and off, and values computed
    python benchmarks/svm.py ranks [--sets kdd04]          # two ranks on the loopback against one
    python benchmarks/svm.py quality [--sets ...]          # objective, violation, predictions

Every fit is in a process of its own on one thread, in turn; a time is CPU seconds of `fit` alone,
with everything imported and compiled (a fit of a few samples goes before). Peers: scikit-learn's
SVC (libsvm), the same of scikit-learn-intelex, and thundersvm-cpu; those that do not run say why.
A fit is ended after `--limit` CPU seconds; its ratio is then "more than".
Radial basis functions; C and gamma, and where the sets come from, are in svm_sets.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import emulated
from svm_sets import SETS, Array, Set

FEW = 300


CACHE = 6000
"""MiB for scikit-learn's kernel rows where its solution is asked for, and not its time."""


def machine(name: str, data: Set, **more: Any) -> Any:
    options = {"C": data.c, "gamma": data.gamma, "kernel": "rbf", **more}
    if name.startswith("headway"):
        from headway.svm import SVC

        rule = name.partition(" ")[2]
        return SVC(**options, elimination=rule or "adaptive")
    if name == "scikit-learn":
        from sklearn.svm import SVC

        return SVC(**options)
    if name == "intelex":
        from sklearnex.svm import SVC

        return SVC(**options)
    from thundersvm import SVC

    return SVC(**options, n_jobs=1)


def one(name: str, of: str, limit: int) -> dict[str, Any]:
    """A fit: CPU and wall seconds, support vectors, and of headway what was computed."""
    import torch

    torch.set_num_threads(1)
    train, test = SETS[of]().split()
    machine(name, train).fit(train.rows[:FEW], train.labels[:FEW])
    made = machine(name, train)
    wall, cpu = time.perf_counter(), time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1 + limit, resource.RLIM_INFINITY))
    made.fit(train.rows, train.labels)
    found = {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "support": int(np.sum(made.n_support_)),
        "right": float(np.mean(made.predict(test.rows) == test.labels)),
    }
    if name.startswith("headway"):
        found |= {"values": made.machine_.values}
    return found


def in_process(name: str, of: str, limit: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                   "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "one", "--name", name, "--sets", of,
               "--limit", str(limit)]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return {"cpu": limit, "unfinished": True}
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2]}
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


def in_turn(names: list[str], of: str, rounds: int, limit: int) -> dict[str, list[dict[str, Any]]]:
    """Fits by contender, one of each in a round, in the other order in every other round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if not any("error" in fit or "unfinished" in fit for fit in found[name]):
                found[name].append(in_process(name, of, limit))
    return found


def compare(names: list[str], of: str, rounds: int, limit: int) -> None:
    """Print each contender's fits, and how many times as long as the first one's they take."""
    print(f"{of}, load {os.getloadavg()[0]:.1f}")
    found = in_turn(names, of, rounds, limit)
    for name, fits in found.items():
        if "error" in fits[-1]:
            print(f"  {name:18} does not run: {fits[-1]['error']}")
            continue
        if "unfinished" in fits[-1]:
            own = max(fit["cpu"] for fit in found[names[0]])
            print(
                f"  {name:18} not finished after {limit} CPU s: more than {limit / own:.0f} times"
            )
            continue
        seconds = [fit["cpu"] for fit in fits]
        ratios = [fit["cpu"] / own["cpu"] for fit, own in zip(fits, found[names[0]], strict=True)]
        values = f", {fits[0]['values'] / 1e9:.3f} G kernel values" if "values" in fits[0] else ""
        print(
            f"  {name:18} {statistics.median(seconds):8.2f} CPU s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {statistics.median(ratios):6.2f} times ({min(ratios):.2f} to "
            f"{max(ratios):.2f}), {fits[0]['support']} support vectors, right "
            f"{fits[0]['right']:.4f}{values}"
        )


def rank(_: emulated.World, of: str) -> dict[str, float]:
    """A fit by all ranks, each with its own stretch of the samples."""
    import torch.distributed as dist

    from headway.run.distributed.world import World
    from headway.svm.elimination import ADAPTIVE
    from headway.svm.kernels import Kernel
    from headway.svm.peers import Peers
    from headway.svm.solver import Share, Solver, SolverOptions

    train, _test = SETS[of]().split()
    peers = Peers(World.adopt())
    options = SolverOptions(Kernel("rbf", train.gamma), rule=ADAPTIVE)

    def fit(count: int) -> Solver:
        first, last = (count * (peers.rank + more) // peers.ranks for more in (0, 1))
        bounds = np.full(last - first, float(train.c))
        share = Share(train.rows[first:last], train.labels[first:last], bounds, first, count)
        solver = Solver(share, options, peers)
        for _progress in solver.run():
            pass
        return solver

    with peers:
        fit(FEW)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        solution = fit(len(train.labels)).solution()
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "objective": solution.objective,
            "outer": solution.outer,
            "sent": peers.sent,
        }


def ranks(of: str, rounds: int) -> None:
    print(f"{of}, load {os.getloadavg()[0]:.1f}")
    ratios, works = [], []
    for number in range(rounds):
        found = {}
        for count in (1, 2) if number % 2 == 0 else (2, 1):
            found[count] = emulated.run(
                body=rank, nodes=1, per_node=count, rate=None, arguments=(of,)
            )
        alone, both = found[1][0], found[2]
        wall = max(each["wall"] for each in both)
        cpu = max(each["cpu"] for each in both)
        ratios.append(alone["wall"] / wall)
        works.append(alone["cpu"] / cpu)
        print(
            f"  one rank {alone['wall']:.2f} s ({alone['cpu']:.2f} CPU s), two {wall:.2f} s "
            f"({cpu:.2f} CPU s each), {both[0]['outer']} outer steps, "
            f"{both[0]['sent'] / 1e6:.1f} MB sent; objectives differ by "
            f"{abs(alone['objective'] / both[0]['objective'] - 1):.1e}"
        )
    print(
        f"  two ranks are {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
        f"{max(ratios):.2f}); by CPU seconds of the busier one {statistics.median(works):.2f}"
    )


def quality(of: str) -> None:
    """Print what headway's solution is worth beside scikit-learn's, all made from scratch."""
    train, test = SETS[of]().split()
    found = {}
    for name in ("headway", "scikit-learn"):
        more = {"cache_size": CACHE} if name == "scikit-learn" else {}
        made = machine(name, train, **more).fit(train.rows, train.labels)
        alpha = np.zeros(len(train.labels))
        alpha[made.support_] = np.abs(np.asarray(made.dual_coef_.todense() if hasattr(
            made.dual_coef_, "todense") else made.dual_coef_)).ravel()  # fmt: skip
        found[name] = (*_from_scratch(train, alpha), made.predict(test.rows))
    ours, theirs = found["headway"], found["scikit-learn"]
    print(
        f"{of}: objective {ours[0]:.4f}, relative to scikit-learn's "
        f"{ours[0] / theirs[0] - 1:+.1e}; violation {ours[1]:.2e} (scikit-learn {theirs[1]:.2e}); "
        f"predictions agree on {np.mean(ours[2] == theirs[2]):.4%}"
    )


def _from_scratch(data: Set, alpha: Array) -> tuple[float, float]:
    """Dual objective and largest violation of all samples, in float64, chunk by chunk."""
    rows, labels = data.rows, data.labels
    squares = np.asarray(rows.multiply(rows).sum(axis=1)).ravel() if hasattr(
        rows, "multiply") else (rows * rows).sum(axis=1)  # fmt: skip
    kept = np.flatnonzero(alpha)
    gamma = -labels.copy()
    for first in range(0, len(labels), 1000):
        part = slice(first, first + 1000)
        products = rows[part] @ rows[kept].T
        products = products.toarray() if hasattr(products, "toarray") else products
        distances = squares[part, None] + squares[kept] - 2 * products
        gamma[part] += np.exp(-data.gamma * distances) @ (alpha * labels)[kept]
    positive, below, above = labels > 0, alpha < data.c, alpha > 0
    rising = np.where(positive, below, above)
    sinking = np.where(positive, above, below)
    objective = ((alpha * labels * gamma).sum() - alpha.sum()) / 2
    return float(objective), float(gamma[sinking].max() - gamma[rising].min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("peers", "elimination", "ranks", "quality", "one"))
    parser.add_argument("--sets", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", default="")
    parser.add_argument("--name", default="headway")
    parser.add_argument("--limit", type=int, default=900)
    options = parser.parse_args()
    default = {"peers": "letter,kdd04,adult", "ranks": "kdd04"}.get(options.what, ",".join(SETS))
    for of in (options.sets or default).split(","):
        if options.what == "one":
            print(json.dumps(one(options.name, of, options.limit)))
        elif options.what == "ranks":
            ranks(of, options.rounds)
        elif options.what == "quality":
            quality(of)
        else:
            names = ["headway", "scikit-learn", "intelex", "thundersvm"]
            if options.what == "elimination":
                names = ["headway", "headway none"]
            kept = [name for name in names if name not in options.without.split(",")]
            compare(kept, of, options.rounds, options.limit)


if __name__ == "__main__":
    main()
