"""emulated: `headway cluster measure` finds the rate of the link between two nodes."""

from __future__ import annotations

import pytest

from headway.cluster import read_cluster
from support.commands import headway
from support.emulated import needs_root

pytestmark = needs_root
RATE = 25e6
"""Bytes/s of 200 Mbit/s."""


@pytest.mark.slow
def test_the_link_between_nodes_is_measured_apart(tmp_path):
    (tmp_path / "nodes.toml").write_text('nodes = 2\nbetween = { rate = "200 Mbit/s" }\n')
    words = ("cluster", "measure", "--emulate", "nodes.toml", "--seconds", "1")
    done = headway(*words, "--out", "measured.toml", cwd=tmp_path)
    assert done.code == 0, done.err
    cluster = read_cluster(tmp_path / "measured.toml")
    assert (len(cluster.nodes), cluster.ranks) == (2, 2)
    level = cluster.level_of([0, 1])
    assert level.name == "cluster"
    assert RATE / 4 < level.rate < RATE * 4  # a wrong unit is 8; bursts and slow machines are 2
