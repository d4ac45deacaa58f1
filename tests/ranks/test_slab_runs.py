"""ranks: runs whose samples are files, of which each process reads and holds its own part only."""

from __future__ import annotations

import json
import resource
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headway.data import Loader, NpySlabs, SlabCut, SlabSource, SlabStore
from headway.errors import PlanError
from headway.plans import LayerSplit, PipelinePlan, data_parallel, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.step.batch import NO_SHOWCASE
from support.commands import events, headway_here, resumed
from support.ranks import run_ranks
from support.sampling import sampled
from support.slab_recipes import SHAPE, write

RECIPE = "support.slab_recipes:labelling"
SIZES = ((1, 1, 1), (2, 1, 1), (2, 2, 1))
HALVES, QUARTERS = "split.spatial=[2, 1, 1]", "split.spatial=[2, 2, 1]"
STAGES = ("stages=2", "pipeline.microbatches=2")


def reads(folder):
    """(process, sample, box) of each time that one was read."""
    return [json.loads(line) for line in (folder / "reads").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    sampled(
        [
            pytest.param("hdf5", 4, (HALVES, "microbatch=1", "clip=0.5"), id="HDF5"),
            pytest.param(
                "npy", 4, (HALVES, "zero=1", "workers=1"), id="npy, read ahead, sharded state"
            ),
            pytest.param(
                "npy",
                4,
                (HALVES, *STAGES, "pipeline.schedule='chimera'", "zero=3"),
                id="npy, stages",
            ),
        ],
        1,
    ),
)
def test_files_read_in_parts_are_the_serial_run(tmp_path, kind, ranks, changes):
    write(tmp_path / "slabs", kind)
    sets = [word for change in (*changes, "drop_last=true") for word in ("--set", change)]
    done = headway_here("verify", RECIPE, "-n", str(ranks), *sets, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "equal" in done.out


@pytest.mark.slow
def test_a_run_resumes_with_any_other_split(tmp_path):
    """In the middle of the second epoch; a whole sample is read by a rank that is alone only.

    Of stages, which are cut by parts as well, each reads its own.
    """
    write(tmp_path / "slabs", "hdf5")
    found, whole = resumed(tmp_path, RECIPE, ((3, 4, (QUARTERS,)), (6, 4, (HALVES, *STAGES))))
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)
    boxes: dict[int, set[object]] = {}
    for pid, _, box in reads(tmp_path):
        boxes.setdefault(pid, set()).add(tuple(map(tuple, box)))
    assert all(len(each) == 1 for each in boxes.values())
    cut = [SlabCut(sizes, n).ranges(SHAPE) for sizes in SIZES for n in range(prod(sizes))]
    halves = cut[1:3]
    assert Counter(box for each in boxes.values() for box in each) == Counter(cut + halves)
    in_parts, by_one = (events(tmp_path / run, "validation") for run in ("parts", "whole"))
    assert [e["loss"] for e in in_parts] == pytest.approx([e["loss"] for e in by_one], rel=1e-9)
    shown = [event["text"] for event in events(tmp_path / "parts", "showcase")]
    assert set(shown) == {NO_SHOWCASE}


SIDE, LIMIT = 160, 12 * 2**20
"""A sample is 4 MiB in its file, 16 MiB as numbers of the model; a quarter of it 1 and 4 MiB."""


class Pools(nn.Module):
    """Pools before it convolves: oneDNN pads one channel of a whole part to 8 or 16, by CPU."""

    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool3d(4)
        self.layer = nn.Conv3d(1, 2, 1)

    def forward(self, x):
        return self.layer(self.pool(x))


def within_a_limit(world, folder, memory):
    """Train two epochs with little memory more than before; what was read, what a whole takes."""
    source = SlabSource(
        NpySlabs(folder / "x.npy"), finish=lambda parts: parts[0].float(), memory=memory
    )
    torch.manual_seed(0)
    model = Pools()
    run = Executor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1, world=World.adopt(),
        loss=lambda model, x: model(x).square().mean(),
        plan=data_parallel(1, processes=world.size, split=LayerSplit(spatial=(4, 1, 1))),
    )  # fmt: skip
    loader = run.loader(source, epochs=2)
    batches = iter(loader)
    run.step(next(batches))
    data = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, resource.RLIM_INFINITY))
    losses = [run.step(batch) for batch in batches]
    assert isinstance(loader, SlabStore)
    read = loader._source.bytes_read
    fails = False
    try:
        source.read([0])
    except (MemoryError, RuntimeError):
        fails = True
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return len(losses), read, fails


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: not Linux")
def test_samples_that_do_not_fit_a_process(tmp_path):
    draw = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", draw.integers(0, 9, (3, 1, SIDE, SIDE, SIDE)).astype(np.uint8))
    for steps, read, fails in run_ranks(4, within_a_limit, tmp_path, None):
        assert (steps, read) == (5, 3 * SIDE**3 // 4)
        assert fails, "the limit is no limit: a whole sample fits"


def refused(world, folder):
    """What is not this rank's part, or cannot be cut, is an error."""
    plan = data_parallel(2, processes=2, split=LayerSplit(spatial=(2, 1, 1)))
    model = nn.Conv3d(2, 1, 1)
    run = Executor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, world=World.adopt(),
        loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip
    image = NpySlabs(folder / "slabs" / "image.npy")
    halved = SlabSource(image, finish=lambda parts: parts[0].float()[..., ::2, :, :])
    (batch, *_) = run.loader(halved, alone=True, epochs=1)
    assert isinstance(run.loader(halved, alone=True), Loader)
    with pytest.raises(PlanError, match="is not this rank's of"):
        run.step(batch)


def test_what_finish_makes_of_a_part_must_be_the_part(tmp_path):
    write(tmp_path / "slabs", "npy")
    assert SHAPE[1] % 2
    run_ranks(2, refused, tmp_path)


def by_time(world, folder):
    plan = pipelined(
        2, processes=4, stages=2, split=LayerSplit(spatial=(2, 1, 1)),
        pipeline=PipelinePlan(microbatches=2, balance="time"),
    )  # fmt: skip
    model = nn.Sequential(nn.Conv3d(2, 1, 1), nn.Conv3d(1, 1, 1))
    run = Executor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, world=World.adopt(),
        loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip
    image = NpySlabs(folder / "slabs" / "image.npy")
    batches = run.batches(SlabSource(image, finish=lambda parts: parts[0].float()))
    with pytest.raises(PlanError, match="no rank has a whole one to measure with"):
        run.step(next(batches))


def test_no_rank_measures_stages_by_a_part(tmp_path):
    write(tmp_path / "slabs", "npy")
    run_ranks(4, by_time, tmp_path)
