"""ranks: an imported recipe trains as the one written by hand, and as the serial run."""

from __future__ import annotations

import json

import pytest

from headway.plans import Plan, data_parallel
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
