"""single: libsvm's text format: exact numbers, shares of ranks, one error for broken lines."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from headway.errors import DocumentError
from headway.svm.peers import Peers
from headway.svm.run import libsvm_data
from headway.svm.run.libsvm_data import LabelledRows, count_columns, data_sizes, dump, load_rows


class Together(Peers):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, count: int, board: list[Any], meeting: threading.Barrier) -> None:
        super().__init__()
        self._rank, self._count, self._board, self._meeting = rank, count, board, meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> int:
        return self._count

    def gather_arrays(self, values: Any, doing: str) -> list[Any]:
        self._board[self._rank] = values
        self._meeting.wait(20)
        found = list(self._board)
        self._meeting.wait(20)
        return found

    def gather(self, values: Any, doing: str) -> Any:
        return np.array(self.gather_arrays(values, doing))


def on_ranks(path: Path, count: int) -> list[LabelledRows | DocumentError]:
    """What each of so many ranks has read, or its error."""
    board, meeting = [None] * count, threading.Barrier(count)

    def read(rank: int) -> LabelledRows | DocumentError:
        try:
            return load_rows(path, Together(rank, count, board, meeting))
        except DocumentError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(read, range(count)))


def dense(rows: Any) -> np.ndarray:
    return rows.toarray() if sparse.issparse(rows) else rows


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def problems(path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        load_rows(written(path, text), Peers())
    assert caught.value.where == str(path)
    return caught.value.problems


@pytest.mark.parametrize("share", [0.05, 0.9], ids=["sparse", "dense"])
@pytest.mark.parametrize("ending", [".svm", ".svm.gz", ".svm.bz2"])
def test_what_is_written_is_read(ending, share, tmp_path):
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((50, 30)) * 10.0 ** rng.integers(-300, 300, (50, 30))
    rows[rng.random(rows.shape) > share] = 0
    rows[:, 29] = 1  # the last column is not empty
    labels = rng.integers(-3, 4, 50) / 2
    path = tmp_path / f"data{ending}"
    dump(path, rows, labels)
    found = load_rows(path, Peers())
    assert sparse.issparse(found.rows) == (share < libsvm_data.DENSE_SHARE)
    assert np.array_equal(dense(found.rows), rows)
    assert np.array_equal(found.labels, labels)
    assert (found.first, found.total) == (0, 50)


def test_numbers_are_rounded_as_python_does(tmp_path):
    rng = np.random.default_rng(5)
    texts = [f"{value:.{digits}g}" for value, digits in zip(
        rng.standard_normal(4000) * 10.0 ** rng.integers(-40, 40, 4000),
        rng.integers(1, 26, 4000), strict=True,
    )]  # fmt: skip
    texts += ["1e22", "1e23", "9007199254740993", "9007199254740992", "123456789012345678e-5",
              ".5", "5.", "+3", "-0", "0.1e-3", "1E+5", "00000000000000000000001.50", "1e-320",
              "4.9e-324", f"0.{44 * chr(48)}1234567890123456789e45"]  # fmt: skip
    path = written(tmp_path / "n", "".join(f"{text} 1:{text}\n" for text in texts))
    found = load_rows(path, Peers())
    expected = [float(text) for text in texts]
    assert found.labels.tolist() == expected
    assert dense(found.rows)[:, 0].tolist() == expected


def test_comments_blank_lines_and_ends_of_lines(tmp_path):
    text = "# head 7:1\n\n+1 1:2\t3:4 # x 9:9\r\n   \n-1 \r\n  2 2:1e1#\n#\n3.5"
    found = load_rows(written(tmp_path / "n", text), Peers())
    assert found.labels.tolist() == [1, -1, 2, 3.5]
    assert dense(found.rows).tolist() == [[2, 0, 4], [0, 0, 0], [0, 10, 0], [0, 0, 0]]


@pytest.mark.parametrize("block", [7, 64, 2**22])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_line_is_read_by_one_rank(ending, block, tmp_path, monkeypatch):
    monkeypatch.setattr(libsvm_data, "_BLOCK", block)
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 3, (23, 6)) * 1.5
    path = tmp_path / f"n{ending}"
    dump(path, rows, np.arange(23.0))
    for count in (1, 2, 3, 5, 17, 40):
        parts = on_ranks(path, count)
        assert np.array_equal(np.concatenate([dense(part.rows) for part in parts]), rows)
        assert np.concatenate([part.labels for part in parts]).tolist() == list(range(23))
        assert [part.first for part in parts] == np.cumsum([0, *map(len, (
            part.labels for part in parts))])[:-1].tolist()  # fmt: skip
        assert {part.total for part in parts} == {23}
        sizes = data_sizes(path, count)
        assert [size.rows for size in sizes] == [len(part.labels) for part in parts]


def test_columns_are_those_of_all_ranks_and_of_other_files(tmp_path):
    path = written(tmp_path / "n", "1 1:1\n-1 2:1\n1 9:3\n-1 1:1\n")
    assert [part.rows.shape[1] for part in on_ranks(path, 3)] == [9, 9, 9]
    assert count_columns(path, Peers()) == 9
    assert [size.labels for size in data_sizes(path, 2)] == [(1, -1), (1, -1)]
    assert load_rows(path, Peers(), columns=12).rows.shape == (4, 12)
    assert load_rows(path, Peers(), columns=2).rows.shape == (4, 9)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("one 1:2", "the label 'one' is no number"),
        ("1:2 2:3", "the label '1:2' is no number"),
        ("nan 1:2", "the label 'nan' is not finite"),
        ("1e999 1:2", "the label '1e999' is not finite"),
        (": 1:2", "the label ':' is no number"),
        ("1 2", "'2' is not index:value"),
        ("1 a:2", "'a:2' is not index:value"),
        ("1 qid:3 1:2", "'qid:3' is not index:value"),
        ("1 1.5:2", "'1.5:2' is not index:value"),
        ("1 0:2", "'0:2': indices begin at 1"),
        ("1 -3:2", "'-3:2': indices begin at 1"),
        ("1 2147483648:2", "'2147483648:2': indices end at 2147483647"),
        ("1 99999999999999999999:2", "'99999999999999999999:2': indices end at 2147483647"),
        ("1 1:2 1:3", "'1:3': indices must increase along a line"),
        ("1 3:2 2:3", "'2:3': indices must increase along a line"),
        ("1 1:nan", "'1:nan': the value is not finite"),
        ("1 1:-Inf", "'1:-Inf': the value is not finite"),
        ("1 1:4 2:1e400 3:1", "'2:1e400': the value is not finite"),
        ("1 1:", "'1:': the value is no number"),
        ("1 1:2:3", "'1:2:3': the value is no number"),
        ("1 1:0x10", "'1:0x10': the value is no number"),
        ("1 1:1_0", "'1:1_0': the value is no number"),
        ("1 1:1e", "'1:1e': the value is no number"),
        ("1 1:é", "'1:é': the value is no number"),
        ("1 1:-", "'1:-': the value is no number"),
    ],
)
def test_a_broken_line_is_named(line, said, tmp_path):
    assert problems(tmp_path / "n", f"1 1:1\n\n{line}\n-1 1:2\n") == (f"line 3: {said}",)
    assert problems(tmp_path / "n", f"1 1:1\n{line}") == (f"line 2: {said}",)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_of_all_ranks_are_numbered_as_in_the_file(ending, tmp_path):
    lines = [f"{number % 2} 1:{number}" for number in range(200)]
    bad = [2, 3, 71, 120, 199]
    for number in bad:
        lines[number - 1] = "1 0:1"
    path = tmp_path / f"n{ending}"
    with libsvm_data._open(path, "wb") as file:
        file.write("\n".join(lines).encode())
    for count in (1, 3, 4):
        errors = on_ranks(path, count)
        assert all(isinstance(error, DocumentError) for error in errors)
        assert len({str(error) for error in errors}) == 1
        assert errors[0].problems == tuple(
            f"line {number}: '0:1': indices begin at 1" for number in bad
        )


def test_the_first_ten_are_shown_and_the_others_counted(tmp_path):
    told = problems(tmp_path / "n", "1 1:1\n" + "x\n" * 25)
    assert [int(number) for number in re.findall(r"line (\d+)", "\n".join(told))] == [*range(2, 12)]
    assert told[-1] == "... and 15 more lines"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read\n  No such file"):
        data_sizes(tmp_path / "none", 2)
    whole = tmp_path / "n.gz"
    dump(whole, np.random.default_rng(0).random((200, 3)), np.ones(200))
    for name, content in (("cut.gz", whole.read_bytes()[:300]), ("text.gz", b"1 1:2\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DocumentError, match="cannot be read"):
            load_rows(tmp_path / name, Peers())


def test_an_empty_file_has_no_samples(tmp_path):
    found = load_rows(written(tmp_path / "n", ""), Peers())
    assert found.rows.shape == (0, 0)
    assert found.total == 0


def test_files_of_scikit_learn_are_read_and_read_ours(tmp_path):
    rng = np.random.default_rng(11)
    rows = sparse.random(40, 17, 0.4, format="csr", random_state=2)
    labels = rng.integers(0, 3, 40).astype(float)
    dump_svmlight_file(rows, labels, str(tmp_path / "theirs"), zero_based=False)
    found = load_rows(tmp_path / "theirs", Peers(), columns=17)
    theirs, _ = load_svmlight_file(str(tmp_path / "theirs"), n_features=17)
    assert np.array_equal(dense(found.rows), theirs.toarray())
    dump(tmp_path / "ours", rows, labels)
    back, said = load_svmlight_file(str(tmp_path / "ours"), n_features=17)
    assert np.array_equal(back.toarray(), rows.toarray())
    assert np.array_equal(said, labels)
