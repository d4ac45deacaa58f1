"""single: the dual problem of a support vector machine: blocks, pairs, elimination, the end."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import load_digits, make_classification, make_moons
from sklearn.svm import SVC

from headway.errors import UsageError
from headway.svm.elimination import NONE, RULES, EliminationClock, RemainingWork, find_rule
from headway.svm.kernels import CHUNK, Kernel, kernel_values, prepare_samples, weighted_sums
from headway.svm.pair_solver import solve_pairs
from headway.svm.peers import Peers
from headway.svm.solver import STOP, Share, Solver, SolverOptions

KERNELS = {
    "linear": Kernel("linear"),
    "poly": Kernel("poly", gamma=0.3, degree=3, coef0=0.5),
    "rbf": Kernel("rbf", gamma=0.7),
    "sigmoid": Kernel("sigmoid", gamma=0.05, coef0=-0.2),
}


FAR = np.diag(np.geomspace(20.0, 1e4, 20))


def plain_kernel(kernel, one, other):
    one, other = (rows.toarray() if sparse.issparse(rows) else rows for rows in (one, other))
    products = one @ other.T
    if kernel.name == "rbf":
        distances = ((one[:, None] - other[None]) ** 2).sum(-1)
        return np.exp(-kernel.gamma * distances)
    if kernel.name == "poly":
        return (kernel.gamma * products + kernel.coef0) ** kernel.degree
    if kernel.name == "sigmoid":
        return np.tanh(kernel.gamma * products + kernel.coef0)
    return products


def two_classes(seed=0, samples=400, **options):
    rows, labels = make_classification(
        n_samples=samples, n_features=8, n_informative=5, flip_y=0.1, random_state=seed, **options
    )
    return rows, labels * 2.0 - 1


def solved(rows, labels, kernel=KERNELS["rbf"], bound=2.0, alpha=None, **options):
    share = Share(rows, labels, np.full(len(labels), float(bound)), 0, len(labels))
    solver = Solver(share, SolverOptions(kernel, **options), Peers(), alpha)
    steps = list(solver.run())
    return solver.solution(), steps


def violation(rows, labels, alpha, kernel, bound):
    """From scratch, over all samples."""
    gamma = plain_kernel(kernel, rows, rows) @ (alpha * labels) - labels
    rising = np.where(labels > 0, alpha < bound, alpha > 0)
    sinking = np.where(labels > 0, alpha > 0, alpha < bound)
    return gamma[sinking].max() - gamma[rising].min(), gamma


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("form", ["dense", "table", "lists"])
@pytest.mark.parametrize("others", [1, 8, 9, CHUNK + 3])
def test_blocks_are_the_kernel(kernel, form, others):
    draw = np.random.default_rng(1)
    filled = {"dense": 1.0, "table": 0.4, "lists": 0.02}[form]
    one, other = (
        np.where(draw.random((n, 60)) < filled, draw.normal(size=(n, 60)), 0.0)
        for n in (CHUNK + 5, others)
    )
    wanted = plain_kernel(kernel, one, other)
    weights = draw.normal(size=others)
    if form != "dense":
        one, other = sparse.csr_matrix(one), sparse.csr_matrix(other)
    shift = draw.normal(size=60) if form == "dense" else None
    found = kernel_values(
        prepare_samples(kernel, one, torch.float64, shift),
        prepare_samples(kernel, other, torch.float64, shift),
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-4)):
        sums = weighted_sums(
            prepare_samples(kernel, one, dtype, shift),
            prepare_samples(kernel, other, dtype, shift),
            weights,
        )
        scale = np.abs(wanted) @ np.abs(weights) + 1
        assert np.abs((sums - wanted @ weights) / scale).max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_values_that_underflow_are_nothing(dtype):
    one, other = (prepare_samples(KERNELS["rbf"], rows, dtype) for rows in (FAR, FAR[:9]))
    found = one.block(0, len(FAR), other.columns()).numpy()
    assert found[9:].max() < 1e-25
    np.testing.assert_array_equal(found[:9] > 1e-25, np.eye(9, dtype=bool))


def test_a_kernel_of_the_user_s_gets_the_samples_as_they_are():
    rows, labels = two_classes(samples=150)
    kernel = Kernel("callable", function=lambda a, b: plain_kernel(KERNELS["rbf"], a, b))
    own, _ = solved(rows, labels, kernel)
    same, _ = solved(rows, labels)
    assert own.objective == pytest.approx(same.objective, rel=1e-6)


@pytest.mark.parametrize("samples", [12, 13])
def test_a_sample_s_sums_do_not_depend_on_the_others(samples):
    draw = np.random.default_rng(2)
    rows, other, weights = (
        draw.normal(size=(40, 17)),
        draw.normal(size=(2, 17)),
        draw.normal(size=2),
    )
    for form in (np.asarray, sparse.csr_matrix):
        columns, whole, part = (
            prepare_samples(KERNELS["rbf"], form(matrix), torch.float64)
            for matrix in (other, rows, rows[5 : 5 + samples])
        )
        sums = weighted_sums(whole, columns, weights)
        assert np.array_equal(weighted_sums(part, columns, weights), sums[5 : 5 + samples])


SEEDS = range(8)


def test_the_second_order_choice_takes_no_more_steps():
    taken = {True: [], False: []}
    for seed in SEEDS:
        rows, labels = two_classes(seed, samples=200)
        matrix = plain_kernel(KERNELS["rbf"], rows, rows)
        for second_order, steps in taken.items():
            alpha, gamma = np.zeros(200), -labels.copy()
            bounds = np.full(200, 2.0)
            steps.append(
                solve_pairs(
                    matrix,
                    matrix.diagonal().copy(),
                    labels,
                    bounds,
                    alpha,
                    gamma,
                    1e-3,
                    10**6,
                    second_order,
                )
            )
            assert abs((alpha * labels).sum()) < 1e-9
            assert violation(rows, labels, alpha, KERNELS["rbf"], bounds)[0] < 1e-3
            assert ((alpha >= 0) & (alpha <= bounds)).all()
    assert all(one <= other for one, other in zip(taken[True], taken[False], strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("working_set", [2, 64])
def test_every_rule_ends_at_the_same_objective(rule, working_set):
    rows, labels = two_classes(3, samples=260)
    reference = SVC(C=2.0, gamma=0.7).fit(rows, labels)
    wanted = _objective(rows, labels, reference, 2.0)
    found, _ = solved(rows, labels, working_set=working_set, rule=find_rule(rule))
    assert found.finished
    assert found.objective == pytest.approx(wanted, rel=1e-4)
    worst, gamma = violation(rows, labels, found.alpha, KERNELS["rbf"], np.full(260, 2.0))
    assert worst <= 1e-3
    np.testing.assert_allclose(found.gamma, gamma, atol=1e-10)  # also of those eliminated


def _objective(rows, labels, machine, bound):
    alpha = np.zeros(len(labels))
    alpha[machine.support_] = np.abs(machine.dual_coef_.ravel())
    matrix = plain_kernel(KERNELS["rbf"], rows, rows)
    return 0.5 * (alpha * labels) @ matrix @ (alpha * labels) - alpha.sum()


def test_a_support_vector_that_was_set_aside_comes_back(monkeypatch):
    """With an aggressive rule some of the solution's support vectors are eliminated on the way."""
    rows, labels = make_moons(120, noise=0.3, random_state=4)
    labels = labels * 2.0 - 1
    aside = set()
    eliminate = Solver._eliminate

    def watched(solver, *arguments):
        done = eliminate(solver, *arguments)
        aside.update(set(range(120)) - set(solver._active.places.tolist()))
        return done

    monkeypatch.setattr(Solver, "_eliminate", watched)
    found, _ = solved(rows, labels, bound=30.0, working_set=2, rule=find_rule("single2"))
    back = aside & set(np.flatnonzero(found.alpha).tolist())
    assert back
    assert violation(rows, labels, found.alpha, KERNELS["rbf"], np.full(120, 30.0))[0] <= 1e-3


