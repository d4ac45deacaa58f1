"""ranks: data that change with the network's outputs: the serial run, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch

from headway.errors import CheckpointMismatch, DataError, RecipeError
from headway.plans import data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support import walkers
from support.commands import Done, headway_here, newest_tensors
from support.ranks import run_ranks
from support.walkers import Walkers

SLOTS, STEPS = 6, 12


def serially(slots=SLOTS, steps=STEPS):
    """A loop without anything of headway's."""
    torch.manual_seed(0)
    model = walkers.model().double()
    optimizer, source = walkers.optimizer(model), Walkers(slots)
    for slot in range(slots):
        source.restore(slot, {})
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count, moves = walkers.loss(model, source.read(range(slots)))
        (total / count).backward()
        optimizer.step()
        source.absorb(range(slots), moves.detach())
        losses.append(float(total.detach() / count))
    return losses, [source.state(slot) for slot in range(slots)]


def executor(ranks, source, loss=walkers.loss, world=None, **options):
    torch.manual_seed(0)
    model = walkers.model().double()
    plan = data_parallel(source.slots, processes=ranks, precision="float64", **options)
    return Executor(model, walkers.optimizer(model), loss=loss, plan=plan, world=world)


def train(world, where=None, resumed=0, steps=STEPS, options=None):
    source = Walkers(SLOTS)
    run = executor(world.size, source, world=World.adopt(), **(options or {}))
    if resumed:
        assert run.resume(where) == resumed
    losses = []
    for _, batch in zip(range(steps), run.batches(source, epochs=None), strict=False):
        losses.append(run.step(batch))
    if where and not resumed:
        run.save(where)
    run.strategy.close()
    return losses, {int(name.split(".")[1]): t for name, t in run.slots.tensors().items()
                    if name.endswith(".at")}  # fmt: skip


def check(found, losses, states):
    together = {slot: at for _, own in found for slot, at in own.items()}
    assert sorted(together) == list(range(SLOTS))
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-12)
    for slot, state in enumerate(states):
        assert torch.allclose(together[slot], state["at"], rtol=1e-11, atol=1e-12), slot


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"microbatch": 2}),
        (3, {"zero": 2}),
        (4, {}),
        (2, {"shares": (4, 2)}),
    ],
    ids=str,
)
def test_ranks_with_slots_are_one_rank_with_all_slots(ranks, options):
    losses, states = serially()
    assert {int(state["walk"]) for state in states} != {0}, "no walk ends"
    check(run_ranks(ranks, train, options=options), losses, states)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_resumes_in_the_middle_of_walks_on_any_number_of_ranks(tmp_path, ranks):
    losses, states = serially()
    run_ranks(3, train, tmp_path, steps=7)
    found = run_ranks(ranks, train, tmp_path, resumed=7, steps=STEPS - 7)
    check(found, losses[7:], states)


def test_the_command_proves_it(tmp_path):
    done = headway_here("verify", "support.walkers:recipe", "-n", "2", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "EQUAL to the serial run" in done.out


def trained(tmp_path, run: str, *words: str) -> Done:
    return headway_here(
        "train", "support.walkers:recipe", "-n", "2", "-d", run, *words, cwd=tmp_path
    )


def test_a_killed_worker_changes_no_bit(tmp_path):
    for run, words in (("whole", ()), ("killed", ("--fault", "kill rank 1 at step 6"))):
        done = trained(tmp_path, run, *words)
        assert done.code == 0, done.err
    whole, killed = newest_tensors(tmp_path / "whole"), newest_tensors(tmp_path / "killed")
    assert {f"data.{slot}.at" for slot in range(SLOTS)} < set(whole)
    assert set(whole) == set(killed)
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_another_batch_than_that_of_the_checkpoint_is_refused(tmp_path):
    run_ranks(1, train, tmp_path, steps=2)
    run = executor(1, Walkers(4))
    with pytest.raises(CheckpointMismatch, match="6 slots, and the batch has 4 samples"):
        run.resume(tmp_path)


def test_what_cannot_be_read_so_is_refused():
    source = Walkers(4)
    run = executor(1, source)
    with pytest.raises(DataError, match="not by 2 workers"):
        run.loader(source, workers=2)
    with pytest.raises(DataError, match="has 6 slots, and the batch 4 samples"):
        run.loader(Walkers(6))
    silent = executor(1, source, walkers.silent_loss)
    with pytest.raises(RecipeError, match="without the outputs that the data need"):
        silent.step(next(iter(silent.batches(source))))
