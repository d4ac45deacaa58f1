"""`SVC`: support vector classification with scikit-learn's interface, on one process or many.

    from headway.svm import SVC

    SVC(C=10, gamma=0.1).fit(X, y)                 # this process
    SVC(C=10, gamma=0.1, processes=4).fit(X, y)    # four workers of this machine
    SVC(C=10, gamma=0.1).fit(own_X, own_y)         # under torchrun or srun: each rank its own rows

The problem, its solution and the attributes are those of `sklearn.svm.SVC`; how it is solved is
not (`solver.py`). What is wrong with the parameters or with the data of one rank is an error on all
ranks.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from headway.documents import parse_json
from headway.errors import UsageError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.stop_request import StopRequest
from headway.svm.arrays import Array, Indices, Matrix
from headway.svm.elimination import NONE, RULES
from headway.svm.kernels import Kernel
from headway.svm.local_workers import train_in_workers
from headway.svm.machine import Machine, count_votes, pairs_of
from headway.svm.model_files import load_machine, save_machine
from headway.svm.peers import Peers
from headway.svm.progress_line import ProgressLine
from headway.svm.state_files import StateFiles
from headway.svm.training import (
    TrainingOptions,
    TrainingState,
    digest_training,
    train_machine,
)

KERNELS = ("linear", "poly", "rbf", "sigmoid")
LARGEST_WORKING_SET = 1024
_STRETCH = 8192


class InvalidFit(UsageError, ValueError):
    """Parameters or samples of a support vector machine that cannot be used."""


@dataclass(frozen=True)
class _Samples:
    """What a rank brings: its samples, their labels, and weights that are at least 0."""

    rows: Matrix
    labels: NDArray[Any]
    weights: Array


@dataclass(frozen=True)
class _Problem:
    """What is to be trained; of all ranks together but for rows, codes and weights."""

    rows: Matrix
    codes: Indices
    weights: Array
    classes: NDArray[Any]
    class_weight: Array
    total: int
    options: TrainingOptions


class SVC(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Support vector classification, trained by working sets over all ranks.

    Args:
        C: Bound of the multipliers, times the weights of class and sample.
        kernel: "linear", "poly", "rbf", "sigmoid", or a function of two matrices of samples, [n, m]
            and [k, m], to their kernel values [n, k]. Not "precomputed": no matrix of all pairs of
            samples is ever made.
        degree, gamma, coef0: Of the kernel, as scikit-learn's.
        shrinking: False: no samples are eliminated, whatever `elimination` says.
        probability: Only False; calibrate with `sklearn.calibration.CalibratedClassifierCV`.
        tol: Largest violation of the optimality conditions, over all samples.
        cache_size: Accepted, and without effect: no kernel values are kept.
        class_weight: None, "balanced", or a dictionary from labels to weights.
        verbose: Write a line about progress to standard error, once a second.
        max_iter: Steps of pairs for each pair of classes, after which the machine is unfinished;
            looked at after every working set. -1: 10^9.
        decision_function_shape: "ovr" or "ovo".
        break_ties: As scikit-learn's.
        random_state: Accepted, and without effect: nothing is random.
        elimination: When samples are eliminated: "adaptive", "none", or one of the twelve published
            rules, "single2" to "multi50pc" (`headway.svm.elimination.RULES`).
        working_set: Samples that are solved for at once, 2 to 1024.
        processes: Workers that `fit` starts on this machine; 1: none. Where a launcher has started
            this process as one of several, `fit` joins those, and this must be 1.
        directory: Where states of a fit are kept until it has finished: `fit` of the same problem
            goes on from the newest one.
        warm_start: Go on from an unfinished fit of the same problem by this object.

    Attributes:
        classes_, class_weight_, support_, support_vectors_, n_support_, dual_coef_, intercept_,
        coef_ (kernel "linear"), n_iter_, shape_fit_, n_features_in_, feature_names_in_: as
            scikit-learn's; with several ranks `support_` counts through the samples of all, in the
            order of the ranks.
        fit_status_: 0: solved to the tolerance; 1: unfinished.
        machine_: The trained machine (`headway.svm.machine.Machine`), with facts of its training.
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        kernel: Any = "rbf",
        degree: int = 3,
        gamma: Any = "scale",
        coef0: float = 0.0,
        shrinking: bool = True,
        probability: bool = False,
        tol: float = 1e-3,
        cache_size: float = 200,
        class_weight: Any = None,
        verbose: Any = False,
        max_iter: int = -1,
        decision_function_shape: str = "ovr",
        break_ties: bool = False,
        random_state: Any = None,
        elimination: str = "adaptive",
        working_set: int = 512,
        processes: int = 1,
        directory: str | os.PathLike[str] | None = None,
        warm_start: bool = False,
    ) -> None:
        self.C = C
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.shrinking = shrinking
        self.probability = probability
        self.tol = tol
        self.cache_size = cache_size
        self.class_weight = class_weight
        self.verbose = verbose
        self.max_iter = max_iter
        self.decision_function_shape = decision_function_shape
        self.break_ties = break_ties
        self.random_state = random_state
        self.elimination = elimination
        self.working_set = working_set
        self.processes = processes
        self.directory = directory
        self.warm_start = warm_start

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SVC:
        """Train; collective where this process is one of several ranks.

        SIGTERM or a first Ctrl-C ends the training in order, with an unfinished machine and a
        `ConvergenceWarning`; a second Ctrl-C ends it at once.

        Args:
            X: This rank's samples, [n, m], dense or sparse. Sparse ones are copied where their
                indices are not sorted or occur twice (values of one place are added).
            y: Their labels, [n].
            sample_weight: Factors of C, [n]; samples without a positive one take no part.

        Raises:
            ValueError: The parameters or the samples cannot be used; on all ranks.
        """
        failure: Exception | None = None
        problem = None
        with _found_world(self.processes) as world, Peers(world) as peers:
            try:
                samples = _agreed(lambda: self._check(X, y, sample_weight), peers)
                problem = self._problem(samples, peers)
            except (ValueError, TypeError) as error:
                failure = error
            else:
                machine, self._state = self._train(problem, peers)
        # Outside of the world, which all ranks have left in order.
        if failure is not None:
            raise failure
        assert problem is not None
        self._take(machine, problem)
        return self

    def decision_function(self, X: Any) -> Array:
        """Decision values: [n] of two classes, else [n, classes] or, of "ovo", [n, pairs]."""
        values = self._decide(X)
        if len(self.classes_) == 2:
            # scikit-learn's sign: above 0 for the second class.
            found: Array = -values[:, 0]
            return found
        return values if self.decision_function_shape == "ovo" else self._one_against_rest(values)

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels of samples, [n]."""
        check_is_fitted(self)
        if self.break_ties and self.decision_function_shape == "ovo":
            raise InvalidFit("break_ties must be False when decision_function_shape is 'ovo'")
        values = self._decide(X)
        votes = (
            self._one_against_rest(values)
            if self.break_ties and len(self.classes_) > 2
            else count_votes(values, len(self.classes_))
        )
        labels: NDArray[Any] = self.classes_[votes.argmax(axis=1)]
        return labels

    @property
    def coef_(self) -> Matrix:
        """Weights of the columns, where the kernel is linear: [pairs, m]."""
        if self.kernel != "linear":
            raise AttributeError("coef_ is only available when using a linear kernel")
        check_is_fitted(self)
        machine = self.machine_
        ends = np.cumsum(machine.counts)
        stretches = [slice(e - n, e) for e, n in zip(ends, machine.counts, strict=True)]
        rows = []
        for one, other in pairs_of(len(self.classes_)):
            weights = np.zeros(len(machine.numbers))
            weights[stretches[one]] = machine.coefficients[other - 1, stretches[one]]
            weights[stretches[other]] = machine.coefficients[one, stretches[other]]
            rows.append(machine.rows.T @ weights)
        found = np.array(rows) * (-1.0 if len(self.classes_) == 2 else 1.0)
        if sparse.issparse(machine.rows):
            return sparse.csr_matrix(found)
        found.flags.writeable = False
        return found

    @property
    def n_support_(self) -> NDArray[np.int32]:
        """Support vectors of each class."""
        if not hasattr(self, "machine_"):
            raise AttributeError("n_support_ is only available after fit")
        counts: NDArray[np.int32] = self.machine_.counts.astype(np.int32)
        return counts

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine: as safetensors where the name ends so, else as libsvm's model file."""
        check_is_fitted(self)
        save_machine(self.machine_, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], columns: int | None = None) -> SVC:
        """An estimator with a machine of a file, also of libsvm's svm-train.

        Args:
            columns: See `model_files.load_machine`.
        """
        machine = load_machine(Path(path), columns)
        kernel = machine.kernel
        self = cls(
            kernel=kernel.name, gamma=kernel.gamma, degree=int(kernel.degree), coef0=kernel.coef0
        )
        self.n_features_in_ = machine.rows.shape[1]
        self._show(machine)
        return self

    # -- before ------------------------------------------------------------------------------

    def _check(self, X: Any, y: Any, sample_weight: Any) -> _Samples:
        """This rank's samples, if parameters and samples are sound; not collective."""
        self._check_parameters()
        rows, labels = validate_data(
            self, X, y, dtype=np.float64, order="C", accept_sparse="csr", accept_large_sparse=False
        )
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        if sparse.issparse(rows):
            rows = _canonical(rows)
        if callable(self.kernel):
            _check_function(self.kernel, rows)
        return _Samples(rows, labels, _checked_weights(sample_weight, len(labels)))

    def _check_parameters(self) -> None:
        if self.kernel not in KERNELS and not callable(self.kernel):
            raise InvalidFit(
                f"kernel={self.kernel!r} is none of {', '.join(KERNELS)}, and no function",
                fix="A matrix of all pairs would not fit where this is meant for: give a function "
                "of two matrices of samples."
                if self.kernel == "precomputed"
                else "",
            )
        if self.probability is not False:
            raise InvalidFit(
                f"probability={self.probability!r} is not offered",
                fix="Use sklearn.calibration.CalibratedClassifierCV(SVC(...), ensemble=False).",
            )
        if self.gamma not in ("scale", "auto"):
            _check_number("gamma", self.gamma, 0, also="'scale', 'auto' or ")
        _check_number("C", self.C, 0, above=True)
        _check_number("tol", self.tol, 0, above=True)
        _check_number("coef0", self.coef0)
        _check_number("cache_size", self.cache_size, 0, above=True)
        _check_number("degree", self.degree, 0, kind=Integral)
        _check_number("max_iter", self.max_iter, -1, kind=Integral)
        _check_number("working_set", self.working_set, 2, LARGEST_WORKING_SET, kind=Integral)
        _check_number("processes", self.processes, 1, kind=Integral)
        # loky makes its own start method that of its processes, and theirs would not know it.
        method = multiprocessing.get_start_method(allow_none=True)
        if self.processes > 1 and method not in (None, *multiprocessing.get_all_start_methods()):
            raise InvalidFit(
                f"processes={self.processes} inside of a worker of joblib",
                why=f"Its start method {method!r} is unknown to processes that are started here.",
                fix="Use n_jobs=1 for the search, or processes=1 for the fits.",
            )
        for name in ("shrinking", "break_ties", "warm_start"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise InvalidFit(f"{name}={getattr(self, name)!r} is neither True nor False")
        if self.decision_function_shape not in ("ovr", "ovo"):
            raise InvalidFit(
                f"decision_function_shape={self.decision_function_shape!r} is neither 'ovr' nor "
                "'ovo'"
            )
        if str(self.elimination).lower() not in RULES:
            raise InvalidFit(
                f"elimination={self.elimination!r} is no rule",
                fix=f"Use one of {', '.join(RULES)}.",
            )
        weight = self.class_weight
        if not (weight is None or weight == "balanced" or isinstance(weight, Mapping)):
            raise InvalidFit(f"class_weight={weight!r} is not None, 'balanced' or a dictionary")

    def _problem(self, samples: _Samples, peers: Peers) -> _Problem:
        """What all ranks train together; collective, and raises alike on all."""
        rows = samples.rows
        _check_kinds(rows, peers)
        classes = _all_classes(samples.labels, peers)
        codes = np.searchsorted(classes, samples.labels).astype(np.int64)
        both = (codes, codes[samples.weights > 0])
        own = np.array([np.bincount(some, minlength=len(classes)) for some in both], dtype=float)
        counts = peers.sum(own, "the numbers of samples")
        _check_classes(classes, counts)
        total = int(counts[0].sum())
        class_weight = self._class_weight(classes, counts[0])
        kernel = (
            Kernel("callable", function=self.kernel)
            if callable(self.kernel)
            else Kernel(
                self.kernel,
                self._kernel_gamma(rows, total, peers),
                int(self.degree),
                float(self.coef0),
            )
        )
        options = TrainingOptions(
            kernel=kernel,
            C=float(self.C),
            class_factors=tuple(class_weight.tolist()),
            tolerance=float(self.tol),
            working_set=int(self.working_set),
            rule=RULES[str(self.elimination).lower()] if self.shrinking else NONE,
            most_steps=int(self.max_iter),
        )
        return _Problem(rows, codes, samples.weights, classes, class_weight, total, options)

    def _class_weight(self, classes: NDArray[Any], counts: Array) -> Array:
        if self.class_weight == "balanced":
            balanced: Array = counts.sum() / (len(classes) * counts)
            return balanced
        weights: Array = compute_class_weight(self.class_weight, classes=classes, y=classes)
        if not (np.isfinite(weights).all() and (weights > 0).all()):
            raise InvalidFit(f"class_weight={self.class_weight!r} has weights that are not above 0")
        return weights

    def _kernel_gamma(self, rows: Matrix, total: int, peers: Peers) -> float:
        if self.gamma == "auto":
            return 1.0 / int(rows.shape[1])
        if self.gamma != "scale":
            return float(self.gamma)
        variance = _variance(rows, total * rows.shape[1], peers)
        width = int(rows.shape[1])
        return 1.0 / (width * variance) if variance else 1.0

    # -- training ----------------------------------------------------------------------------

    def _train(self, problem: _Problem, peers: Peers) -> tuple[Machine, TrainingState | None]:
        arrays = (problem.rows, problem.codes, problem.weights)
        resume: TrainingState | None = getattr(self, "_state", None) if self.warm_start else None
        files = None
        if self.directory is not None:
            digest = digest_training(*arrays, problem.options, peers)
            files = StateFiles.of(Path(self.directory), digest)
        if self.processes > 1:
            found = train_in_workers(
                *arrays,
                problem.classes,
                problem.options,
                processes=int(self.processes),
                files=files,
                resume=resume,
                verbose=bool(self.verbose),
            )
            machine, state = found.machine, found.state
        else:
            machine, state = self._train_here(problem, peers, files, resume)
        if files is not None and machine.finished and peers.rank == 0:
            files.remove()
        return machine, state

    def _train_here(
        self,
        problem: _Problem,
        peers: Peers,
        files: StateFiles | None,
        resume: TrainingState | None,
    ) -> tuple[Machine, TrainingState | None]:
        states: list[TrainingState] = []

        def save(state: TrainingState) -> None:
            states[:] = [state]
            if files is not None and peers.rank == 0:
                files.write(state)

        if files is not None:
            resume = files.newest() or resume
        with StopRequest() as request:
            machine = train_machine(
                problem.rows,
                problem.codes,
                problem.weights,
                problem.classes,
                problem.options,
                peers,
                observe=ProgressLine() if self.verbose and peers.rank == 0 else None,
                save=save,
                resume=resume,
                stop=lambda: request.requested is not None,
            )
        return machine, None if machine.finished else states[-1]

    # -- afterwards --------------------------------------------------------------------------

    def _take(self, machine: Machine, problem: _Problem) -> None:
        if not (np.isfinite(machine.coefficients).all() and np.isfinite(machine.offsets).all()):
            raise InvalidFit(
                "the dual coefficients or intercepts are not finite",
                why="The input data may contain large values and need to be preprocessed.",
            )
        self.class_weight_ = problem.class_weight
        self.shape_fit_ = (problem.total, problem.rows.shape[1])
        self._show(machine)
        if not machine.finished:
            warnings.warn(
                f"the machine is unfinished: {len(machine.pairs)} of {len(machine.offsets)} "
                f"problems of two classes were looked at, the largest violation is "
                f"{machine.violation:.3g}, and tol={self.tol:g}; fit again with warm_start=True "
                "goes on (max_iter or a signal ended it)",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _show(self, machine: Machine) -> None:
        """The attributes of scikit-learn's SVC."""
        self.machine_ = machine
        self.classes_ = machine.classes
        self.support_ = machine.numbers.astype(np.int32)
        self.support_vectors_ = machine.rows
        # libsvm votes for the first of two classes above 0, scikit-learn for the second.
        sign = -1.0 if len(machine.classes) == 2 else 1.0
        self.dual_coef_ = machine.coefficients * sign
        if sparse.issparse(machine.rows):
            self.dual_coef_ = sparse.csr_matrix(self.dual_coef_)
        self.intercept_ = -sign * machine.offsets
        self.fit_status_ = 0 if machine.finished else 1
        self.n_iter_ = np.zeros(len(machine.offsets), dtype=np.int32)
        self.n_iter_[: len(machine.pairs)] = [pair.steps for pair in machine.pairs]

    def _decide(self, X: Any) -> Array:
        check_is_fitted(self)
        rows = validate_data(
            self, X, dtype=np.float64, order="C", accept_sparse="csr", reset=False,
            accept_large_sparse=False,
        )  # fmt: skip
        machine: Machine = self.machine_
        return machine.decide(_canonical(rows) if sparse.issparse(rows) else rows)

    def _one_against_rest(self, values: Array) -> Array:
        """Votes, with ties decided by the sums of decision values: scikit-learn's formula."""
        count = len(self.classes_)
        votes, sums = np.zeros((len(values), count)), np.zeros((len(values), count))
        for place, (one, other) in enumerate(pairs_of(count)):
            second = values[:, place] < 0
            votes[:, one] += ~second
            votes[:, other] += second
            sums[:, one] += values[:, place]
            sums[:, other] -= values[:, place]
        # Less than a third of a vote: they only decide between equals.
        total: Array = votes + sums / (3 * (np.abs(sums) + 1))
        return total


@contextmanager
def _found_world(processes: Any) -> Iterator[World | None]:
    """The process group that the program has made, or that of the launcher; None: there is none."""
    place = LaunchEnv.here()
    adopts = dist.is_available() and dist.is_initialized()
    if not adopts and not place.found_world:
        yield None
        return
    if processes != 1:
        raise InvalidFit(
            f"processes={processes} in a process that is itself one of several",
            why="A launcher (torchrun, srun, mpirun) or the program has made a world.",
            fix="Leave processes at 1: all ranks train together, each with its own rows.",
        )
    if adopts:
        yield World.adopt()
        return
    with World.join(place) as world:
        yield world


def _agreed(find: Callable[[], _Samples], peers: Peers) -> _Samples:
    """What `find` returns; what it raises on one rank, all raise; collective."""
    failure: Exception | None = None
    try:
        found = find()
    except (ValueError, TypeError) as error:
        failure = error
    # The others must not begin what this rank cannot.
    texts = _gather_texts(str(failure or ""), peers, "the check of the samples")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise InvalidFit(text, where=f"rank {rank}")
    return found


def _gather_texts(text: str, peers: Peers, doing: str) -> list[str]:
    """A text of each rank; collective."""
    own = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.float64)
    return [part.astype(np.uint8).tobytes().decode() for part in peers.gather_arrays(own, doing)]


def _check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: bool = False,
    kind: Any = Real,
    also: str = "",
) -> None:
    sort = "a whole number" if kind is Integral else "a finite number"
    bounds = "" if least == -math.inf else f" {'above' if above else 'from'} {least}"
    bounds += "" if most == math.inf else f" to {most}"
    sound = isinstance(value, kind) and not isinstance(value, (bool, np.bool_))
    if not (
        sound
        and math.isfinite(value)
        and (value > least if above else value >= least)
        and value <= most
    ):
        raise InvalidFit(f"{name}={value!r} is not {also}{sort}{bounds}")


