"""ranks: optimizer, parameters and batch norm of `headway.horovod`, against one process.

Each rank has its part of the batch; one process has all of it. Float64, 1e-12.
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import headway.horovod as hvd
from support.ranks import ranks

STEPS = 3


def close(found, expected, rtol=1e-12):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


def network():
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


def batch(step, rank, rows=3):
    chosen = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 4, generator=chosen, dtype=torch.float64)


def loss_of(model, inputs):
    return model(inputs).square().mean()


def serial(make, n, passes=1):
    """Parameters after some steps on the batches of all ranks."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            every = torch.cat([batch(step * passes + part, rank) for rank in range(n)])
            loss_of(model, every).backward()
        optimizer.step()
    return list(model.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def train(model, optimizer, passes=1, set_to_none=True):
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(passes):
            loss_of(model, batch(step * passes + part, hvd.rank())).backward()
        optimizer.step()


def wrapped(make=sgd, **options):
    model = network()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters(), **options
    )
    return model, optimizer


@ranks(3)
def test_training_is_that_of_one_process(world):
    hvd.init()
    n = hvd.size()
    expected = serial(sgd, n)
    for options in (
        {},
        {"groups": 2},
        {"num_groups": 3},
        {"groups": "pairs"},
        {"gradient_predivide_factor": 3.0},
        {"sparse_as_dense": True},
        {"op": hvd.Sum, "rate": 1 / n},
    ):
        options = dict(options)
        rate = options.pop("rate", 1.0)
        model = network()
        if options.get("groups") == "pairs":
            own = list(model.parameters())
            options["groups"] = [own[:2], [own[4], own[3]]]
        inner = sgd(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        named = {name: parameter for parameter, name in optimizer._parameter_names.items()}
        assert all(named[name] is one for name, one in model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            (rate * loss_of(model, batch(step, hvd.rank()))).backward()
            optimizer.step()
        for one, other in zip(model.parameters(), expected, strict=True):
            close(one, other)
        assert optimizer.state_dict()["param_groups"] == inner.state_dict()["param_groups"]
    for passes in (2, 3):
        model, optimizer = wrapped(backward_passes_per_step=passes)
        train(model, optimizer, passes)
        for one, other in zip(model.parameters(), serial(sgd, n, passes), strict=True):
            close(one, other)
    model, optimizer = wrapped(lambda own: torch.optim.AdamW(own, lr=0.01))
    train(model, optimizer)
    for one, other in zip(
        model.parameters(), serial(lambda own: torch.optim.AdamW(own, lr=0.01), n), strict=True
    ):
        close(one, other, 1e-10)
    # Without names, with a scheduler and gradients clipped in between.
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    for step in range(STEPS):
        loss_of(model, batch(step, hvd.rank())).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        loss_of(reference, torch.cat([batch(step, rank) for rank in range(n)])).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        plain.step()
        plain.zero_grad()
        for each in schedulers:
            each.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        close(one, other)
    # A closure computes gradients inside of the step.
    model, optimizer = wrapped()
    for step in range(STEPS):

        def closure(step=step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, hvd.rank()))
            loss.backward()
            return loss

        optimizer.step(closure)
    for one, other in zip(model.parameters(), expected, strict=True):
        close(one, other)
    # 16 bits on the way.
    model, optimizer = wrapped(compression=hvd.Compression.fp16)
    train(model, optimizer)
    for one, other in zip(model.parameters(), expected, strict=True):
        close(one, other, 1e-2)
        assert one.grad.dtype == torch.float64
    hvd.shutdown()


@ranks(2)
def test_errors_and_parameters_that_come_and_go(world):
    hvd.init()
    me = hvd.rank()
    model, optimizer = wrapped()
    loss_of(model, batch(0, me)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, batch(0, me)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    own = list(network().named_parameters())
    inner = sgd([parameter for _, parameter in own])
    for wrong, match in (
        ({"named_parameters": [*own, (own[0][0], nn.Parameter(torch.ones(1)))]}, "unique"),
        ({"named_parameters": own[:2]}, "not named"),
        ({"named_parameters": [parameter for _, parameter in own]}, "tuples"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "predivide"),
        ({"groups": -1}, "groups"),
        ({"groups": 0}, "groups"),
        ({"groups": [own[0][1]]}, "groups"),
        ({"groups": [["a"]]}, "parameters"),
        ({"groups": [[own[0][1]], [own[0][1]]]}, "two groups"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(inner, **wrong)
    # Each rank uses another layer: gradients of the others are zero there.
    layers = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(3)).double()
    hvd.broadcast_parameters(layers.state_dict(), 0)
    start = copy.deepcopy(layers.state_dict())
    inner = torch.optim.SGD(layers.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, layers.named_parameters())
    layers[me](torch.ones(1, 4).double()).sum().backward()
    optimizer.step()
    for place, layer in enumerate(layers):
        moved = start[f"{place}.weight"] - layer.weight
        close(moved, torch.full_like(moved, 0.5 if place < 2 else 0.0))
    optimizer.zero_grad()
    # One layer is switched off and on again, as in adversarial training.
    for frozen in (0, 1, 0):
        for place, layer in enumerate(layers):
            layer.requires_grad_(place != frozen)
        before = copy.deepcopy(layers.state_dict())
        sum(layer(torch.full((1, 4), me + 1.0).double()) for layer in layers).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for place, layer in enumerate(layers):
            moved = before[f"{place}.weight"] - layer.weight
            close(moved, torch.full_like(moved, 0.0 if place == frozen else 1.5))
    # One that needs no gradient at first.
    late = nn.Linear(2, 1, bias=False).double().requires_grad_(False)
    hvd.broadcast_parameters(late.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(late.parameters(), lr=1.0))
    late.requires_grad_(True)
    before = late.weight.detach().clone()
    late(torch.full((1, 2), me + 1.0).double()).sum().backward()
    optimizer.step()
    close(before - late.weight, torch.full_like(before, 1.5))
    # Sparse gradients.
    for dense in (False, True):
        bag = nn.Embedding(5, 2, sparse=True).double()
        hvd.broadcast_parameters(bag.state_dict(), 0)
        inner = torch.optim.SGD(bag.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, bag.named_parameters(), sparse_as_dense=dense)
        before = bag.weight.detach().clone()
        bag(torch.tensor([me, 3, 3])).sum().backward()
        optimizer.step()
        assert bag.weight.grad.is_sparse
        close((before - bag.weight)[:, 0], torch.tensor([0.5, 0.5, 0, 2, 0]).double())
    # Only one rank exchanges: with itself.
    alone = hvd.add_process_set([1])
    model, optimizer = wrapped(process_set=alone)
    train(model, optimizer)
    reference = network()
    train(reference, sgd(reference.parameters()))
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        close(one, other)
    hvd.shutdown()


@ranks(3)
def test_ranks_that_do_not_do_the_same(world):
    """Another order of names, a layer that some do not use; a rank that is missing is named."""
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.5"
    hvd.init()
    me, n = hvd.rank(), hvd.size()
    for options in ({}, {"groups": 2}):
        model = network()
        own = list(model.named_parameters())
        inner = sgd(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, own[:: 1 - 2 * (me == 1)], **options)
        train(model, optimizer)
        for one, other in zip(model.parameters(), serial(sgd, n), strict=True):
            close(one, other)
    # A second optimizer replaces the first.
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(model, optimizer)
    # Sparse gradients: rank 0 has one in each step, the others in the first.
    for make in (lambda own: torch.optim.SGD(own, lr=1.0), torch.optim.SparseAdam):
        for dense in (False, True):
            bag, reference = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
            hvd.broadcast_parameters(bag.double().state_dict(), 0)
            reference.double().load_state_dict(bag.state_dict())
            optimizer = hvd.DistributedOptimizer(
                make(list(bag.parameters())), bag.named_parameters(), sparse_as_dense=dense
            )
            plain = make(list(reference.parameters()))
            for users in (range(n), range(1), range(1)):
                optimizer.zero_grad()
                plain.zero_grad()
                if me in users:
                    bag(torch.tensor([me, 4])).sum().backward()
                sum(reference(torch.tensor([user, 4])).sum() / n for user in users).backward()
                optimizer.step()
                plain.step()
            close(bag.weight, reference.weight)
    for names in (["", "", ""], ["", "other.", ""]):
        model = network()
        named = [(names[me] + name, parameter) for name, parameter in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named)
        if me != 1 or any(names):
            loss_of(model, batch(0, me)).backward()
            missing = "ranks 0, 2; rank 1" if me == 1 else "rank 1; ranks 0, 2"
            with pytest.raises(hvd.HorovodInternalError, match=f"for {missing} asked"):
                optimizer.step()
        dist.barrier()
        if me == 1 and not any(names):  # is told when it comes
            loss_of(model, batch(0, me)).backward()
            with pytest.raises(hvd.HorovodInternalError, match="for rank 1"):
                optimizer.step()
        dist.barrier()
    hvd.shutdown()


@ranks(2)
def test_adasum_combines_updates(world):
    hvd.init()
    model, optimizer = wrapped(lambda own: torch.optim.Adam(own, lr=0.01), op=hvd.Adasum)
    models = [network(), network()]
    inner = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
    for step in range(STEPS):
        loss_of(model, batch(step, hvd.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        start = copy.deepcopy(models[0])
        for rank in range(2):
            models[rank].load_state_dict(start.state_dict())
            inner[rank].zero_grad()
            loss_of(models[rank], batch(step, rank)).backward()
            inner[rank].step()
        with torch.no_grad():
            for w, one, two in zip(
                start.parameters(), models[0].parameters(), models[1].parameters(), strict=True
            ):
                a, b = one - w, two - w
                dot = (a * b).sum()
                factors = [1 - dot / (2 * each.square().sum()) for each in (a, b)]
                one.copy_(w + factors[0] * a + factors[1] * b)
                two.copy_(one)
    for one, other in zip(model.parameters(), models[0].parameters(), strict=True):
        close(one, other)
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    hvd.shutdown()


@ranks(2)
def test_parameters_that_are_added_later_are_exchanged(world):
    """With and without names, as layers that are thawed; Adasum, too, keeps ranks equal."""
    hvd.init()
    expected = serial(lambda own: torch.optim.SGD(own, lr=0.1), hvd.size())
    for named in (True, False):
        for op in (hvd.Average, hvd.Adasum):
            model = network()
            inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
            names = model.named_parameters() if named else None
            optimizer = hvd.DistributedOptimizer(inner, names, op=op)
            # By its names alone could the order of the two groups differ from rank to rank.
            later = [model[2], model[4]]
            for layer in later[:: -1 if named and hvd.rank() else 1]:
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
            train(model, optimizer)
            for one, other in zip(model.parameters(), expected, strict=True):
                if op == hvd.Average:
                    close(one, other)
                close(hvd.broadcast(one.detach(), 0), one.detach())
    hvd.shutdown()


OPTIMIZERS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.ASGD),
    *(torch.optim.Rprop, torch.optim.NAdam, torch.optim.RAdam),
)


@ranks(2)
def test_parameters_and_states_are_those_of_the_root(world):
    hvd.init()
    me = hvd.rank()
    for kind in OPTIMIZERS:
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(me)
        optimizer = kind(model.parameters(), lr=0.1 + me)
        if kind is torch.optim.SGD:
            optimizer.param_groups[0] |= {"momentum": 0.9 * me, "foreach": None if me else True}
        if me == 1:  # the root has made a step, the other none
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_parameters(model.state_dict() if me else model.named_parameters(), 1)
        fresh = not optimizer.state
        hvd.broadcast_optimizer_state(optimizer, 1)
        # As Horovod leaves them where no step had been made.
        assert not fresh or all(not one.grad.any() for one in model.parameters())
        states = hvd.allgather_object((model.state_dict(), optimizer.state_dict()))
        (one, here), (two, there) = states
        for name in one:
            close(one[name], two[name])
        assert here["param_groups"] == there["param_groups"]
        assert set(here["state"]) == set(there["state"]) == set(range(6))
        for number, entry in here["state"].items():
            assert entry.keys() == there["state"][number].keys()
            for name, value in entry.items():
                close(value, there["state"][number][name])
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(network().parameters()), 0)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, 0)
    hvd.shutdown()


@ranks(3)
def test_batch_normalisation_of_the_joined_batch(world):
    """Ranks have 1, 2 and 3 samples."""
    hvd.init()
    me, n = hvd.rank(), hvd.size()
    for shape in ((), (5,), (2, 3)):
        for momentum in (0.1, None):
            kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape)]
            whole = kind(4, momentum=momentum).double()
            own = hvd.SyncBatchNorm(4, momentum=momentum).double()
            with torch.no_grad():
                for each in (whole, own):
                    each.weight.copy_(torch.arange(4.0) + 1)
                    each.bias.copy_(torch.arange(4.0))
            for step in range(2):
                chosen = torch.Generator().manual_seed(step)
                every = torch.randn(6, 4, *shape, generator=chosen, dtype=torch.float64)
                weights = torch.randn(every.shape, generator=chosen, dtype=torch.float64)
                mine = slice(me * (me + 1) // 2, (me + 1) * (me + 2) // 2)
                one, all_ = every[mine].clone().requires_grad_(), every.clone().requires_grad_()
                found, expected = own(one), whole(all_)
                close(found, expected[mine])
                (found * weights[mine]).sum().backward()
                (expected * weights).sum().backward()
                close(one.grad, all_.grad[mine])
            for name in ("weight", "bias"):
                grad = hvd.allreduce(getattr(own, name).grad, op=hvd.Sum)
                close(grad, getattr(whole, name).grad)
            close(own.running_mean, whole.running_mean)
            close(own.running_var, whole.running_var)
            assert own.num_batches_tracked == whole.num_batches_tracked
            own.eval()
            whole.eval()
            close(own(every), whole(every))
    assert n == 3
    hvd.shutdown()


@ranks(3)
def test_batches_that_batch_normalisation_refuses(world):
    """As torch's BatchNorm of the joined batch does, on all ranks, and without a hang."""
    hvd.init()
    me = hvd.rank()
    own, kept = hvd.SyncBatchNorm(4).double(), hvd.SyncBatchNorm(4).double().state_dict()
    one = torch.ones(int(me == 1), 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        own(one)
    for channels in (1, 5):  # one channel would be spread over all
        with pytest.raises(ValueError, match=r"takes \(samples, 4"):
            own(torch.ones(2, channels, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"floating-point numbers, not of torch\.int64"):
        own(torch.ones(2, 4, dtype=torch.int64))
    for name, value in own.state_dict().items():
        close(value, kept[name])
    assert own(one[:0]).shape == (0, 4)
    assert own.num_batches_tracked == 1
    close(own.running_mean, kept["running_mean"])
    close(own.running_var, kept["running_var"])
    free = hvd.SyncBatchNorm(4, affine=False, track_running_stats=False).eval()
    assert free(torch.ones(2, 5)).shape == (2, 5)
    hvd.shutdown()
