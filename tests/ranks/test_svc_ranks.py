"""ranks: SVC in a world, its own workers, deaths of workers, and bad samples of one rank."""

from __future__ import annotations

import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from scipy import sparse
from sklearn.datasets import load_digits, make_classification
from sklearn.exceptions import ConvergenceWarning

from headway.channel import shared_memory
from headway.errors import WorkerFailed
from headway.run.distributed.world import World
from headway.svm import SVC
from headway.svm.kernels import Kernel
from headway.svm.local_workers import RestartWarning
from headway.svm.peers import Peers
from headway.svm.solver import Share, Solver, SolverOptions
from headway.svm.training import TrainingOptions, digest_training
from support.commands import command, warm_variables
from support.ranks import run_ranks
from support.svm_oracle import checked_machine

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

NOISY = make_classification(120, 6, n_classes=2, n_informative=4, class_sep=0.7, random_state=4)
THREE = make_classification(90, 6, n_classes=3, n_informative=4, random_state=1)
DIGITS = load_digits(n_class=4, return_X_y=True)
DIGITS = (DIGITS[0][:200] / 16, DIGITS[1][:200])


def gaussian(rows, others):
    return np.exp(-0.1 * ((rows[:, None] - others[None]) ** 2).sum(axis=2))


def own_rows(world, X, y, *more):
    """This rank's part: the first one has fewer rows than the others."""
    edges = np.linspace(0, 1, world.size + 1) ** 1.2 * len(y)
    part = slice(int(edges[world.rank]), int(edges[world.rank + 1]))
    return tuple(array[part] for array in (X, y, *more))


# -- identical iterates ------------------------------------------------------------------------

# As few samples as come back after gamma was reconstructed; a step is two messages.
PAIRS = [
    ("default", NOISY, 40, {}),
    ("linear", NOISY, 90, {"kernel": "linear", "C": 0.1, "elimination": "multi2"}),
    ("sparse", NOISY, 90, {"kernel": "linear", "C": 0.1, "elimination": "single2"}),
    ("three", THREE, 60, {"elimination": "multi5pc"}),
]


def fits_by_pairs(world):
    found = []
    for name, (X, y), count, words in PAIRS:
        rows = sparse.csr_matrix(X[:count]) if name == "sparse" else X[:count]
        model = SVC(working_set=2, **words).fit(*own_rows(world, rows, y[:count]))
        again = [pair.reconstructions for pair in model.machine_.pairs]
        found.append(
            (
                model.support_,
                model.machine_.coefficients,
                model.n_iter_,
                np.array(model.machine_.kernel.gamma),
                again,
                model.decision_function(X),
            )
        )
    return found


def test_iterates_of_pairs_are_the_same_on_any_number_of_ranks():
    alone, *others = (run_ranks(size, fits_by_pairs, timeout=120) for size in (1, 2, 3))
    assert all(max(fit[4]) >= 2 for fit in alone[0][:3])
    for world in others:
        for rank in world:
            for found, expected in zip(rank, alone[0], strict=True):
                for one, other in zip(found[:4], expected[:4], strict=True):
                    np.testing.assert_array_equal(one, other)
                np.testing.assert_allclose(found[5], expected[5], rtol=0, atol=1e-9)


# -- a world -----------------------------------------------------------------------------------

CASES = {
    "scale": (DIGITS, {"C": 5.0, "working_set": 16}),
    # Small enough for a table of all kernel values.
    "balanced": (THREE, {"class_weight": "balanced", "kernel": "poly"}),
    "callable": (NOISY, {"kernel": lambda rows, others: rows @ others.T}),
}


