"""single: what a step cannot drive is refused before the first one, with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.comm.algorithms.method import AllReduce
from headway.comm.exchange.gradient_exchange import StepExchange
from headway.comm.lanes.bucket_lanes import InlineLane
from headway.comm.lanes.buckets import make_bucket
from headway.data import Cursor
from headway.errors import Diverged, PeerLost, RecipeError
from headway.plans import data_parallel
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.recipe.recipe import sum_and_count
from headway.run.step.batch import resize_batch, to_device
from headway.run.step.forward_pass import to_float64
from headway.run.step.setup import check_components
from headway.run.strategy.training_state import TrainingState
from headway.run.training.loop import Training
from support.tiny_models import Mlp, Points, WithDropout, cross_entropy


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_that_wants_a_closure_is_refused():
    model = Mlp()
    with pytest.raises(RecipeError, match="LBFGS cannot be used: its step needs closure"):
        check_components(model, torch.optim.LBFGS(model.parameters()), None, 1)


def test_a_scheduler_that_wants_a_number_is_refused():
    model = Mlp()
    optimizer = sgd(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(RecipeError, match=r"ReduceLROnPlateau cannot be used.*metrics"):
        check_components(model, optimizer, plateau, 1)


@pytest.mark.parametrize("name", ["StepLR", "LinearLR", "SequentialLR", "ChainedScheduler"])
def test_schedulers_that_follow_a_curve_are_taken(name):
    model = Mlp()
    optimizer = sgd(model)
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.StepLR(optimizer, 2), schedulers.LinearLR(optimizer)]
    made = {
        "StepLR": lambda: parts[0],
        "LinearLR": lambda: parts[1],
        "SequentialLR": lambda: schedulers.SequentialLR(optimizer, parts, [2]),
        "ChainedScheduler": lambda: schedulers.ChainedScheduler(parts),
    }
    check_components(model, optimizer, made[name](), 2)


def test_parameters_of_a_loss_are_refused():
    """Their gradients would never be exchanged: the ranks would drift apart."""
    model, extra = Mlp(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(RecipeError, match=r"shape \[3\] that the model does not have"):
        Executor(model, optimizer, loss=cross_entropy, batch=8)


def test_an_optimizer_of_sparse_gradients_is_for_one_process():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    check_components(model, optimizer, None, 1)
    with pytest.raises(RecipeError, match="SparseAdam cannot be used by 2 processes"):
        check_components(model, optimizer, None, 2)


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (None, "None"),
        (1.0, "a float"),
        (torch.ones(3), r"a tensor of shape \[3\]"),
        ((torch.ones(3), 2), r"a tuple of a tensor of shape \[3\], a int"),
        ((torch.ones(()), 2, 3, 4), "a tuple of a tensor"),
    ],
)
def test_a_loss_that_is_no_loss_is_described(value, described):
    with pytest.raises(RecipeError, match=f"the loss returned {described}"):
        sum_and_count(value, 4)


def test_a_mean_and_a_pair():
    total, count = sum_and_count(torch.tensor(2.0), 4)
    assert (float(total), count) == (8.0, 4.0)
    assert sum_and_count((torch.tensor(2.0), 3), 4)[1] == 3


def test_complex_parameters_keep_their_imaginary_part_in_double_precision():
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64)))
    to_float64(model)
    assert model.w.dtype == torch.complex128
    assert model.w.item() == 1 + 2j
    moved = to_device(torch.tensor([3j], dtype=torch.complex64), torch.device("cpu"), torch.float64)
    assert moved.dtype == torch.complex128


def test_a_batch_may_hold_texts_and_single_numbers():
    batch = {"x": torch.ones(4, 2), "t": torch.tensor(0.5), "id": ["a", "b", "c", "d"]}
    three = resize_batch(batch, 3)
    assert three["x"].shape == (3, 2)
    assert three["t"].shape == ()
    assert three["id"] == ["a", "a", "a"]


class TestOwnLoop:
    def run(self, model=None, **options):
        model = model or Mlp()
        options = {"batch": 8, "loss": cross_entropy, **options}
        return Executor(model, options.pop("optimizer", sgd)(model), **options)

    def test_every_pass_over_the_data_is_a_new_epoch(self):
        run = self.run()
        orders = []
        for _ in range(2):
            epochs = []
            for batch in run.batches(Points(24)):
                run.step(batch)
                epochs.append(batch.start.epoch)
            orders.append(epochs)
        assert orders == [[0, 0, 0], [1, 1, 1]]

    def test_with_a_cursor_epochs_are_those_of_the_run(self):
        cursor = Cursor(seed=0, epoch=1, position=16)
        batches = list(self.run().batches(Points(24), epochs=3, cursor=cursor))
        assert [(b.start.epoch, b.start.position) for b in batches] == [
            (1, 16), (2, 0), (2, 8), (2, 16),
        ]  # fmt: skip

    def test_a_module_in_eval_mode_stays_there(self):
        model = WithDropout()
        run = self.run(model)
        model.drop_first.eval()
        run.step(next(iter(run.batches(Points()))))
        run.evaluate(run.loader(Points(8), epochs=1))
        assert model.training
        assert not model.drop_first.training

    def test_after_the_users_own_validation_training_goes_on_in_training_mode(self):
        run = self.run()
        run.model.eval()
        run.step(next(iter(run.batches(Points()))))
        assert all(module.training for module in run.model.modules())

    def test_state_that_the_optimizer_had_follows_into_float64(self):
        model = Mlp()
        optimizer = torch.optim.Adagrad(model.parameters())
        plan = data_parallel(8, processes=1, precision="float64")
        run = Executor(model, optimizer, loss=cross_entropy, plan=plan)
        run.step(next(iter(run.batches(Points()))))
        tensors = TrainingState(model, optimizer, None).tensors()
        assert {t.dtype for n, t in tensors.items() if n.endswith("sum")} == {torch.float64}

    def test_gradients_of_parameters_outside_the_optimizer_do_not_add_up(self):
        run = self.run(optimizer=lambda model: sgd(model.second), clip=1.0)
        run.step(next(iter(run.batches(Points()))))
        first = run.record.norm
        with torch.no_grad():
            run.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(3):
            run.step(next(iter(run.batches(Points()))))
        assert run.record.norm < 2 * first

    def test_a_gradient_that_is_not_finite_is_never_applied(self):
        def loss(model, batch):
            return torch.sqrt(model(batch[0]).sum() * 0)

        run = self.run(loss=loss, clip=1.0)
        before = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(Diverged, match="norm of the gradients is nan"):
            run.step(next(iter(run.batches(Points()))))
        assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))

    def test_a_count_of_nothing_is_a_loss_that_is_not_finite(self):
        run = self.run(loss=lambda model, batch: (model(batch[0]).sum() * 0, 0))
        with pytest.raises(Diverged, match="the loss is nan"):
            run.step(next(iter(run.batches(Points()))))


def test_only_what_the_model_can_take_is_probed():
    """Graphs: dimension 0 of a tensor is not the samples, so the probe cannot resize them."""

    class Graphs:
        def __len__(self):
            return 16

        def read(self, indices):
            edges = torch.arange(2 * len(indices)).view(2, -1) % len(indices)
            return {"x": torch.ones(len(indices), 6), "edges": edges}

    def loss(model, batch):
        sources, targets = batch["edges"]
        y = model(batch["x"])
        return F.mse_loss(y[sources], y[targets] + 1)

    model = WithDropout()
    run = Executor(model, sgd(model), loss=loss, batch=8)
    with pytest.warns(UserWarning, match="cannot be cut into samples"):
        run.step(next(iter(run.batches(Graphs()))))


def test_a_gradient_lies_in_memory_as_its_parameter_does():
    """Otherwise torch warns, and channels-last kernels copy."""
    transposed = nn.Parameter(torch.randn(3, 5).t())
    images = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    parameters = {"t": transposed, "i": images, "n": nn.Parameter(torch.tensor(1.0))}
    buckets = tuple(
        make_bucket(number, [name], parameters, AllReduce(), ())
        for number, name in enumerate(parameters)
    )
    exchange = StepExchange(buckets, InlineLane(buckets))
    for parameter in parameters.values():
        (parameter * parameter).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        torch.testing.assert_close(parameter.grad, 2 * parameter.detach())
    exchange.close()


def test_a_peer_that_dies_while_a_checkpoint_is_read_is_not_this_ranks_failure():
    """Else the launcher would take it for an error and not start the workers again."""
    training = Training.__new__(Training)
    training._world = World(place=LaunchEnv(), device=torch.device("cpu"))
    with pytest.raises(PeerLost), training._storing():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [1.2.3.4]")
    with pytest.raises(RuntimeError, match="something else"), training._storing():
        raise RuntimeError("something else")