def _canonical(rows: Any) -> sparse.csr_matrix:
    """Compressed rows with sorted indices, each once; the caller's are left as they are."""
    found = sparse.csr_matrix(rows)
    if not found.has_canonical_format:
        found = found.copy()
        found.sum_duplicates()
        # Sums of finite values can be infinite.
        check_array(found, accept_sparse="csr")
    return found


def _check_function(kernel: Any, rows: Matrix) -> None:
    """Call a kernel of the user's own with two and three samples, and look at what it returns."""
    some, others = rows[:2], rows[:3]
    shape = np.shape(kernel(some, others))
    if shape != (some.shape[0], others.shape[0]):
        raise InvalidFit(
            f"the kernel returned an array of shape {shape} for {some.shape[0]} and "
            f"{others.shape[0]} samples",
            fix=f"It must return kernel values of shape {(some.shape[0], others.shape[0])}.",
        )


def _checked_weights(weights: Any, count: int) -> Array:
    """Weights that are at least 0."""
    if weights is None:
        return np.ones(count)
    found: Array = np.asarray(weights, dtype=np.float64)
    if found.shape != (count,):
        raise InvalidFit(
            f"sample_weight has shape {found.shape}, and X has {count} samples",
            fix=f"Give one weight for each sample: shape ({count},).",
        )
    if not np.isfinite(found).all():
        raise InvalidFit("sample_weight contains NaN or infinity")
    return np.maximum(found, 0.0)


