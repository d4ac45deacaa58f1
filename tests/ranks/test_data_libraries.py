"""ranks: data of Hugging Face `datasets` and of WebDataset as they are, equal on two processes."""

from __future__ import annotations

import pytest

import headway
from support import library_recipes

NAMES = {
    "mapped": "datasets",
    "mapped_torch": "datasets",
    "generated": "datasets",
    "in_shards": "datasets",
    "buffered": "datasets",
    "web": "webdataset",
}

RESUMED = ("in_shards", "buffered", "web")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_data_of_a_library_are_equal_on_two_processes_and_resume(name, tmp_path, monkeypatch):
    pytest.importorskip(NAMES[name], reason=f"{NAMES[name]} is not installed: pip install it")
    monkeypatch.setenv("LIBRARY_DATA", str(tmp_path))
    if name == "web":
        library_recipes.archives()  # by one process, before the ranks read them
    result = headway.verify(
        f"support.library_recipes:{name}", processes=2, steps=2, whole=name in RESUMED
    )
    result.check()
    (run,) = result.runs
    assert len(run.whole) == 3 * (name in RESUMED)
