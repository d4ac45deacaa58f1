"""ranks: ranks that take unequal shares of a batch compute what one process computes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from headway.launch.cpu_throttle import ProcessThrottle
from headway.plans import data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.commands import headway_here
from support.ranks import run_ranks
from support.serial import largest_error, numbers, train_serially
from support.tiny_models import Mlp, Points, Sentences, Tied, cross_entropy, ignoring_a_word

SEED, STEPS = 3, 5
CASES: dict[str, tuple[Any, Any, Any]] = {
    "mean": (Mlp, Points, cross_entropy),
    "sum and count": (Tied, Sentences, ignoring_a_word),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def split(world, case, batch, shares, microbatch, length):
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(
        batch, processes=world.size, microbatch=microbatch, precision="float64", shares=shares
    )
    run = Executor(model, made, loss=loss, plan=plan, seed=SEED, world=World.adopt())
    history = []
    for _, part in zip(range(STEPS), run.batches(data(length), epochs=None), strict=False):
        share = sum(len(micro.positions) for micro in part.micros)
        history.append((share, numbers(model, made, run.step(part))))
    return history


def check(case, batch, shares, microbatch, length):
    build, data, loss = CASES[case]
    found = run_ranks(len(shares), split, case, batch, shares, microbatch, length)
    expected = train_serially(build, data(length), loss, adamw, batch=batch, steps=STEPS, seed=SEED)
    for rank, history in enumerate(found):
        for step, (a, (_, b)) in enumerate(zip(expected, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-12, f"rank {rank}, step {step}: {name} differs by {error:.1e}"
    return [[share for share, _ in history] for history in found]


def test_60_and_32_samples_are_a_batch_of_92():
    """W3. 300 samples: the fourth batch has 24, of which the ranks take 15 and 9."""
    assert check("mean", 92, (60, 32), None, 300) == [[60, 60, 60, 15, 60], [32, 32, 32, 9, 32]]


@pytest.mark.parametrize("microbatch", [None, 2])
def test_counts_other_than_samples_and_micro_batches(microbatch):
    check("sum and count", 12, (8, 3, 1), microbatch, 40)


@pytest.mark.slow
def test_the_command_proves_uneven_shares(tmp_path):
    for extra in (("-n", "2"), ("-n", "4", "--set", "stages=2")):
        done = headway_here(
            "verify", "support.recipes:mlp", *extra, "--set", "shares=[3, 1]", cwd=tmp_path
        )
        assert done.code == 0, done.err
        assert "EQUAL to the serial run" in done.out


def test_a_recipe_with_wrong_shares_is_refused_at_once(tmp_path):
    wrong = headway_here(
        "train", "support.recipes:mlp", "-n", "2", "--set", "shares=[1, -2]", cwd=tmp_path
    )
    assert wrong.code != 0
    assert "shares.1  -2 is not a number greater than 0" in wrong.err.replace(": ", "  ")


def test_a_slow_rank_is_slow_and_the_run_is_the_same(tmp_path):
    """The fault is noted once, and its helper ends with the rank (else the harness says so)."""
    done = headway_here(
        "train", "support.recipes:mlp", "-n", "2", "-d", "run", "--json",
        "--fault", "rank 1 2x slower from step 2 to step 5", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    faults = [(line["step"], line["text"]) for line in lines if line["event"] == "fault"]
    assert faults == [
        (2, "rank 1 2x slower from step 2 to step 5"),
        (5, "rank 1 at its own rate again at step 5"),
    ]


def test_a_throttled_process_gets_its_share_of_the_processor():
    """At most: a stopped process computes nothing, however fast the machine is."""
    throttle = ProcessThrottle(4)
    try:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 1.0:
            pass  # until the helper has started
        start, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < 0.5:
            pass
        share = (time.process_time() - used) / (time.perf_counter() - start)
    finally:
        throttle.end()
    assert share < 0.6


MIXED = """
processes = 1
nodes = [{ name = "new", device = "v100" }, { name = "old", device = "p100", processes = 2 }]
between = { rate = "10 Gbit/s", latency = "30 us" }
inside = { rate = "100 GB/s", latency = "20 us" }

[devices.v100]
preset = "v100-32gb"

[devices.p100]
preset = "p100"
"""


@pytest.mark.slow
def test_the_command_plans_mixed_devices_and_its_plan_is_the_serial_run(tmp_path):
    (tmp_path / "mixed.toml").write_text(MIXED)
    words = ("--cluster", "mixed.toml", "--runnable", "--objective", "fastest", "--devices", "3")
    done = headway_here(
        "plan", "support.recipes:mlp", *words, "--json", "--out", "plan.json", cwd=tmp_path
    )
    assert done.code == 0, done.err
    point = json.loads(done.out)["points"][0]
    assert point["types"] == {"v100": 1, "p100": 2}
    assert sum(point["shares"]) == 12
    assert "ranks stand on 1 v100, 2 p100" in done.err
    proved = headway_here("verify", "support.recipes:mlp", "--plan", "plan.json", cwd=tmp_path)
    assert proved.code == 0, proved.err
    assert "EQUAL to the serial run" in proved.out
