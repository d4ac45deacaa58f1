"""single: small problems of support vector machines: the table, its precision, limits, votes."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import make_classification
from sklearn.svm import SVC

from headway.svm.elimination import find_rule
from headway.svm.kernels import Kernel
from headway.svm.peers import Peers
from headway.svm.small_solver import SmallSolver, is_small
from headway.svm.solver import STOP, Share, Solver, SolverOptions
from support.svm_oracle import checked

RBF = Kernel("rbf", gamma=0.3)


def noisy(samples=300, seed=0):
    rows, labels = make_classification(samples, 8, n_informative=5, flip_y=0.2, random_state=seed)
    return rows, labels * 2.0 - 1


def solver_of(rows, labels, kernel=RBF, bound=2.0, alpha=None, solver=SmallSolver, **options):
    count = rows.shape[0]
    share = Share(rows, labels, np.full(count, float(bound)), 0, count)
    return solver(share, SolverOptions(kernel, **options), Peers(), alpha)


def solved(*arguments, **options):
    solver = solver_of(*arguments, **options)
    steps = list(solver.run())
    return solver.solution(), steps


FUNCTION = Kernel("callable", function=lambda one, other: np.tanh(one @ other.T / 9) + 2)
KERNELS = {
    "rbf": (RBF, np.asarray),
    "poly": (Kernel("poly", gamma=0.2, coef0=1.0), np.asarray),
    "callable": (FUNCTION, np.asarray),
    "sparse": (RBF, sparse.csr_matrix),
    "sparse-linear": (Kernel("linear"), sparse.csr_matrix),
}


@pytest.mark.parametrize("case", KERNELS)
def test_a_solution_holds_from_scratch_and_is_that_of_working_sets(case):
    kernel, form = KERNELS[case]
    rows, labels = noisy()
    rows = form(rows)
    found, _ = solved(rows, labels, kernel, bound=0.3)
    other, _ = solved(rows, labels, kernel, bound=0.3, solver=Solver, working_set=32)
    assert found.finished
    assert found.objective == pytest.approx(other.objective, rel=1e-5)
    assert found.offset == pytest.approx(other.offset, abs=5e-3)
    if kernel.name != "callable":
        truth = checked(kernel, rows, labels, found.alpha, np.full(300, 0.3))
        assert truth.violation <= 1e-3 * (1 + 1e-6)
        assert found.objective == pytest.approx(truth.objective, rel=1e-9)
        np.testing.assert_allclose(found.gamma, truth.gamma, atol=1e-9)


def test_float32_is_left_where_it_is_too_coarse(monkeypatch):
    made = []
    fill = SmallSolver._fill

    def watched(solver, dtype):
        made.append(dtype)
        return fill(solver, dtype)

    monkeypatch.setattr(SmallSolver, "_fill", watched)
    rows, labels = noisy()
    # Compressed rows are not moved to their mean: squares of 10^7 hide distances of 1.
    for samples, words, dtypes in (
        (rows, {}, [torch.float32]),
        (rows, {"tolerance": 1e-8}, [torch.float64]),
        (sparse.csr_matrix(rows + 1000.0), {}, [torch.float32, torch.float64]),
    ):
        made.clear()
        found, _ = solved(samples, labels, **words)
        assert made == dtypes
        assert found.finished
        truth = checked(RBF, rows, labels, found.alpha, np.full(300, 2.0))
        assert truth.violation <= words.get("tolerance", 1e-3) * 1.001


def test_steps_are_limited_and_a_vote_stops():
    rows, labels = noisy()
    found, _ = solved(rows, labels, most_steps=10)
    assert (found.steps, found.finished) == (10, False)
    solver = solver_of(rows, labels)
    solver.vote = STOP
    assert list(solver.run()) == []
    assert not solver.solution().finished


def test_it_goes_on_from_multipliers():
    rows, labels = noisy()
    whole, _ = solved(rows, labels)
    part, _ = solved(rows, labels, most_steps=whole.steps - 20)
    again, _ = solved(rows, labels, alpha=part.alpha)
    assert 0 < again.steps < whole.steps / 2
    assert again.objective == pytest.approx(whole.objective, rel=1e-5)


def test_samples_twice_and_labels_that_contradict():
    rows, labels = noisy(100)
    rows, labels = np.repeat(rows, 4, axis=0), np.repeat(labels, 4)
    labels[::7] *= -1
    found, _ = solved(rows, labels, bound=100.0)
    truth = checked(RBF, rows, labels, found.alpha, np.full(400, 100.0))
    assert truth.violation <= 1e-3 * (1 + 1e-6)
    theirs = SVC(C=100.0, gamma=0.3).fit(rows, labels)
    alpha = np.zeros(400)
    alpha[theirs.support_] = np.abs(theirs.dual_coef_.ravel())
    wanted = checked(RBF, rows, labels, alpha, np.full(400, 100.0))
    assert found.objective == pytest.approx(wanted.objective, rel=1e-5)


@pytest.mark.parametrize(
    ("total", "words", "small"),
    [
        (2048, {}, True),
        (2049, {}, False),
        (8, {"working_set": 2}, False),
        (100, {"rule": find_rule("multi2")}, False),
        (100, {"rule": find_rule("none")}, True),
    ],
)
def test_what_is_small(total, words, small):
    assert is_small(total, SolverOptions(RBF, **words)) == small
