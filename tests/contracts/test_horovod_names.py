"""single: every public name of Horovod's interface is used in the tests of its results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headway.horovod as hvd

TESTS = Path(__file__).parent.parent / "ranks"
TEXT = "".join(path.read_text() for path in sorted(TESTS.glob("test_horovod_*.py")))


@pytest.mark.parametrize("prefix", ["hvd", "hvd.elastic"])
def test_every_name_is_tested(prefix):
    names = {"hvd": hvd, "hvd.elastic": hvd.elastic}[prefix].__all__
    assert not [name for name in names if not re.search(rf"\b{prefix}\.{name}\b", TEXT)]