def _check_kinds(rows: Matrix, peers: Peers) -> None:
    """Raise on all ranks unless all have the same columns, all dense or all sparse."""
    own = np.array([rows.shape[1], sparse.issparse(rows)], dtype=np.float64)
    kinds = peers.gather(own, "the numbers of columns")
    for column, what in ((0, "numbers of columns"), (1, "kinds of samples (1: sparse)")):
        if len(np.unique(kinds[:, column])) > 1:
            told = ", ".join(f"rank {r}: {int(k)}" for r, k in enumerate(kinds[:, column]))
            raise InvalidFit(f"the ranks have different {what}", why=told)


def _all_classes(labels: NDArray[Any], peers: Peers) -> NDArray[Any]:
    """The labels that occur on any rank, in sorted order; collective."""
    own = np.unique(labels)
    if peers.world is None:
        return own
    kind = "text" if own.dtype.kind in "OUS" else "numbers"
    texts = _gather_texts(json.dumps([kind, own.tolist()], default=str), peers, "the labels")
    found = [parse_json(text) for text in texts]
    if len({kind for kind, _ in found}) > 1:
        raise InvalidFit(
            "some ranks have numbers for labels, and others text",
            why=", ".join(f"rank {rank}: {kind}" for rank, (kind, _) in enumerate(found)),
        )
    every = np.unique(np.array([label for _, some in found for label in some]))
    return every.astype(object) if own.dtype.kind == "O" else every


