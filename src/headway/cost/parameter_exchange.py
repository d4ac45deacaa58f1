"""How long one full exchange of parameters takes at least: closed forms of the taxonomy.

Source: Langer et al. 2020 (A Taxonomy of Parallel Training, TPDS 31(12)), section 5 and figure 14.
n workers; T, R and U are the seconds in which all parameters are transmitted over one link,
reduced, and updated. There is no latency, and nothing overlaps except where a form says so. How
many servers hide their traffic is `planner.guidelines.zou.parameter_servers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

NumberT = TypeVar("NumberT", float, Fraction)


@dataclass(frozen=True, kw_only=True)
class WholeModelTimes(Generic[NumberT]):
    """Of one model on some links.

    Attributes:
        transmit: T, in seconds.
        reduce: R.
        update: U.
    """

    transmit: NumberT
    reduce: NumberT
    update: NumberT


def sharded_servers(times: WholeModelTimes[NumberT], workers: int, servers: int) -> NumberT:
    """(2n T + (n-1) R + U) / k: k servers, each with 1/k of the parameters and a link of its own,
    take from every worker in turn and answer it; k = 1 is the single server.

    Raises:
        ValueError: There is no worker or no server.
    """
    _check(workers=workers, servers=servers)
    whole = 2 * workers * times.transmit + (workers - 1) * times.reduce + times.update
    return whole / servers


def single_server(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """2n T + (n-1) R + U: one synchronous server, one worker after the other."""
    return sharded_servers(times, workers, 1)


def binomial_tree(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """2 ceil(log2(n+1)) T + ceil(log2 n) R + U: to one server and back along a binomial tree."""
    _check(workers=workers)
    rounds, sums = _doublings(workers + 1), _doublings(workers)
    return 2 * rounds * times.transmit + sums * times.reduce + times.update


def scatter_reduce(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """(2 + 2 (n-1)/n) T + (n-1)/n R + U: workers reduce shares, one server gathers them."""
    _check(workers=workers)
    shared = (2 * times.transmit + times.reduce) * (workers - 1) / workers
    return 2 * times.transmit + shared + times.update


def asynchronous_worker(times: WholeModelTimes[NumberT]) -> NumberT:
    """2 T + U: a worker of an asynchronous server that nobody else uses."""
    return 2 * times.transmit + times.update


def asynchronous_workers(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """n T + U: all workers of an asynchronous server, what comes overlapping what goes."""
    _check(workers=workers)
    return workers * times.transmit + times.update


def colocated_servers(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """2 (n-1)/n T + (n-1)/n R + U/n: a server at each worker, for one share each."""
    _check(workers=workers)
    shared = (2 * times.transmit + times.reduce) * (workers - 1) / workers
    return shared + times.update / workers


def recursive_doubling(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """ceil(log2 n) (T + R) + U: a replicated server; pairs exchange all parameters."""
    _check(workers=workers)
    return _doublings(workers) * (times.transmit + times.reduce) + times.update


def ring(times: WholeModelTimes[NumberT], workers: int) -> NumberT:
    """2 (n-1)/n T + (n-1)/n R + U: a replicated server; an all-reduce along a ring."""
    _check(workers=workers)
    return (2 * times.transmit + times.reduce) * (workers - 1) / workers + times.update


def traffic_per_local_step(parameters: NumberT, local_steps: int) -> NumberT:
    """|w| / tau: what decentral training sends for each step, in the unit of `parameters`."""
    _check(local_steps=local_steps)
    return parameters / local_steps


def _doublings(number: int) -> int:
    """ceil(log2 number)."""
    return (number - 1).bit_length()


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; at least 1")
