"""single: the text of the transformer workload: the split, the flat files, the samples."""

import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.data.source import Source
from headway.errors import DataError
from headway.workloads import transformer

SPLITS = ("train", "validation")
GOLDEN_SPLIT = {
    "train": ["abc.py", "ast.py", "json/decoder.py"],
    "validation": ["ftplib.py", "stat.py", "statistics.py"],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder with both flat files of this interpreter's standard library."""
    folder = tmp_path_factory.mktemp("texts")
    for split in SPLITS:
        transformer.text_file(split, directory=folder)
    return folder


@pytest.fixture
def library(tmp_path):
    """A little standard library: 200 files, installed packages, one file of another kind."""
    root = tmp_path / "lib"
    for number in range(200):
        path = root / f"part{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {number}\n" * (number + 1))
    for folder in transformer.INSTALLED:
        (root / folder).mkdir()
        (root / folder / "installed.py").write_text("no = 'part of it'\n")
    (root / "part0" / "notes.txt").write_text("not Python\n")
    return root


def test_the_split_of_a_name_never_changes():
    names = [name for names in GOLDEN_SPLIT.values() for name in names]
    found = {split: [n for n in names if transformer.split_of(n) == split] for split in SPLITS}
    assert found == GOLDEN_SPLIT


def test_splits_are_disjoint_cover_everything_and_one_in_twenty_validates(texts):
    files = transformer.source_files(transformer.standard_library())
    counts = Counter(transformer.split_of(file.name) for file in files)
    assert set(counts) == set(SPLITS)
    assert 0.03 < counts["validation"] / len(files) < 0.07
    sizes = {
        split: transformer.text_file(split, directory=texts).stat().st_size for split in SPLITS
    }
    assert sum(sizes.values()) == sum(file.size + 1 for file in files)
    assert 0.02 < sizes["validation"] / sum(sizes.values()) < 0.10


def test_the_standard_library_is_real_text_of_ten_megabytes(texts):
    train = transformer.text_file("train", directory=texts).read_bytes()
    validation = transformer.text_file("validation", directory=texts).read_bytes()
    assert len(train) + len(validation) >= 10_000_000
    assert train.count(b"\n    def ") > 5000
    assert validation.count(b"\n    def ") > 200


def test_names_and_text_of_a_split(library, tmp_path):
    names = sorted(f"part{n % 7}/module{n}.py" for n in range(200))
    assert {"site-packages", "dist-packages"} <= transformer.INSTALLED
    assert [file.name for file in transformer.source_files(library)] == names
    for split in SPLITS:
        path = transformer.text_file(split, library=library, directory=tmp_path / "cache")
        members = [name for name in names if transformer.split_of(name) == split]
        assert members
        assert path.read_bytes() == b"".join((library / n).read_bytes() + b"\n" for n in members)


def test_the_flat_file_is_built_once_and_again_only_when_it_must_be(library, tmp_path):
    cache = tmp_path / "cache"
    first = transformer.text_file("train", library=library, directory=cache)
    content, built = first.read_bytes(), first.stat().st_ino
    assert transformer.text_file("train", library=library, directory=cache) == first
    assert first.stat().st_ino == built
    first.write_bytes(content[:100])  # damaged by somebody else
    assert transformer.text_file("train", library=library, directory=cache).read_bytes() == content
    (library / "part0" / "module0.py").write_text("patched = True\n")
    assert transformer.text_file("train", library=library, directory=cache) != first


def test_many_ranks_may_build_at_once_and_nobody_sees_half_a_file(library, tmp_path):
    """Three builders start together; a watcher reads whatever is there under the final name."""
    cache = tmp_path / "cache"
    whole = transformer.text_file(
        "train", library=library, directory=tmp_path / "alone"
    ).read_bytes()
    barrier, done, sizes = threading.Barrier(4), threading.Event(), set()

    def build(_):
        barrier.wait(10)
        return transformer.text_file("train", library=library, directory=cache)

    def watch():
        barrier.wait(10)
        while not done.is_set():
            sizes.update(path.stat().st_size for path in cache.glob("stdlib-*.bin"))

    with ThreadPoolExecutor(4) as pool:
        watcher = pool.submit(watch)
        try:
            paths = set(pool.map(build, range(3)))
        finally:
            done.set()
        watcher.result(10)
    assert sizes <= {len(whole)}
    assert len(paths) == 1
    assert [path.read_bytes() for path in cache.iterdir()] == [whole]  # nothing else is left


def test_a_failed_build_leaves_nothing_behind(library, tmp_path, monkeypatch):
    files = transformer.source_files(library)
    stale = [transformer.SourceFile(file.name, file.size + 1) for file in files]
    monkeypatch.setattr(transformer, "source_files", lambda _: stale)
    with pytest.raises(DataError, match="changed while it was read"):
        transformer.text_file("train", library=library, directory=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_home_that_cannot_be_written_is_replaced_by_the_temporary_folder(
    library, tmp_path, monkeypatch
):
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(transformer.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    path = transformer.text_file("train", library=library)
    assert path.is_relative_to(tmp_path / "temporary")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert transformer.text_file("train", library=library) == path


def test_no_folder_that_can_be_written(library, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="pass the recipe a `directory`"):
        transformer.text_file("train", library=library, directory=tmp_path / "file")


def test_a_library_without_sources(tmp_path):
    with pytest.raises(DataError, match=r"no \.py files"):
        transformer.source_files(tmp_path)


def test_a_source_file_that_vanishes_is_named(library, tmp_path, monkeypatch):
    gone = [*transformer.source_files(library), transformer.SourceFile("part0/gone.py", 10)]
    monkeypatch.setattr(transformer, "source_files", lambda _: gone)
    split = transformer.split_of("part0/gone.py")
    with pytest.raises(DataError, match=r"gone\.py"):
        transformer.text_file(split, library=library, directory=tmp_path / "cache")


def test_samples_are_windows_of_the_text(texts):
    text = np.fromfile(transformer.text_file("train", directory=texts), dtype=np.uint8)
    source = transformer.text_source("train", 32, directory=texts)
    assert isinstance(source, Source)
    assert len(source) == (len(text) - 1) // 32
    inputs, targets = source.read([5, 0])
    assert inputs.shape == targets.shape == (2, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0].tolist() == text[160:192].tolist()
    assert targets[0].tolist() == text[161:193].tolist()


class Numbers:
    """A source of the numbers 0 to 99."""

    def __len__(self):
        return 100

    def read(self, indices):
        return torch.tensor(list(indices))


def test_evenly_spaced_samples_reach_over_the_whole_source():
    few = transformer.EvenlySpaced(Numbers(), 4)
    assert len(few) == 4
    assert few.read(range(4)).tolist() == [0, 25, 50, 75]
    everything = transformer.EvenlySpaced(Numbers(), 1000)
    assert everything.read(range(len(everything))).tolist() == list(range(100))


@pytest.mark.parametrize("how", ["link", "writable"])
def test_a_text_that_others_could_have_put_there_is_not_read(tmp_path, monkeypatch, library, how):
    """In the folder for temporary files, where the name of ours is known."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = transformer.text_file("train", library=library, directory=tmp_path / "own")
    monkeypatch.setattr(transformer, "cache_folders", lambda: (tmp_path / "headway-0",))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    folder = tmp_path / "headway-0"
    if how == "link":
        folder.symlink_to(theirs)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    (folder / own.name).write_bytes(b"x" * own.stat().st_size)
    with pytest.raises(DataError, match="others can write there"):
        transformer.text_file("train", library=library)
