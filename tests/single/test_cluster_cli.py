"""single: `headway cluster presets` and `show`: what people read, and what programs read."""

from __future__ import annotations

import pytest

from headway.cli.main import main
from headway.cluster import of_preset, to_toml
from headway.cluster.datasheets import DATASHEETS
from headway.cluster.presets import PRESETS
from support.golden import check_golden

RACKS = """
nodes = 6
processes = 4
levels = [
  { name = "node", nodes = 1, rate = "20 GB/s", latency = "2 us" },
  { name = "rack", nodes = 2, rate = "10 GB/s", latency = "5 us" },
  { name = "cluster", rate = "8 GB/s", latency = "9 us", oversubscription = 4 },
]

[devices.card]
preset = "t4"
price = "0.35 USD/h"
"""


@pytest.fixture
def run(capsys):
    """Runs a command; returns exit code, standard output, standard error."""

    def call(*words):
        code = main(["cluster", *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_presets_lists_every_machine_and_device_with_its_source(run):
    code, out, _ = run("presets")
    assert code == 0
    assert all(f"  {name} " in out for name in (*PRESETS, *DATASHEETS))
    assert all(sheet.source in out for sheet in DATASHEETS.values())
    check_golden("cli/cluster_presets.txt", out)


def test_show_says_devices_levels_ranks_and_sources(run, tmp_path):
    path = tmp_path / "racks.toml"
    path.write_text(RACKS)
    code, out, _ = run("show", str(path))
    assert code == 0
    check_golden("cli/cluster_show.txt", out)
    check_golden("cli/cluster_show_preset.txt", run("show", "dgx-a100", "--nodes", "8")[1])
    check_golden("cli/cluster_show_tiers.txt", run("show", "zion")[1])
    example = run("show", "examples/zion.toml")[1]
    assert "zion    DRAM              256 GiB  128 GB/s  12 GB/s" in example


def test_show_of_a_plain_file_and_as_toml(run, tmp_path):
    path = tmp_path / "plain.toml"
    path.write_text("nodes = 2\n")
    code, out, _ = run("show", str(path))
    assert code == 0
    assert "2 nodes, 2 ranks; no devices described" in out
    assert "no limit" in out
    assert run("show", "g4dn.metal", "--toml")[1] == to_toml(of_preset("g4dn.metal"))


def test_errors_name_the_nearest_preset(run):
    code, _, err = run("show", "dgx-a10")
    assert code == 1
    assert "no preset 'dgx-a10'; did you mean dgx-a100" in err
    assert run("show", "dgx-a100", "--nodes", "0")[0] == 1
