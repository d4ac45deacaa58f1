"""single: SVC against scikit-learn's and against brute force; its interface, files and errors."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
import sklearn.svm
from joblib import parallel_backend
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import headway.svm
from headway.errors import DataError, MissingExtra, UsageError
from headway.svm import SVC
from headway.svm.elimination import RULES
from headway.svm.kernels import Kernel
from headway.svm.machine import Machine, count_votes
from headway.svm.model_files import load_machine, save_machine
from headway.svm.peers import Peers
from headway.svm.solver import STOP, Share, Solver, SolverOptions
from headway.svm.training import (
    TrainingOptions,
    TrainingState,
    digest_training,
    pack_state,
    train_machine,
    unpack_state,
)
from support.svm_oracle import checked, checked_machine

CANCER = load_breast_cancer(return_X_y=True)
CANCER = (StandardScaler().fit_transform(CANCER[0]), CANCER[1])
DIGITS = load_digits(return_X_y=True)
DIGITS = (DIGITS[0] / 16, DIGITS[1])
NOISY = make_classification(500, 12, n_informative=6, flip_y=0.15, random_state=3)


def one_hot(seed=0, rows=400, columns=120, each=9):
    """Sparse samples of ones, as of categories, and noisy labels."""
    draw = np.random.default_rng(seed)
    places = np.sort(draw.permuted(np.tile(np.arange(columns), (rows, 1)), axis=1)[:, :each])
    ends = np.arange(0, rows * each + 1, each)
    X = sparse.csr_matrix((np.ones(rows * each), places.ravel(), ends), shape=(rows, columns))
    score = X @ draw.normal(size=columns) + draw.normal(size=rows)
    return X, (score > np.median(score)).astype(int)


SPARSE = one_hot()
CASES = {
    "cancer": (CANCER, {"C": 10.0, "gamma": 0.03}),
    "default": (NOISY, {}),
    "linear": (NOISY, {"kernel": "linear", "C": 0.5}),
    "poly": (NOISY, {"kernel": "poly", "coef0": 1.0, "gamma": 0.05, "degree": 2}),
    "sigmoid": (NOISY, {"kernel": "sigmoid", "gamma": 0.01}),
    "auto": (NOISY, {"gamma": "auto", "C": 5.0}),
    "sparse": (SPARSE, {"C": 5.0, "gamma": 0.1}),
    "sparse-linear": (SPARSE, {"kernel": "linear"}),
    "sparse-scale": (SPARSE, {}),
    "digits": (DIGITS, {"C": 5.0, "gamma": 0.05}),
    "balanced": (NOISY, {"class_weight": "balanced", "C": 2.0}),
    "weights": (NOISY, {"class_weight": {0: 3.0, 1: 0.5}}),
}


def bounds_of(model, y, weights=1.0):
    codes = np.searchsorted(model.classes_, y)
    return model.C * weights * model.class_weight_[codes]


@pytest.mark.parametrize("working_set", [512, 32])  # with a table of all kernel values, and not
@pytest.mark.parametrize("case", CASES)
def test_the_solution_is_that_of_scikit_learn_and_optimal_over_all_samples(case, working_set):
    (X, y), words = CASES[case]
    ours = SVC(working_set=working_set, **words).fit(X, y)
    theirs = sklearn.svm.SVC(**words).fit(X, y)
    assert ours.fit_status_ == 0
    pairs = checked_machine(ours.machine_, X, y, bounds_of(ours, y))
    assert max(pair.violation for pair in pairs) <= ours.tol * (1 + 1e-6)
    for pair, facts in zip(pairs, ours.machine_.pairs, strict=True):
        # What the machine says of itself is true.
        assert facts.objective == pytest.approx(pair.objective, rel=1e-9)
        assert facts.violation == pytest.approx(pair.violation, abs=1e-9)
    like = replace_multipliers(ours.machine_, theirs)
    expected = checked_machine(like, X, y, bounds_of(ours, y))
    total = sum(pair.objective for pair in expected)
    assert ours.machine_.objective == pytest.approx(total, rel=1e-4)
    assert (ours.predict(X) == theirs.predict(X)).mean() >= 0.998
    close = {"rtol": 0, "atol": 30 * ours.tol}
    # Votes of pairs whose value is almost 0 may differ.
    for model in (ours, theirs):
        model.set_params(decision_function_shape="ovo")
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), **close)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, **close)
    for name in ("classes_", "class_weight_", "shape_fit_", "n_features_in_"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("dual_coef_", "support_", "support_vectors_", "n_support_", "n_iter_"):
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
        assert getattr(ours, name).ndim == getattr(theirs, name).ndim
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    if words.get("kernel") == "linear":
        ours_coef, theirs_coef = (
            coef.toarray() if sparse.issparse(coef) else coef for coef in (ours.coef_, theirs.coef_)
        )
        np.testing.assert_allclose(ours_coef, theirs_coef, atol=0.02)


def replace_multipliers(machine: Machine, theirs: sklearn.svm.SVC) -> Machine:
    """Our machine with the multipliers of scikit-learn's solution."""
    dual = theirs.dual_coef_
    dual = dual.toarray() if sparse.issparse(dual) else dual
    sign = -1.0 if len(theirs.classes_) == 2 else 1.0
    return replace(
        machine,
        numbers=theirs.support_.astype(np.int64),
        counts=theirs.n_support_.astype(np.int64),
        coefficients=sign * dual,
    )


