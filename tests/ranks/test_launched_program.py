"""ranks: headway launch -np N python SCRIPT.py: programs of Horovod and of torch.distributed."""

from __future__ import annotations

import pytest

from support.commands import headway_here

HOROVOD = """
import os, sys
import torch
import headway.horovod as hvd
hvd.init()
total = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum, name="x")
print(hvd.rank(), hvd.size(), total.tolist(), os.environ["HOROVOD_CYCLE_TIME"], sys.argv[1:])
hvd.shutdown()
"""
TORCH = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(dist.get_rank(), total.item())
dist.destroy_process_group()
"""


def outputs(folder, processes):
    return [(folder / f"rank.{rank}" / "stdout").read_text() for rank in range(processes)]


@pytest.mark.timeout(120)
def test_a_program_of_horovod_meets_and_gets_its_settings(tmp_path):
    (tmp_path / "train.py").write_text(HOROVOD)
    words = "-np 2 --cycle-time-ms 2 --start-timeout 60 --output-filename out --timeline-filename t"
    done = headway_here("launch", *words.split(), "python", "train.py", "--lr", "1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert outputs(tmp_path / "out", 2) == [
        f"{rank} 2 [3.0, 3.0] 2 ['--lr', '1']\n" for rank in range(2)
    ]
    assert "HOROVOD_TIMELINE" in (tmp_path / "t").read_text()


@pytest.mark.timeout(120)
def test_a_module_of_torch_meets_and_a_failure_names_the_rank(tmp_path):
    (tmp_path / "plain.py").write_text(TORCH)
    words = ("launch", "-np", "2", "--output-filename", "out", "python")
    done = headway_here(*words, "-m", "plain", cwd=tmp_path)
    assert done.code == 0, done.err
    assert outputs(tmp_path / "out", 2) == ["0 2.0\n", "1 2.0\n"]
    (tmp_path / "wrong.py").write_text("import sys\nsys.exit(3)\n")
    done = headway_here(*words, "wrong.py", cwd=tmp_path)
    assert done.code == 3
    assert "the program called sys.exit(3)" in done.err
