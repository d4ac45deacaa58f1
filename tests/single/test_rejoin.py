"""single: notes by which a worker that comes back and the others find each other are whole."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.run.distributed.launch_env import RunEnding
from headway.run.synchrony.rejoin import call, calls_for, is_there, note_presence
from support.patience import patient


@pytest.fixture(autouse=True)
def _slow_writes(monkeypatch):
    """A file is there for a while before it has its content."""

    def write(path: Path, content: str | bytes) -> None:
        with path.open("wb") as file:
            time.sleep(0.3)
            file.write(content.encode() if isinstance(content, str) else content)

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(Path, "write_text", write)


def answered(folder: Path, accepts: bool) -> object:
    """What comes of a call of worker 2 for worker 1."""

    def answer() -> None:
        deadline = time.monotonic() + patient(10)
        while not (found := calls_for(folder, 1)) and time.monotonic() < deadline:
            time.sleep(0.001)
        (made,) = found
        assert (made.worker, made.life, made.step) == (2, 1, 9)
        made.accept(accepts)

    with ThreadPoolExecutor(1) as pool:
        note_presence(folder, 1)
        said = pool.submit(answer)
        try:
            return call(folder, 2, 1, 9, 1, patient(10))
        finally:
            said.result()


def test_an_answer_is_read_when_it_is_whole(tmp_path):
    assert answered(tmp_path, accepts=True) is not None
    assert calls_for(tmp_path, 1) == []


def test_a_refusal(tmp_path):
    with pytest.raises(RunEnding):
        answered(tmp_path, accepts=False)


def test_presence_is_noted_whole(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        note_presence(tmp_path, 1)
        again = pool.submit(note_presence, tmp_path, 1)
        while not again.done():
            assert is_there(tmp_path, 1)
            time.sleep(0.001)