@pytest.mark.parametrize("working_set", [2, 3, 64, 1024])
@pytest.mark.parametrize("rule", ["none", "adaptive", "multi2"])
def test_all_working_sets_end_at_the_same_objective(working_set, rule):
    X, y = NOISY[0][:200], NOISY[1][:200]
    expected = SVC(tol=1e-5, elimination="none").fit(X, y).machine_.objective
    found = SVC(working_set=working_set, elimination=rule).fit(X, y)
    assert found.fit_status_ == 0
    assert found.machine_.objective == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_all_rules_end_at_the_same_objective_with_no_violation(rule):
    X, y = NOISY
    model = SVC(C=3.0, working_set=16, elimination=rule).fit(X, y)
    (pair,) = checked_machine(model.machine_, X, y, bounds_of(model, y))
    assert pair.violation <= model.tol * (1 + 1e-6)
    expected = SVC(C=3.0, tol=1e-5, elimination="none").fit(X, y).machine_.objective
    assert pair.objective == pytest.approx(expected, rel=1e-4)


def solver_of(rule, *, working_set=2, tolerance=1e-3, C=100.0, data=NOISY, alpha=None):
    X, y = data
    labels = np.where(y == y.min(), 1.0, -1.0)
    share = Share(np.ascontiguousarray(X), labels, np.full(len(y), C), 0, len(y))
    kernel = Kernel("rbf", gamma=0.1)
    options = SolverOptions(kernel, tolerance, working_set, RULES[rule])
    return share, kernel, Solver(share, options, Peers(), alpha)


@pytest.mark.parametrize("working_set", [2, 32])
def test_gamma_of_samples_that_were_set_aside_is_exact_at_the_end(working_set):
    share, kernel, solver = solver_of("multi2", working_set=working_set, C=1.0)
    fewest = min(progress.active for progress in solver.run())
    assert fewest < share.total
    found = solver.solution()
    brute = checked(kernel, share.rows, share.labels, found.alpha, share.bounds)
    np.testing.assert_allclose(found.gamma, brute.gamma, rtol=0, atol=1e-10)


@pytest.mark.parametrize("working_set", [2, 512])
def test_gamma_is_exact_beside_a_sample_that_is_far_away(working_set):
    draw = np.random.default_rng(0)
    X = draw.normal(size=(80, 5))
    X[0] *= 1e6
    labels = np.tile([1.0, -1.0], 40)
    alpha = np.repeat(draw.uniform(size=40), 2)
    alpha[:2] = 0
    share = Share(X, labels, np.ones(80), 0, 80)
    kernel = Kernel("linear")
    solver = Solver(share, SolverOptions(kernel, working_set=working_set), Peers(), alpha)
    solver.vote = STOP
    list(solver.run())
    found = solver.solution().gamma
    brute = checked(kernel, X, labels, alpha, np.ones(80)).gamma
    np.testing.assert_allclose(found[1:], brute[1:], rtol=0, atol=1e-11)