def fits(world):
    found = {}
    for name, ((X, y), words) in CASES.items():
        order = np.argsort(y, kind="stable")  # no rank has all classes
        weights = np.where(order % 5 == 0, 0.0, 1.0 + order % 3)
        X, y = X[order], y[order]
        for form in (np.asarray, sparse.csr_matrix) if name != "callable" else (np.asarray,):
            model = SVC(**words).fit(*own_rows(world, form(X), y, weights))
            model.decision_function_shape = "ovo"
            pairs = checked_machine(
                model.machine_,
                X,
                y,
                model.C * weights * model.class_weight_[np.searchsorted(model.classes_, y)],
                Kernel("linear") if name == "callable" else None,
            )
            assert max(pair.violation for pair in pairs) <= model.tol * (1 + 1e-6)
            found[name, form] = (
                model.machine_.objective,
                model.machine_.kernel.gamma,
                model.class_weight_,
                model.decision_function(X),
                model.shape_fit_,
            )
    return found


def test_a_world_trains_the_whole_machine_on_all_ranks():
    (alone,), *others = (run_ranks(size, fits, timeout=120) for size in (1, 2, 3))
    for world in others:
        for rank in world:
            for name, expected in alone.items():
                assert rank[name][0] == pytest.approx(expected[0], rel=1e-5)
                assert rank[name][1] == expected[1]
                np.testing.assert_array_equal(rank[name][2], expected[2])
                np.testing.assert_allclose(rank[name][3], expected[3], atol=0.03)
                assert rank[name][4] == expected[4]
            for name, values in rank.items():
                np.testing.assert_array_equal(values[3], world[0][name][3])


TWICE = """
import sys
import numpy as np
from sklearn.datasets import make_classification
from headway.run.distributed.launch_env import LaunchEnv
from headway.svm import SVC

place = LaunchEnv.here()
X, y = make_classification(200, 6, random_state=0)
own = slice(place.rank, None, place.ranks)
told = []
SVC().fit(X[own], y[own])
try:
    SVC().fit(X[own] * (np.nan if place.rank else 1), y[own])
except ValueError as error:
    told.append(f"refused: {error}")
model = SVC(C=2.0).fit(X[own], y[own])
try:
    SVC(processes=2).fit(X[own], y[own])
except ValueError as error:
    told.append(f"nested: {error}")
told.append(f"objective {model.machine_.objective} {model.support_.sum()}")
open(f"told-{place.rank}", "w").write("\\n".join(told))
"""


