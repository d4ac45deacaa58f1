"""ranks: the bundled workloads train, and split as plans say they are the serial run."""

import pytest

from headway.workloads.cosmoflow import Universes
from support.commands import events, headway_here
from support.sampling import sampled
from support.workload_files import write_universes

COSMOFLOW = ("arguments.width=16", "arguments.samples=9", "batch=4")
UNET = ("arguments.width=16", "arguments.samples=5", "batch=2")
RESNET = ("arguments.width=8", "arguments.samples=20", "batch=8")


def sets(*changes):
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.parametrize(
    ("workload", "ranks", "changes"),
    sampled(
        [
            pytest.param(
                "cosmoflow",
                4,
                (
                    *COSMOFLOW,
                    "arguments.dropout=0.5",
                    "arguments.directory='files'",
                    "split.spatial=[2, 1, 1]",
                ),
                id="cosmoflow in slabs of files, twice",
            ),
            pytest.param("unet3d", 2, (*UNET, "split.spatial=[2, 1, 1]"), id="unet3d in slabs"),
            pytest.param("resnet", 2, RESNET, id="resnet"),
        ],
        1,
    ),
)
def test_workloads_are_the_serial_run(tmp_path, workload, ranks, changes):
    if workload == "cosmoflow":
        pytest.importorskip("h5py")
        write_universes(tmp_path / "files" / "train", Universes(9, 16))
    done = headway_here("verify", workload, "-n", str(ranks), *sets(*changes), cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "equal" in done.out


def test_a_workload_trains_by_its_short_name(tmp_path):
    done = headway_here(
        "train", "unet3d", "-n", "2", "--directory", "run",
        *sets(*UNET, "stop=4", "arguments.validation_samples=2"), cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert "Dice on validation samples" in done.err
    assert len(events(tmp_path / "run", "step")) == 4
