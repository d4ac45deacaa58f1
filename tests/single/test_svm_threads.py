"""single: kernel values by several threads: the same bits, and torch's threads as before."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import sparse

from headway.svm import SVC
from headway.svm.kernels import Kernel, prepare_samples, weighted_sums
from headway.svm.threads import CHUNK, over_chunks, threads_over_blocks

ROWS, COLUMNS = 9 * CHUNK + 7, CHUNK


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def samples():
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, 5))
    return rows, random.normal(size=COLUMNS), rows.sum(axis=1) > 0


def test_each_chunk_is_made_once_and_by_several_threads(three_threads):
    made, makers = [], set()
    # Nobody is done with the first chunk before all three have begun one.
    all_begun = threading.Barrier(3, timeout=30)

    def work(first, last):
        made.append((first, last))
        if threading.get_ident() not in makers:
            makers.add(threading.get_ident())
            all_begun.wait()

    with threads_over_blocks():
        over_chunks(ROWS, COLUMNS, work, concurrent=True)
    assert len(makers) == 3
    edges = [*range(0, ROWS, CHUNK), ROWS]
    assert sorted(made) == list(pairwise(edges))


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("kernel", ["rbf", "poly"])
def test_sums_have_the_same_bits_for_any_number_of_threads(kind, kernel, samples, three_threads):
    rows, weights, _ = samples
    of = Kernel(kernel, gamma=0.3)
    prepared, others = (
        prepare_samples(of, kind(part), torch.float32) for part in (rows, rows[:COLUMNS])
    )
    with threads_over_blocks():
        together = weighted_sums(prepared, others, weights)
    torch.set_num_threads(1)
    assert (together == weighted_sums(prepared, others, weights)).all()


def test_what_fails_in_a_thread_is_raised_and_torch_has_its_threads_again(three_threads):
    def work(first, last):
        raise ValueError(f"chunk {first}")

    with threads_over_blocks():
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="chunk"):
            over_chunks(ROWS, COLUMNS, work, concurrent=True)
    assert torch.get_num_threads() == 3


def test_fits_in_several_threads_leave_each_with_its_threads(samples, three_threads):
    rows, _, labels = samples
    alone = SVC().fit(rows, labels)
    found, left = {}, {}

    def fit(number):
        torch.set_num_threads(3)
        found[number] = SVC().fit(rows, labels).dual_coef_
        left[number] = torch.get_num_threads()

    fitting = [threading.Thread(target=fit, args=(number,)) for number in range(3)]
    for one in fitting:
        one.start()
    for one in fitting:
        one.join()
    assert left == {0: 3, 1: 3, 2: 3}
    assert all((coefficients == alone.dual_coef_).all() for coefficients in found.values())
    assert torch.get_num_threads() == 3


def test_the_users_own_kernel_is_called_by_the_thread_that_fits(samples, three_threads):
    rows, _, labels = samples
    callers, threads = set(), set()

    def kernel(one, other):
        callers.add(threading.get_ident())
        threads.add(torch.get_num_threads())
        return one @ other.T

    SVC(kernel=kernel).fit(rows, labels).decision_function(rows)
    assert (callers, threads) == ({threading.get_ident()}, {3})