def two_clusters():
    """Two clusters, each with both labels; with a large C the first steps look at few samples."""
    draw = np.random.default_rng(0)
    X = np.concatenate([draw.normal(size=(30, 2)) + centre for centre in ([0, 0], [3, 0])])
    return X, (X[:, 1] + 0.4 * draw.normal(size=len(X)) > 0).astype(int)


def test_a_support_vector_that_an_aggressive_rule_sets_aside_comes_back():
    share, kernel, solver = solver_of("single2", data=two_clusters())
    aside = np.zeros(share.total, dtype=bool)
    for _ in solver.run():
        gone = np.setdiff1d(np.arange(share.total), solver._active.places)
        aside[gone] |= solver._alpha[gone] == 0
    found = solver.solution()
    assert (aside & (found.alpha > 0)).any(), "the case does not show what it is for"
    assert found.reconstructions >= 2
    brute = checked(kernel, share.rows, share.labels, found.alpha, share.bounds)
    assert brute.violation <= 1e-3 * (1 + 1e-6)
    _, _, plain = solver_of("none", data=two_clusters(), tolerance=1e-5, working_set=64)
    list(plain.run())
    assert brute.objective == pytest.approx(plain.solution().objective, rel=1e-4)


# -- weights -----------------------------------------------------------------------------------


def test_a_weight_of_two_is_a_sample_twice_and_of_zero_none():
    X, y = NOISY[0][:120], NOISY[1][:120]
    weights = np.tile([0.0, 1.0, 2.0], 40)
    found = SVC(tol=1e-8).fit(X, y, sample_weight=weights)
    repeated = np.repeat(np.arange(120), weights.astype(int))
    # gamma="scale" looks at all samples, whatever their weights.
    gamma = found.machine_.kernel.gamma
    other = SVC(tol=1e-8, gamma=gamma).fit(X[repeated], y[repeated])
    np.testing.assert_allclose(found.decision_function(X), other.decision_function(X), atol=1e-6)
    assert not np.isin(found.support_, np.flatnonzero(weights == 0)).any()
    theirs = sklearn.svm.SVC(tol=1e-8).fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(found.decision_function(X), theirs.decision_function(X), atol=1e-6)


def test_weights_of_samples_and_classes_are_multiplied():
    X, y = NOISY
    weights = np.random.default_rng(0).uniform(0.1, 3, len(y))
    words = {"class_weight": {0: 2.0, 1: 0.3}, "C": 1.5}
    ours = SVC(**words).fit(X, y, sample_weight=weights)
    theirs = sklearn.svm.SVC(**words).fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=0.03)
    (pair,) = checked_machine(ours.machine_, X, y, bounds_of(ours, y, weights))
    assert pair.violation <= ours.tol * (1 + 1e-6)


# -- several classes, and scikit-learn's ways --------------------------------------------------


@pytest.mark.parametrize("words", [{}, {"break_ties": True}, {"decision_function_shape": "ovo"}])
def test_several_classes_decide_as_scikit_learn(words):
    X, y = DIGITS
    names = np.array(["zero", "one", "two", "3", "four", "five", "six", "seven", "8", "nine"])
    ours = SVC(tol=1e-5, **words).fit(X[:400], names[y[:400]])
    theirs = sklearn.svm.SVC(tol=1e-5, **words).fit(X[:400], names[y[:400]])
    np.testing.assert_array_equal(ours.classes_, theirs.classes_)
    values = ours.decision_function(X)
    np.testing.assert_allclose(values, theirs.decision_function(X), atol=1e-3)
    assert (ours.predict(X) == theirs.predict(X)).mean() >= 0.998
    np.testing.assert_array_equal(ours.n_support_, [sum(names[y[ours.support_]] == name)
                                                    for name in ours.classes_])  # fmt: skip