def test_a_program_under_torchrun_fits_again_and_again(tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    done = command(
        "torchrun", "--nproc-per-node", "2", "twice.py", cwd=tmp_path, variables=warm_variables()
    )
    assert done.code == 0, done.err
    told = [(tmp_path / f"told-{rank}").read_text() for rank in (0, 1)]
    assert "refused: rank 1: Input X contains NaN" in told[0]
    assert "refused: Input X contains NaN" in told[1]
    assert all("nested: processes=2" in text for text in told)
    assert len({text.splitlines()[-1] for text in told}) == 1


# -- bad samples -------------------------------------------------------------------------------


BROKEN = {
    "columns": (lambda X, y: (X[:, :4], y), "different numbers of columns"),
    "infinity": (lambda X, y: (np.where(X > 1, np.inf, X), y), "rank 1: Input X contains infinity"),
    "fractions": (lambda X, y: (X, y + X[:, 0]), "continuous"),
    "text": (lambda X, y: (X, np.array(["a", "b"])[y]), "rank 1: text"),
    "sparse": (lambda X, y: (sparse.csr_matrix(X), y), "kinds of samples"),
    "nothing": (lambda X, y: (X[:0], y[:0]), "rank 1: Found array with 0 sample"),
    "parameter": (lambda X, y: (X, y), "rank 1: C=-1.0"),
}


def broken(world):
    """Rank 1 has something else than the others, again and again in the same world."""
    found = {}
    for what, (change, _) in BROKEN.items():
        X, y = change(*NOISY) if world.rank == 1 else NOISY
        try:
            SVC(C=-1.0 if what == "parameter" and world.rank == 1 else 1.0).fit(X, y)
        except ValueError as error:
            found[what] = str(error)
    try:
        SVC().fit(NOISY[0], np.ones(len(NOISY[1])))
    except ValueError as error:
        found["one class"] = str(error)
    # The ranks are still together.
    own_X, own_y = own_rows(world, *NOISY)
    SVC().fit(own_X, own_y)
    return found


def test_what_one_rank_cannot_use_is_an_error_of_all():
    own, other = run_ranks(2, broken)
    for what, (_, said) in BROKEN.items():
        assert said in own[what]
        assert said.removeprefix("rank 1: ") in other[what]
    assert "number of classes" in own["one class"]


def digests(world):
    X, y = DIGITS
    found = []
    with Peers(World.adopt()) as peers:
        for form in (np.ascontiguousarray, sparse.csr_matrix):
            rows, labels = own_rows(world, form(X), y)
            factors, options = np.ones(len(labels)), TrainingOptions(Kernel("rbf"))
            found.append(digest_training(rows, labels, factors, options, peers))
    return found


def test_a_digest_is_the_same_for_any_number_of_ranks():
    every = [found for size in (1, 2, 3) for found in run_ranks(size, digests)]
    assert all(found == every[0] for found in every)


def stopping(world, folder: Path):
    """Rank 1 gets a signal; then all go on from rank 0's state."""
    X, y = own_rows(world, *THREE)

    def kernel(rows, others):
        calls.append(1)
        if len(calls) == 40 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return gaussian(rows, others)

    calls: list[int] = []
    words = {"C": 10.0, "working_set": 4, "directory": folder}
    with pytest.warns(ConvergenceWarning, match="unfinished"):
        first = SVC(kernel=kernel, **words).fit(X, y)
    calls = [1] * 100
    second = SVC(kernel=kernel, **words).fit(X, y)
    return first.fit_status_, second.fit_status_, second.machine_.objective, second.n_iter_.sum()


def test_a_signal_to_one_rank_stops_all_and_the_state_goes_on(tmp_path):
    X, y = THREE
    whole = SVC(C=10.0, gamma=0.1, working_set=4).fit(X, y)
    found = run_ranks(2, stopping, tmp_path)
    assert found[0] == found[1]
    assert found[0][:2] == (1, 0)
    assert found[0][2] == pytest.approx(whole.machine_.objective, rel=1e-4)
    assert found[0][3] < whole.n_iter_.sum()
    assert not list(tmp_path.iterdir())


# -- own workers -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
def test_own_workers_train_the_same_machine(form):
    X, y = DIGITS
    found = SVC(C=5.0, processes=2, decision_function_shape="ovo").fit(form(X), y)
    expected = SVC(C=5.0, decision_function_shape="ovo").fit(form(X), y)
    assert found.machine_.objective == pytest.approx(expected.machine_.objective, rel=1e-5)
    np.testing.assert_allclose(found.decision_function(X), expected.decision_function(X), atol=0.03)


def test_own_workers_follow_the_same_rule_as_one_process():
    X, y = NOISY
    words = {"working_set": 2, "C": 3.0}
    found, expected = (SVC(processes=count, **words).fit(X, y) for count in (2, 1))
    # Without elimination more values are needed.
    plain = SVC(elimination="none", **words).fit(X, y)
    assert expected.machine_.values < plain.machine_.values
    assert found.machine_.values == pytest.approx(expected.machine_.values, rel=0.01)
    np.testing.assert_array_equal(found.dual_coef_, expected.dual_coef_)


def test_a_worker_waits_until_the_first_one_has_taken_its_support_vectors():
    own = os.getpid()

    plain = shared_memory.map_peer_memory

    def slow_to_take(rows, others):
        if os.getpid() != own and dist.get_rank() == 0:
            shared_memory.map_peer_memory = lambda *place: time.sleep(1) or plain(*place)
        return gaussian(rows, others)

    X, y = make_classification(300, 5, n_classes=4, n_informative=4, n_redundant=0, random_state=0)
    # More support vectors of the second rank than samples of it in any pair: memory of their own.
    weights = np.where(np.arange(len(y)) < 100, 0.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RestartWarning)
        found = SVC(kernel=slow_to_take, processes=2).fit(X, y, sample_weight=weights)
    assert found.fit_status_ == 0


def deadly(folder, marker, rows, others):
    """A slow kernel; the first process that calls it after a state was saved is killed, once."""
    if not Path(marker).exists():
        time.sleep(0.002)
        if list(Path(folder).glob("fit-*/checkpoints/step-*[0-9]")):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return gaussian(rows, others)


def test_after_the_death_of_a_worker_the_fit_goes_on_from_its_last_state(tmp_path):
    X, y = make_classification(200, 6, n_informative=4, flip_y=0.3, random_state=0)
    states, marker = tmp_path / "states", tmp_path / "killed"
    model = SVC(kernel=partial(deadly, states, marker), C=20.0, working_set=4, directory=states)
    with pytest.warns(RestartWarning, match="SIGKILL.*go on from the last state"):
        model.set_params(processes=2).fit(X, y)
    assert marker.exists()
    assert model.fit_status_ == 0
    whole = SVC(gamma=0.1, C=20.0, working_set=4).fit(X, y)
    assert model.machine_.objective == pytest.approx(whole.machine_.objective, rel=1e-4)
    assert not list(states.iterdir())


def test_deaths_again_and_again_end_in_one_error():
    # It is tried once in this process, before any worker.
    own = os.getpid()

    def in_workers(rows, others):
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return gaussian(rows, others)

    with (
        pytest.warns(RestartWarning, match="SIGKILL"),
        pytest.raises(WorkerFailed, match="was killed by SIGKILL") as caught,
    ):
        SVC(kernel=in_workers, processes=2).fit(*NOISY)
    assert "3 restarts in a row" in str(caught.value)


def test_an_error_of_the_users_kernel_in_a_worker_is_told():
    own = os.getpid()

    def wrong(rows, others):
        if os.getpid() == own:
            return rows @ others.T
        raise RuntimeError("no such kernel today")

    with pytest.raises(WorkerFailed, match="no such kernel today"):
        SVC(kernel=wrong, processes=2).fit(*NOISY)


def test_a_signal_stops_workers_in_order_and_the_fit_goes_on():
    X, y = make_classification(200, 6, n_informative=4, flip_y=0.3, random_state=0)
    own, words = os.getpid(), {"C": 10.0, "working_set": 4, "processes": 2}

    def kernel(rows, others):
        if os.getpid() != own and asks[0]:
            asks[1] += 1
            if asks[1] == 100:
                os.kill(own, signal.SIGINT)
        return gaussian(rows, others)

    asks = [True, 0]
    model = SVC(kernel=kernel, warm_start=True, **words)
    with pytest.warns(ConvergenceWarning, match="unfinished"):
        model.fit(X, y)
    assert model.fit_status_ == 1
    asks[0] = False
    with pytest.warns(ConvergenceWarning, match="unfinished"):
        model.set_params(max_iter=100).fit(X, y)
    # The steps before the signal count as well.
    assert model._state.outer > model.machine_.pairs[0].outer
    model.set_params(max_iter=-1, processes=1).fit(X, y)
    assert model.fit_status_ == 0
    whole = SVC(gamma=0.1, C=10.0, working_set=4).fit(X, y)
    assert model.machine_.objective == pytest.approx(whole.machine_.objective, rel=1e-4)


def solve_and_eliminate(world, X, y):
    """A solution, and the same again after one rank alone has eliminated samples."""
    with Peers(World.adopt()) as peers:
        rows, labels = own_rows(world, X, y * 2.0 - 1)
        sizes = peers.gather(np.array([float(len(labels))]), "sizes")[:, 0].astype(int)
        first, bounds = int(sizes[: peers.rank].sum()), np.full(len(labels), 2.0)
        share = Share(rows, labels, bounds, first, int(sizes.sum()))
        solver = Solver(share, SolverOptions(Kernel("rbf", 0.3), working_set=16), peers)
        for _ in solver.run():
            pass
        whole = solver.solution()
        if peers.rank == 0:
            solver._active = solver._activate(np.arange(len(labels) - 5))
        again = solver.solution()
        return (
            whole.finished,
            np.array_equal(whole.alpha, again.alpha),
            whole.offset == again.offset,
        )


def test_a_solution_where_only_one_rank_has_eliminated_samples():
    assert run_ranks(2, solve_and_eliminate, *NOISY) == [(True, True, True)] * 2
