"""single: model, optimiser and scheduler by logical name, and back."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, SequentialLR

from headway.checkpoint.format import Manifest
from headway.checkpoint.store import CheckpointStore
from headway.errors import CheckpointMismatch
from headway.run.strategy.training_state import TrainingState
from support.tiny_models import Mlp, Points, Tied, WithUnused, cross_entropy


def warm_up(optimizer):
    return SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 20)],
        milestones=[3],
    )


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
}
SCHEDULERS = {"none": None, "sequence": warm_up, "steps": lambda o: MultiStepLR(o, [2, 4])}


def make(optimizer, scheduler, seed):
    torch.manual_seed(seed)
    model = WithUnused()
    made = OPTIMIZERS[optimizer](model)
    schedule = SCHEDULERS[scheduler]
    return TrainingState(model, made, schedule(made) if schedule else None)


def advance(trained, steps):
    data = Points()
    for index in range(steps):
        trained.optimizer.zero_grad()
        batch = torch.utils.data.default_collate([data[i] for i in range(index, index + 8)])
        cross_entropy(trained.model, batch).backward()
        trained.optimizer.step()
        if trained.scheduler is not None:
            trained.scheduler.step()


def save_and_restore(directory, saved, target):
    with_store = CheckpointStore(directory, rank=0, ranks=1, group=None)
    with_store.save(1, saved.tensors(), saved.facts())
    with_store.wait()
    destinations = {}

    def prepare(manifest: Manifest):
        destinations.update(target.destinations(manifest))
        return destinations

    manifest = with_store.restore(prepare)
    assert manifest is not None
    target.apply(manifest, destinations)
    with_store.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_goes_on_bit_for_bit(tmp_path, optimizer, scheduler):
    straight = make(optimizer, scheduler, seed=1)
    advance(straight, 6)
    first = make(optimizer, scheduler, seed=1)
    advance(first, 3)
    second = make(optimizer, scheduler, seed=2)
    save_and_restore(tmp_path, first, second)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name
    # The data is that of steps 1 to 3 again, so both go on from step 3 alike.
    advance(first, 3)
    advance(second, 3)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_tied_parameters_are_kept_once():
    model = Tied()
    names = TrainingState(model, torch.optim.SGD(model.parameters()), None).tensors()
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names


def test_another_model_is_refused_with_every_difference(tmp_path):
    small, large = (TrainingState(m, OPTIMIZERS["adamw"](m), None) for m in (Mlp(8), Mlp(9)))
    advance(small, 1)
    with pytest.raises(
        CheckpointMismatch, match=r"model.first.bias: saved float32 \[8\], here float32 \[9\]"
    ):
        save_and_restore(tmp_path, small, large)


def test_other_groups_are_refused(tmp_path):
    one, two = make("adamw", "none", 1), make("groups", "none", 1)
    advance(one, 1)
    with pytest.raises(CheckpointMismatch, match="groups the parameters differently"):
        save_and_restore(tmp_path, one, two)
