"""ranks: `headway verify` of inexact exchanges checks their own law; planted bugs break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.comm.algorithms.adasum import Adasum
from headway.comm.algorithms.method import AllReduce
from headway.comm.compress.compressor import Compressor
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.world import World
from headway.verification.distributed_run import laws_file, record_in_world
from headway.verification.exchange_law import load_laws
from headway.verification.recording import VerifyJob
from support.commands import headway_here
from support.ranks import run_ranks

CHOICES = {
    **{
        text: ExchangePlan(compress=text, bucket="1 KiB")
        for text in (
            "fp16", "bf16", "int8", "sign", "topk:0.1", "mstopk:0.1", "adaptive:0.1",
            "randomk:0.2", "powersgd:1",
        )
    },
    "fp16, priority": ExchangePlan(compress="fp16", priority=True, chunk="100"),
    "topk, priority": ExchangePlan(compress="topk:0.1", priority=True),
    "adasum": ExchangePlan(reduce="adasum"),
    "sum": ExchangePlan(reduce="sum"),
}  # fmt: skip


def laws_of(world, exchange, target, plant=None):
    if plant is not None:
        plant()
    plan = world.directory / f"plan-{world.rank}.json"
    data_parallel(12, processes=world.size, microbatch=4, exchange=exchange).save(plan)
    job = VerifyJob(recipe="support.recipes:wide", steps=4, plan=plan)
    record_in_world(World.adopt(), job, target)


def judged(tmp_path, exchange, plant=None):
    target = tmp_path / "split"
    run_ranks(2, laws_of, exchange, target, plant)
    return load_laws(laws_file(target))


@pytest.mark.parametrize("choice", CHOICES)
def test_every_law_holds(tmp_path, choice):
    laws = judged(tmp_path, CHOICES[choice])
    assert {law.step for law in laws} == {1, 2, 3, 4}
    assert all(law.holds for law in laws), "\n".join(map(str, laws))


def forgets():
    """What was not sent is not kept."""
    original = Compressor.rounds

    def rounds(self, fused, route):
        yield from original(self, fused, route)
        if self.compression.feedback:
            self._residual.zero_()

    Compressor.rounds = rounds


def sends_twice():
    original = Compressor.rounds

    def rounds(self, fused, route):
        yield from original(self, fused, route)
        fused.gradients.mul_(2)

    Compressor.rounds = rounds


def averages():
    """A plain mean in place of Adasum."""

    def rounds(self, fused, route):
        yield from AllReduce().rounds(fused, route)
        fused.gradients.div_(route.size)

    Adasum.rounds = rounds


@pytest.mark.parametrize(
    ("choice", "plant"),
    [("topk:0.1", forgets), ("powersgd:1", forgets), ("int8", sends_twice), ("adasum", averages)],
)
def test_a_planted_bug_breaks_the_law(tmp_path, choice, plant):
    laws = judged(tmp_path, CHOICES[choice], plant)
    assert any(not law.holds for law in laws)


@pytest.mark.slow
def test_the_command_says_inexact_and_that_the_law_holds(tmp_path: Path):
    done = headway_here(
        "verify", "support.recipes:wide", "-n", "2", "--set", 'exchange.compress="topk:0.05"',
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "inexact; worst case" in done.out
    assert "INEXACT by its plan, and its law holds" in done.out
    assert "EQUAL" not in done.out