def _check_classes(classes: NDArray[Any], counts: Array) -> None:
    """Raise unless there are two classes, and each has samples of positive weight.

    Args:
        counts: Of samples, and of those with a positive weight, [2, classes].
    """
    if len(classes) < 2:
        raise InvalidFit(
            f"The number of classes has to be greater than one; got {len(classes)} class"
        )
    if not counts[1].any():
        raise InvalidFit("Invalid input - all samples have zero or negative weights.")
    if np.count_nonzero(counts[1]) == 1:
        raise InvalidFit("Invalid input - all samples with positive weights are of one class.")
    if not counts[1].all():
        missing = classes[counts[1] == 0].tolist()
        raise InvalidFit(
            f"no sample of class {missing[0]!r} has a positive weight",
            fix="Leave out its samples, or give one of them a weight.",
        )


def _variance(rows: Matrix, entries: int, peers: Peers) -> float:
    """The variance of all entries of all ranks' samples; bit by bit the same for any number."""
    mean = _total([_row_sums(rows)], peers) / entries
    if sparse.issparse(rows):
        squares = rows.multiply(rows)
        return _total([_row_sums(squares)], peers) / entries - mean**2
    stretches = range(0, rows.shape[0], _STRETCH)
    parts = [np.square(rows[first : first + _STRETCH] - mean).sum(axis=1) for first in stretches]
    return _total(parts, peers) / entries


def _row_sums(rows: Matrix) -> Array:
    return np.asarray(rows.sum(axis=1), dtype=np.float64).ravel()


def _total(parts: list[Array], peers: Peers) -> float:
    """The sum of the numbers of all ranks, rounded once; collective."""
    numbers = np.concatenate(parts).tolist()
    own: list[float] = []
    for _ in range(3):
        # What is left of the exact sum after the float64 numbers before.
        own.append(math.fsum([*numbers, *(-part for part in own)]))
    return math.fsum(peers.gather(np.array(own), "the variance").ravel().tolist())