def test_break_ties_needs_one_against_rest():
    model = SVC(break_ties=True, decision_function_shape="ovo").fit(*CANCER)
    with pytest.raises(ValueError, match="break_ties"):
        model.predict(CANCER[0])


def failed_checks(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(results) > 50
    return {result["check_name"] for result in results if result["status"] == "failed"}


def test_scikit_learns_checks_fail_at_most_where_its_own_svc_fails():
    assert failed_checks(SVC()) <= failed_checks(sklearn.svm.SVC())


def test_pipelines_searches_clones_and_pickles():
    X, y = CANCER
    search = GridSearchCV(
        make_pipeline(StandardScaler(), SVC(working_set=64)),
        {"svc__C": [0.1, 10.0], "svc__elimination": ["none", "adaptive"]},
        cv=2,
    ).fit(X, y)
    assert search.best_score_ > 0.9
    model = SVC(C=2.0, elimination="multi500", working_set=32)
    assert clone(model).get_params() == model.get_params()
    model.fit(X, y)
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.decision_function(X), model.decision_function(X))
    with pytest.raises(NotFittedError):
        clone(model).predict(X)


def test_a_search_may_have_workers_or_its_fits_but_not_both(monkeypatch):
    X, y = CANCER
    search = GridSearchCV(SVC(), {"C": [0.1, 10.0]}, cv=2, n_jobs=2)
    with parallel_backend("threading"):
        assert search.fit(X, y).best_score_ > 0.9
    # As in a worker of loky.
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "loky")
    with pytest.raises(ValueError, match="inside of a worker of joblib"):
        SVC(processes=2).fit(X, y)
    SVC().fit(X, y)


def test_columns_have_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(CANCER[0][:, :3], columns=["a", "b", "c"])
    model = SVC().fit(frame, CANCER[1])
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c"]])


def laplacian(rows, others):
    distances = np.abs(rows[:, None, :] - others[None, :, :]).sum(axis=2)
    return np.exp(-0.02 * distances)


def test_a_kernel_may_be_a_function():
    X, y = NOISY[0][:200], NOISY[1][:200]
    ours = SVC(kernel=laplacian).fit(X, y)
    theirs = sklearn.svm.SVC(kernel=laplacian).fit(X, y)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=0.03)
    with pytest.raises(ValueError, match=r"shape \(2,\) for 2 and 3 samples"):
        SVC(kernel=lambda rows, others: rows[:, 0]).fit(X, y)


# -- sparse ------------------------------------------------------------------------------------


def test_unsorted_and_repeated_entries_are_those_of_the_sorted_sum_and_stay_as_they_are():
    X, y = SPARSE
    order = np.arange(X.nnz).reshape(-1, 9)[:, ::-1].ravel()
    halves = sparse.csr_matrix(
        (
            np.repeat(X.data[order] / 2, 2),
            np.repeat(X.indices[order], 2),
            X.indptr * 2,
        ),
        shape=X.shape,
    )
    before = halves.indices.copy()
    found, expected = SVC().fit(halves, y), SVC().fit(X, y)
    np.testing.assert_array_equal(halves.indices, before)
    np.testing.assert_array_equal(found.dual_coef_.toarray(), expected.dual_coef_.toarray())
    np.testing.assert_array_equal(found.decision_function(halves), expected.decision_function(X))


@pytest.mark.parametrize("kernel", ["rbf", "linear", "poly", "sigmoid"])
def test_sparse_and_dense_samples_are_the_same(kernel):
    X, y = SPARSE
    words = {"kernel": kernel, "gamma": 0.05, "tol": 1e-6}
    dense, loose = SVC(**words).fit(X.toarray(), y), SVC(**words).fit(X, y)
    for rows in (X, X.toarray()):
        np.testing.assert_allclose(
            dense.decision_function(rows), loose.decision_function(rows), atol=1e-4
        )
    if kernel == "linear":
        np.testing.assert_allclose(dense.coef_, loose.coef_.toarray(), atol=1e-4)