def test_elimination_saves_kernel_values_where_support_vectors_are_few():
    images, digits = load_digits(return_X_y=True)
    labels = np.where(digits == 0, 1.0, -1.0)
    kernel = Kernel("rbf", gamma=0.001)
    tried = {
        name: solved(images, labels, kernel, 10.0, working_set=16, rule=find_rule(name))[0]
        for name in ("none", "adaptive")
    }
    assert (tried["none"].alpha > 0).mean() < 0.1
    assert tried["adaptive"].values < 0.75 * tried["none"].values
    assert tried["adaptive"].objective == pytest.approx(tried["none"].objective, rel=1e-4)


def test_what_elimination_expects_is_said():
    rows, labels = two_classes(5, samples=600)
    found, steps = solved(rows, labels, working_set=16)
    assert found.predictions
    assert all(p.pays == (p.saved > p.cost) and math.isfinite(p.rows) for p in found.predictions)
    assert min(step.active for step in steps) < 600


def test_a_stopped_run_is_unfinished_and_goes_on_from_its_multipliers():
    rows, labels = two_classes(6)
    whole, _ = solved(rows, labels, working_set=16)
    share = Share(rows, labels, np.full(400, 2.0), 0, 400)
    solver = Solver(share, SolverOptions(KERNELS["rbf"], working_set=16), Peers())
    for step in solver.run():
        if step.outer == 5:
            solver.vote |= STOP
    left = solver.solution()
    assert not left.finished
    assert left.outer == 5
    _, gamma = violation(rows, labels, left.alpha, KERNELS["rbf"], np.full(400, 2.0))
    np.testing.assert_allclose(left.gamma, gamma, atol=1e-10)
    again, steps = solved(rows, labels, working_set=16, alpha=left.alpha)
    assert again.objective == pytest.approx(whole.objective, rel=1e-4)
    assert len(steps) < whole.outer


