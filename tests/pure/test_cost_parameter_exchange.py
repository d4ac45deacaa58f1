"""pure: closed forms of an exchange: rational arithmetic, figure 14, the simulator, a lemma."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from headway.cost import parameter_exchange as forms
from headway.cost.parameter_exchange import WholeModelTimes
from headway.planner.guidelines.zou import parameter_servers
from headway.plans import Synchrony
from headway.simulator.synchrony import VirtualMachines, simulate_run
from headway.synchrony.actors import Address, Gradient
from headway.synchrony.programs import make_run
from support.golden import check_golden
from support.plain_replicas import Descent, Shares

Form = Callable[[WholeModelTimes[Fraction], int], Fraction]
T, R, U = (
    Fraction(1),
    Fraction(1, 1000),
    Fraction(1, 10**6),
)  # so that each factor can be read from the sum
TIMES = WholeModelTimes(transmit=T, reduce=R, update=U)
PATTERNS: dict[str, Form] = {
    "single server": forms.single_server,
    "binomial tree": forms.binomial_tree,
    "scatter-reduce, one server": forms.scatter_reduce,
    "asynchronous, all workers": forms.asynchronous_workers,
    "colocated servers": forms.colocated_servers,
    "recursive doubling": forms.recursive_doubling,
    "ring": forms.ring,
}


@pytest.mark.parametrize(
    ("form", "workers", "transmits", "reduces", "updates"),
    [
        (forms.single_server, 1, 2, 0, 1),
        (forms.single_server, 4, 8, 3, 1),
        (forms.binomial_tree, 3, 4, 2, 1),
        (forms.binomial_tree, 4, 6, 2, 1),
        (forms.binomial_tree, 8, 8, 3, 1),
        (forms.scatter_reduce, 1, 2, 0, 1),
        (forms.scatter_reduce, 4, Fraction(7, 2), Fraction(3, 4), 1),
        (forms.asynchronous_workers, 4, 4, 0, 1),
        (forms.colocated_servers, 4, Fraction(3, 2), Fraction(3, 4), Fraction(1, 4)),
        (forms.recursive_doubling, 4, 2, 2, 1),
        (forms.recursive_doubling, 5, 3, 3, 1),
        (forms.ring, 4, Fraction(3, 2), Fraction(3, 4), 1),
        (forms.ring, 1, 0, 0, 1),
    ],
)
def test_the_factors_of_each_form(
    form: Form, workers: int, transmits: Fraction, reduces: Fraction, updates: Fraction
) -> None:
    assert form(TIMES, workers) == transmits * T + reduces * R + updates * U


def test_the_forms_agree_where_they_must() -> None:
    assert forms.asynchronous_worker(TIMES) == forms.single_server(TIMES, 1) == 2 * T + U
    assert forms.sharded_servers(TIMES, 6, 3) == forms.single_server(TIMES, 6) / 3
    assert forms.traffic_per_local_step(Fraction(100), 8) == Fraction(25, 2)
    for workers in range(1, 40):
        ring, colocated = forms.ring(TIMES, workers), forms.colocated_servers(TIMES, workers)
        assert ring - colocated == U * Fraction(workers - 1, workers)
        assert forms.scatter_reduce(TIMES, workers) - ring == 2 * T
    for wrong in (forms.ring, forms.single_server, forms.binomial_tree):
        with pytest.raises(ValueError, match="workers is 0; at least 1"):
            wrong(TIMES, 0)


# Langer et al. 2020, figure 14: MiB of parameters, seconds of a gradient, samples of a batch.
MODELS = {
    "ResNet-110": (Fraction(67, 10), Fraction(9, 100), 64),
    "VGG-A": (Fraction(491), Fraction(45, 100), 50),
    "ResNet-152": (Fraction(223), Fraction(77, 100), 32),
}
MIB = 1024**2
LINKS = {"10G Ethernet": Fraction(10**10, 8), "InfiniBand QDR": Fraction(32 * 10**9, 8)}
REDUCE_RATE, UPDATE_RATE = 10 * 1024**3, 2 * 1024**3


def figure_14() -> str:
    """Milliseconds of an exchange, and samples/s of 16 workers that compute and then exchange."""
    lines = []
    for model, (size, gradient, batch) in MODELS.items():
        for link, rate in LINKS.items():
            size_bytes = size * MIB
            times = WholeModelTimes(
                transmit=size_bytes / rate,
                reduce=size_bytes / REDUCE_RATE,
                update=size_bytes / UPDATE_RATE,
            )
            lines.append(f"{model}, {link}")
            for name, form in PATTERNS.items():
                for workers in (2, 4, 16):
                    seconds = form(times, workers)
                    throughput = workers * batch / (gradient + seconds)
                    lines.append(
                        f"  {name:<27}n {workers:>2}  {float(1000 * seconds):>10.3f} ms  "
                        f"{float(throughput):>9.2f} samples/s"
                    )
    return "\n".join(lines) + "\n"


def test_the_three_models_of_the_papers_figure() -> None:
    check_golden("cost/figure_14.txt", figure_14())


def nothing(worker: int, step: int, value: Any) -> Gradient:
    return Gradient((0.0,))


def per_step(synchrony: Synchrony, workers: int, update: float, *, together: bool) -> float:
    """Seconds of a step on a star: the server is a rank of its own, whose link all workers share.

    Args:
        together: Whoever gets the parameters earlier computes longer, so that nobody sends before
            all have received, as the form of synchronous steps has it.
    """

    def seconds(steps: int) -> float:
        run = make_run(synchrony, [Shares((0.0,)) for _ in range(workers)], [Descent(0.0)])
        run.places[Address("server")] = workers
        machines = VirtualMachines(
            compute=lambda worker, step: float(together * (workers - 1 - worker)),
            wire=1.0,
            update=update,
        )
        return simulate_run(run, machines, steps=steps, gradient=nothing).seconds

    return (seconds(41) - seconds(1)) / 40


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_the_simulator_has_the_single_servers_form_on_a_star(workers: int) -> None:
    """R and U small against T: the simulator overlaps a reduction with what arrives next."""
    times = WholeModelTimes(transmit=1.0, reduce=0.005, update=0.005)
    found = per_step(Synchrony(topology="single"), workers, 0.005, together=True)
    assert found == pytest.approx(forms.single_server(times, workers), rel=0.01)
    overlapped = per_step(Synchrony(topology="single"), workers, 0.005, together=False)
    assert overlapped == pytest.approx(workers + 1, rel=0.01)


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_the_simulator_has_the_asynchronous_forms_on_a_star(workers: int) -> None:
    synchrony = Synchrony(kind="asynchronous", topology="single")
    times = WholeModelTimes(transmit=1.0, reduce=0.0, update=0.01)
    alone = forms.asynchronous_worker(times)
    # What comes overlaps what goes from two workers on; one alone does one after the other.
    form = alone if workers == 1 else forms.asynchronous_workers(times, workers)
    found = per_step(synchrony, workers, 0.01, together=False)
    assert found == pytest.approx(form, rel=0.01)


@pytest.mark.parametrize(
    ("size", "rate", "compute", "workers", "servers"),
    [
        (244e6, 1.25e9, 0.5, 4, 4),
        (244e6, 1.25e9, 0.5, 8, 7),
        (552e6, 1.25e9, 2.0, 16, 8),
    ],
)
def test_the_lemmas_servers_hide_the_traffic_of_the_closed_form(
    size: float, rate: float, compute: float, workers: int, servers: int
) -> None:
    times = WholeModelTimes(transmit=size / rate, reduce=0.0, update=0.0)
    found, exact = parameter_servers(size, workers, rate, compute)
    assert found == servers
    assert forms.sharded_servers(times, workers, found) <= compute
    assert forms.sharded_servers(times, workers, found - 1) > compute
    assert exact == pytest.approx(forms.single_server(times, workers) / compute)