# -- files -------------------------------------------------------------------------------------


@pytest.fixture(params=["two", "ten", "sparse", "poly", "linear", "sigmoid"])
def trained(request):
    words = {"kernel": request.param} if request.param in ("poly", "linear", "sigmoid") else {}
    X, y = {"ten": DIGITS, "sparse": SPARSE}.get(request.param, CANCER)
    return SVC(**words).fit(X[:300], y[:300]), X, y


def predicted(tmp_path, model_file, X, y, machine):
    """Decision values of libsvm's own svm-predict, by way of its tie-breaking probabilities."""
    rows = sparse.csr_matrix(X)
    lines = []
    for label, first, last in zip(y, rows.indptr[:-1], rows.indptr[1:], strict=True):
        pairs = zip(rows.indices[first:last], rows.data[first:last], strict=True)
        lines.append(
            " ".join([str(label), *(f"{place + 1}:{value:.17g}" for place, value in pairs)])
        )
    (tmp_path / "samples").write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["svm-predict", "-q", str(tmp_path / "samples"), str(model_file), str(tmp_path / "out")],
        check=True,
    )
    return np.loadtxt(tmp_path / "out")


needs_libsvm = pytest.mark.skipif(
    shutil.which("svm-predict") is None, reason="apt-get install libsvm-tools"
)


@needs_libsvm
def test_libsvms_own_tool_reads_the_file(trained, tmp_path):
    model, X, y = trained
    model.save(tmp_path / "model")
    found = predicted(tmp_path, tmp_path / "model", X, y, model.machine_)
    values = model.machine_.decide(X)
    clear = np.abs(values).min(axis=1) > 1e-6
    np.testing.assert_array_equal(found[clear], model.predict(X)[clear])
    assert clear.mean() > 0.99


@needs_libsvm
def test_decision_values_of_libsvm_are_ours(tmp_path):
    """svm-predict prints labels: a machine whose offset is moved by t turns where a value is t."""
    X, y = CANCER
    model = SVC().fit(X, y)
    machine, values = model.machine_, model.machine_.decide(X)[:, 0]
    for number in (0, 7, 19):
        for beside, label in ((-1e-6, machine.classes[0]), (1e-6, machine.classes[1])):
            moved = replace(machine, offsets=machine.offsets + values[number] + beside)
            save_machine(moved, tmp_path / "model")
            one = slice(number, number + 1)
            assert predicted(tmp_path, tmp_path / "model", X[one], y[one], moved) == label


@needs_libsvm
@pytest.mark.parametrize("data", [CANCER, DIGITS], ids=["two", "ten"])
def test_models_of_svm_train_are_read(data, tmp_path):
    X, y = data[0][:200], data[1][:200][::-1]  # so that labels do not come in their order
    rows = [" ".join(f"{place + 1}:{value:.17g}" for place, value in enumerate(row)) for row in X]
    lines = [f"{label} {row}" for label, row in zip(y, rows, strict=True)]
    (tmp_path / "samples").write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["svm-train", "-q", "-g", "0.05", str(tmp_path / "samples"), str(tmp_path / "model")],
        check=True,
    )
    model = SVC.load(tmp_path / "model", columns=X.shape[1])
    assert model.classes_.tolist() == np.unique(y).tolist()
    theirs = sklearn.svm.SVC(gamma=0.05).fit(X, y)
    np.testing.assert_allclose(model.decision_function(X), theirs.decision_function(X), atol=0.05)
    subprocess.run(["svm-predict", "-q", "samples", "model", "out"], check=True, cwd=tmp_path)
    # Of classes with as many votes libsvm takes the one that came first in its samples.
    votes = np.sort(count_votes(model.machine_.decide(X), len(model.classes_)), axis=1)
    clear = votes[:, -1] > votes[:, -2]
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "out")[clear], model.predict(X)[clear])
    assert clear.mean() > 0.9


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_a_file_holds_the_machine(trained, name, tmp_path):
    model, X, _ = trained
    model.save(tmp_path / name)
    loaded = SVC.load(tmp_path / name, columns=X.shape[1])
    np.testing.assert_allclose(loaded.decision_function(X), model.decision_function(X), atol=1e-12)
    np.testing.assert_array_equal(loaded.classes_, model.classes_)
    np.testing.assert_array_equal(loaded.n_support_, model.n_support_)
    if name.endswith("safetensors"):
        np.testing.assert_array_equal(loaded.support_, model.support_)
        assert loaded.machine_.pairs == model.machine_.pairs
        assert type(loaded.support_vectors_) is type(model.support_vectors_)