def test_steps_are_limited():
    rows, labels = two_classes(7)
    found, _ = solved(rows, labels, working_set=2, most_steps=10)
    assert not found.finished
    assert found.steps == 10


def test_rules_have_names_in_any_case():
    assert find_rule("Multi50pc").first == 0.5
    with pytest.raises(UsageError, match="single2"):
        find_rule("single3")


@pytest.mark.parametrize(
    ("rule", "first"), [("single2", 2), ("multi1000", 1000), ("single5pc", 37)]
)
def test_when_a_rule_tests(rule, first):
    clock = EliminationClock(find_rule(rule), 727)
    assert not clock.due(first - 1)
    assert clock.due(first)
    clock.tested(first, 400)
    assert not clock.due(first + 399)
    assert clock.due(first + 400)
    clock.reconstructed(2000)
    assert clock.due(2000) == rule.startswith("multi")


def test_nothing_is_set_aside_where_it_cannot_pay():
    work = RemainingWork(1e-3, 1000)
    clock = EliminationClock(find_rule("adaptive"), 1000)
    work.note(2.0, 0)
    work.note(1.0, 500)
    assert clock.worth(removed=500, active=1000, moved=100, work=work)
    work.note(1e-3, 4000)  # the end
    assert not clock.worth(removed=500, active=1000, moved=100, work=work)
    assert not EliminationClock(NONE, 1000).due(10**9)


def test_samples_that_float32_cannot_tell_apart_are_solved_in_float64():
    """Compressed rows are not moved to their mean: squares of 10^7 hide distances of 1."""
    rows, labels = two_classes(8, samples=700)
    wanted, _ = solved(rows, labels, working_set=64)
    found, steps = solved(sparse.csr_matrix(rows + 1000.0), labels, working_set=64)
    assert found.finished
    assert found.objective == pytest.approx(wanted.objective, rel=1e-4)
    assert len(steps) < 2 * wanted.outer  # of those that go on in float32, 264 to 72
