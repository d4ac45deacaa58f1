"""ranks: an imported recipe trains as the one written by hand, the serial run, and DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headway.comparison.environments import find_environment
from headway.plans import Plan, data_parallel
from headway.run.distributed.launch_env import free_port
from support.commands import events, headway_here

PARTS = """
from torch import nn
from support.tiny_models import Mlp, Points

def model():
    return Mlp()

def data():
    return Points(64)
"""
BY_HAND = """
name = "by-hand"
batch = 8
microbatch = 2
stop = "6 steps"
clip = 0.5
zero = 1

[model]
call = "parts:model"

[data]
call = "parts:data"

[loss]
criterion = "torch.nn:CrossEntropyLoss"

[optimizer]
call = "torch.optim:AdamW"
lr = 0.02
betas = [0.9, 0.98]
weight_decay = 0.0

[scheduler]
call = "headway.optim:deepspeed_rates"
warmup = 3
shape = "linear"
start = 0.1
"""
DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.98]}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.002,
            "warmup_max_lr": 0.02,
            "warmup_num_steps": 3,
            "warmup_type": "linear",
        },
    },
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
    "fp16": {"enabled": "auto"},
}


@pytest.mark.timeout(170)
def test_an_imported_recipe_is_the_one_written_by_hand(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "by_hand.toml").write_text(BY_HAND)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    words = "--stop", "6 steps", "--model", "parts:model", "--data", "parts:data"
    words += "--criterion", "torch.nn:CrossEntropyLoss"
    done = headway_here(
        "import", "ds.json", "-n", "2", *words, "--out", "recipe.toml", "--plan", "plan.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert Plan.load(tmp_path / "plan.json") == data_parallel(8, processes=2, microbatch=2, zero=1)
    losses = {}
    for recipe, plan in (("by_hand.toml", ()), ("recipe.toml", ("--plan", "plan.json"))):
        done = headway_here(
            "train", recipe, "-n", "2", *plan, "--directory", f"run-{recipe}", cwd=tmp_path
        )
        assert done.code == 0, done.err
        losses[recipe] = [
            (step["loss"], step["lr"]) for step in events(tmp_path / f"run-{recipe}", "step")
        ]
    assert losses["recipe.toml"] == losses["by_hand.toml"]
    assert len(losses["recipe.toml"]) == 6
    done = headway_here("verify", "recipe.toml", "--processes", "2", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "EQUAL" in done.out


WHOLE_BATCH = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    draw = torch.Generator().manual_seed(7)
    made = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
    return made

def data():
    draw = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 3, (64,), generator=draw)
    return TensorDataset(torch.randn(64, 6, generator=draw), classes)
"""
WITH_DEEPSPEED = """
import json, sys
import deepspeed, torch
import torch.distributed as dist
import parts

made, (x, y) = parts.model(), parts.data().tensors
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(
    model=made, model_parameters=made.parameters(), config="ds.json"
)
losses = []
for _ in range(12):
    total = torch.zeros(1, dtype=torch.float64)
    for part in range(2):
        own = slice(start := (2 * dist.get_rank() + part) * 16, start + 16)
        loss = torch.nn.functional.cross_entropy(engine(x[own]), y[own])
        engine.backward(loss)
        engine.step()
        total += loss.item() / 4
    dist.all_reduce(total)
    losses.append(total.item())
if dist.get_rank() == 0:
    json.dump(losses, open("losses.json", "w"))
"""
ACCUMULATED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0.001,
            "warmup_max_lr": 0.05,
            "warmup_num_steps": 4,
            "total_num_steps": 20,
        },
    },
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 2},
}


@pytest.mark.timeout(170)
def test_an_imported_recipe_trains_as_deepspeed_does(tmp_path):
    folder = os.environ.get("HEADWAY_ENVIRONMENTS")
    environment = find_environment("deepspeed", None if folder is None else Path(folder))
    if isinstance(environment, str):
        pytest.skip(environment)
    (tmp_path / "parts.py").write_text(WHOLE_BATCH)
    (tmp_path / "ds.json").write_text(json.dumps(ACCUMULATED))
    (tmp_path / "with_deepspeed.py").write_text(WITH_DEEPSPEED)
    port = f"--master-port={free_port()}"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", port)
    subprocess.run(
        [environment.python, *launcher, "with_deepspeed.py"],
        cwd=tmp_path,
        env={**os.environ, **environment.variables, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    words = "--model parts:model --data parts:data --criterion torch.nn:CrossEntropyLoss"
    options = ("-n", "2", "--stop", "12 steps", *words.split(), "--out", "recipe.toml")
    assert headway_here("import", "ds.json", *options, cwd=tmp_path).code == 0
    done = headway_here("train", "recipe.toml", "-n", "2", "--directory", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    # Every batch is the whole data, so that the order of the samples does not matter.
    losses = [step["loss"] for step in events(tmp_path / "run", "step")]
    assert losses == pytest.approx(json.loads((tmp_path / "losses.json").read_text()), rel=1e-6)