def test_names_of_classes_go_into_safetensors_alone(tmp_path):
    X, y = CANCER
    model = SVC().fit(X, np.array(["no", "yes"])[y])
    with pytest.raises(UsageError, match="labels are no whole numbers"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model.safetensors")
    assert (SVC.load(tmp_path / "model.safetensors").predict(X) == model.predict(X)).all()
    with pytest.raises(UsageError, match="function"):
        SVC(kernel=laplacian).fit(X[:50], y[:50]).save(tmp_path / "model")


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("svm_type c_svc", "svm_type one_class", 9, "svm_type is one_class"),
        ("kernel_type rbf", "kernel_type precomputed", 9, "kernel_type is precomputed"),
        ("gamma ", "gamma x", 9, "could not convert"),
        ("rho ", "rho 1 ", 9, "rho has 2 numbers, and 1 are needed"),
        ("SV\n", "SV\n1 3:1 2:1\n", 9, "support vectors follow"),
        ("rho ", "rho nan\n", 10, "rho has a number that is not finite"),
        ("label 0 1", "label 1 1", 9, "label names a class twice"),
        ("nr_sv ", "nr_sv -", 9, "nr_sv has a number below 0"),
        ("1:", "1:inf 2:", 10, "a support vector has a number that is not finite"),
        ("1:", "0:", 10, "must rise, from 1"),
        ("1:", "1;", 10, "cannot be read"),
    ],
)
def test_a_wrong_model_file_is_refused_with_its_line(old, new, line, said, tmp_path):
    SVC().fit(*CANCER).save(tmp_path / "model")
    text = (tmp_path / "model").read_text()
    assert old in text
    (tmp_path / "model").write_text(text.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        load_machine(tmp_path / "model")
    assert said in str(caught.value)
    assert f"line {line}" in str(caught.value)


# -- bad input ---------------------------------------------------------------------------------


def with_value(value):
    X = CANCER[0].copy()
    X[3, 2] = value
    return X


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"C": 0}, "C=0 is not a finite number above 0"),
        ({"C": -1.0}, "C=-1.0 is not"),
        ({"C": float("nan")}, "C=nan"),
        ({"C": "1"}, "C='1'"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"gamma": -0.1}, "gamma=-0.1 is not 'scale', 'auto' or a finite number from 0"),
        ({"gamma": "large"}, "gamma='large'"),
        ({"degree": -1}, "degree=-1"),
        ({"degree": 2.5}, "degree=2.5 is not a whole number"),
        ({"coef0": float("inf")}, "coef0=inf"),
        ({"cache_size": 0}, "cache_size=0"),
        ({"max_iter": -2}, "max_iter=-2"),
        ({"working_set": 1}, "working_set=1 is not a whole number from 2 to 1024"),
        ({"working_set": 1025}, "working_set=1025"),
        ({"working_set": True}, "working_set=True"),
        ({"processes": 0}, "processes=0"),
        ({"elimination": "single3"}, "elimination='single3' is no rule"),
        ({"kernel": "precomputed"}, "kernel='precomputed'"),
        ({"kernel": "cosine"}, "kernel='cosine'"),
        ({"probability": True}, "CalibratedClassifierCV"),
        ({"decision_function_shape": "ovx"}, "decision_function_shape"),
        ({"shrinking": 1}, "shrinking=1"),
        ({"class_weight": "heavy"}, "class_weight='heavy'"),
        ({"class_weight": {0: 0.0}}, "not above 0"),
        ({"class_weight": {7: 1.0}}, "class_weight"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_one_error(words, said):
    with pytest.raises(ValueError) as caught:
        SVC(**words).fit(*CANCER)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("X", "y", "weights", "said"),
    [
        (with_value(np.nan), CANCER[1], None, "NaN"),
        (with_value(np.inf), CANCER[1], None, "infinity"),
        (sparse.csr_matrix(with_value(np.nan)), CANCER[1], None, "NaN"),
        (CANCER[0], np.zeros(569), None, "number of classes has to be greater than one"),
        (CANCER[0], CANCER[1] + 0.5 * CANCER[0][:, 0], None, "continuous"),
        (CANCER[0][:10], CANCER[1], None, "inconsistent"),
        (CANCER[0], np.full(569, np.nan), None, "NaN"),
        (CANCER[0], CANCER[1], np.ones(3), "sample_weight has shape (3,)"),
        (CANCER[0], CANCER[1], np.full(569, np.nan), "sample_weight contains NaN"),
        (CANCER[0], CANCER[1], np.zeros(569), "all samples have zero or negative weights"),
        (CANCER[0], CANCER[1], CANCER[1], "of one class"),
        (DIGITS[0], DIGITS[1], DIGITS[1], "no sample of class 0 has a positive weight"),
        (CANCER[0][:, 0], CANCER[1], None, "Expected 2D array"),
        (CANCER[0][:, :0], CANCER[1], None, "0 feature"),
        (CANCER[0] * 1e200, CANCER[1], None, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_samples_are_one_error(X, y, weights, said):
    with pytest.raises(ValueError) as caught, np.errstate(all="ignore"):
        SVC().fit(X, y, sample_weight=weights)
    assert said in str(caught.value)


def test_other_columns_are_refused():
    model = SVC().fit(*CANCER)
    with pytest.raises(ValueError, match="features"):
        model.predict(CANCER[0][:, :4])
    with pytest.raises(DataError, match="4 columns"):
        model.machine_.predict(CANCER[0][:, :4])


def test_without_its_packages_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "headway.svm.estimator", None)
    error = ModuleNotFoundError("No module named 'numba'", name="numba")

    def refuse(name, *arguments, **words):
        if name == "headway.svm" and arguments and "estimator" in (arguments[2] or ()):
            raise error
        return real(name, *arguments, **words)

    import builtins

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"pip install 'headway\[svm\]'"):
        headway.svm.__getattr__("SVC")


# -- interruption and states -------------------------------------------------------------------


def test_an_unfinished_fit_says_so_and_goes_on():
    X, y = NOISY
    model = SVC(C=10.0, working_set=16, max_iter=2500, warm_start=True)
    with pytest.warns(ConvergenceWarning, match="unfinished"):
        model.fit(X, y)
    assert model.fit_status_ == 1
    first = model.machine_
    assert first.violation > model.tol
    with pytest.warns(ConvergenceWarning):
        model.set_params(max_iter=500).fit(X, y)
    # It has gone on.
    assert model.machine_.objective < first.objective
    model.set_params(max_iter=-1).fit(X, y)
    assert model.fit_status_ == 0
    whole = SVC(C=10.0, working_set=16).fit(X, y)
    assert model.machine_.steps < whole.machine_.steps
    assert model.machine_.objective == pytest.approx(whole.machine_.objective, rel=1e-4)
    # Another problem begins anew.
    other = model.set_params(C=1.0).fit(X, y)
    assert other.machine_.steps == SVC(C=1.0, working_set=16).fit(X, y).machine_.steps


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_fit_in_order(number):
    X, y = make_classification(3000, 20, n_informative=10, flip_y=0.3, random_state=0)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    model = SVC(C=1000.0, working_set=8, warm_start=True)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.warns(ConvergenceWarning, match="unfinished"):
        model.fit(X, y)
    timer.join()
    assert model.fit_status_ == 1
    assert model._state is not None
    assert len(model.support_) > 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_directory_keeps_the_state_until_the_fit_has_finished(tmp_path):
    X, y = NOISY
    words = {"C": 10.0, "working_set": 16, "directory": tmp_path}
    with pytest.warns(ConvergenceWarning):
        first = SVC(max_iter=3000, **words).fit(X, y)
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").iterdir())
    # Another problem has a folder of its own.
    SVC(**{**words, "C": 1.0}).fit(X, y)
    assert list(tmp_path.iterdir()) == [folder]
    whole = SVC(C=10.0, working_set=16).fit(X, y)
    second = SVC(**words).fit(X, y)
    assert second.fit_status_ == 0
    assert second.machine_.steps < whole.machine_.steps
    assert second.machine_.objective < first.machine_.objective
    assert not list(tmp_path.iterdir())


def test_a_damaged_state_is_left_aside(tmp_path):
    X, y = NOISY
    words = {"C": 10.0, "working_set": 16, "directory": tmp_path}
    with pytest.warns(ConvergenceWarning):
        SVC(max_iter=3000, **words).fit(X, y)
    (file,) = tmp_path.glob("*/checkpoints/step-*/*.bin")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    whole = SVC(C=10.0, working_set=16).fit(X, y)
    assert SVC(**words).fit(X, y).machine_.steps == whole.machine_.steps


def digits_training():
    X, y = DIGITS[0][:500], DIGITS[1][:500]
    classes, codes = np.unique(y, return_inverse=True)
    return np.ascontiguousarray(X), codes.astype(np.int64), np.ones(len(y)), classes


def test_a_stopped_training_of_many_classes_goes_on_behind_its_finished_pairs():
    problem = digits_training()
    options = TrainingOptions(Kernel("rbf", 0.05), C=10.0)
    states: list[TrainingState] = []
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 60

    part = train_machine(*problem, options, Peers(), save=states.append, stop=stop)
    assert not part.finished
    assert 0 < len(part.pairs) < 45
    state = unpack_state(pack_state(states[-1]))
    assert np.array_equal(pack_state(state), pack_state(states[-1]), equal_nan=True)
    places = []
    rest = train_machine(
        *problem, options, Peers(), resume=state, observe=lambda at: places.append(at.pair)
    )
    whole = train_machine(*problem, options, Peers())
    assert rest.finished
    assert min(places) == len(part.pairs) - 1
    assert rest.objective == pytest.approx(whole.objective, rel=1e-4)


@pytest.mark.parametrize("form", [np.ascontiguousarray, sparse.csr_matrix])
def test_the_digest_of_a_training_sees_every_change(form):
    X, codes, factors, _ = digits_training()
    options = TrainingOptions(Kernel("rbf", 0.05))

    def digest(rows=X, codes=codes, factors=factors, options=options):
        return digest_training(form(rows), codes, factors, options, Peers())

    swapped, changed, relabelled = X.copy(), X.copy(), codes.copy()
    swapped[[0, 1]] = X[[1, 0]]
    changed[5, 20] += 0.0625
    relabelled[[0, 1]] = codes[[1, 0]]
    weighted = factors.copy()
    weighted[7] = 2
    found = [
        digest(),
        digest(rows=swapped),
        digest(rows=changed),
        digest(codes=relabelled),
        digest(factors=weighted),
        digest(options=replace(options, C=2.0)),
        digest(options=replace(options, kernel=Kernel("rbf", 0.06))),
    ]
    assert len(set(found)) == len(found)
    assert digest(options=replace(options, tolerance=1e-5, working_set=2)) == found[0]


def test_gamma_scale_is_that_of_scikit_learn():
    for X, y in (NOISY, SPARSE, (NOISY[0] + 1e6, NOISY[1])):
        ours = SVC(max_iter=1)
        with pytest.warns(ConvergenceWarning):
            ours.fit(X, y)
        theirs = sklearn.svm.SVC().fit(X, y)._gamma
        assert ours.machine_.kernel.gamma == pytest.approx(theirs, rel=1e-9)


def test_the_progress_is_written_to_standard_error(capsys):
    SVC(verbose=True).fit(*CANCER)
    assert "violation" in capsys.readouterr().err
