"""single: the collectives of a plan, count and bytes, are those that are recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import Executor, criterion
from headway.collective.collective_calls import CollectiveCall, CommunicatingStage
from headway.graph.model_graph import TensorSpec
from headway.planner.traffic.executor import collectives_of_plan, of_exchange
from headway.plans import ExchangePlan, data_parallel
from support.collective_recorder import CollectiveRecorder, collective_differences
from support.ddp_traffic import ddp_calls
from support.fake_world import fake_world
from support.tiny_models import CLASSES, FEATURES, Points, TinyConv

WORLDS = (2, 8, 1024)
LOSS = criterion(nn.CrossEntropyLoss())


def specs_of(parameters):
    return {
        name: TensorSpec(shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
        for name, p in parameters
    }


def same(calls, recorder):
    assert recorder.seen
    assert list(collective_differences(calls, recorder.seen)) == []


class Deep(nn.Sequential):
    """4.6 MB in odd shapes, one parameter frozen, one never used."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 700), nn.Tanh(), nn.Linear(700, 701), nn.Tanh(),
            nn.Linear(701, 900), nn.Tanh(), nn.Linear(900, CLASSES),
        )  # fmt: skip
        self[4].bias.requires_grad_(False)
        self.spare = nn.Parameter(torch.zeros(3, 5))


def trained(model):
    return specs_of((n, p) for n, p in model.named_parameters() if p.requires_grad)


# -- headway's exchange ---------------------------------------------------------------------------


def steps(world, plan, model, count=2):
    """What the executor does in its last step of full batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Executor(model, optimizer, loss=LOSS, plan=plan, world=world)
    for number, batch in enumerate(run.batches(Points(plan.batch.samples * count))):
        with CollectiveRecorder() as recorder:
            run.step(batch)
        assert number < count
    return recorder


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("bucket", ["8 MiB", "100 KiB"])
def test_data_parallel_plan(ranks, bucket):
    """Buckets with their flags, the tally; two micro-batches make no more of them."""
    exchange = ExchangePlan(bucket=bucket)
    plan = data_parallel(4 * ranks, processes=ranks, microbatch=2, exchange=exchange)
    model = Deep()
    with fake_world(ranks, rank=ranks - 1) as world:
        recorder = steps(world, plan, model)
    calls = collectives_of_plan(plan, [CommunicatingStage(parameters=trained(model))])
    same(calls, recorder)
    assert len(recorder.seen) == {"8 MiB": 3, "100 KiB": 6}[bucket]


def test_one_rank_sends_nothing():
    assert (
        collectives_of_plan(data_parallel(4, processes=1), [CommunicatingStage(parameters={})])
        == ()
    )


@pytest.mark.parametrize("compress", ["fp16", "bf16", "topk:0.01", "powersgd:2", "int8", "sign"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_compressed_exchange(ranks, compress):
    """Of every compressor the operations that its method starts."""
    from headway.comm.algorithms.method import finish
    from headway.comm.lanes.routes import RoutePool
    from headway.comm.tuning.autotuning import initial_arrangement, make_buckets

    exchange, model = ExchangePlan(compress=compress), Deep()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with fake_world(ranks):
        layout = initial_arrangement(parameters, exchange).layout
        buckets = make_buckets(parameters, layout, exchange, RoutePool(), seed=0)
        with CollectiveRecorder() as recorder:
            for bucket in buckets:
                bucket.fill()
                finish(bucket.method.rounds(bucket.fused, bucket.routes[0]))
    same(tuple(of_exchange(exchange, trained(model), ranks)), recorder)


# -- torch's wrappers -----------------------------------------------------------------------------


def arriving(model, inputs):
    """Parameters in the order in which backward makes their gradients."""
    names = {p: n for n, p in model.named_parameters()}
    order = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: order.append((names[p], p)))
        for p in model.parameters()
        if p.requires_grad
    ]
    model(inputs).sum().backward()
    for hook in hooks:
        hook.remove()
    return specs_of(order)


def by_hook(_, bucket):
    """DDP's own sum, but for the future: those of fake groups have no value."""
    torch.distributed.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("cap", [None, 25, 1])
def test_distributed_data_parallel(ranks, cap):
    model = Deep()
    del model.spare
    inputs = torch.randn(3, FEATURES)
    calls = ddp_calls(arriving(model, inputs), ranks, cap=cap and cap * 2**20)
    with fake_world(ranks, rank=1):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
        wrapped.register_comm_hook(None, by_hook)
        for _ in range(3):
            with CollectiveRecorder() as recorder:
                wrapped(inputs).sum().backward()
    same(calls, recorder)
    assert sum(call.count for call in calls) == {None: 2, 25: 1, 1: 3}[cap]


def test_distributed_data_parallel_with_buffers():
    model = TinyConv(batch_norm=True)
    inputs = torch.randn(2, 1, 4, 4)
    arrived = arriving(model, inputs)
    buffers = list(specs_of(model.named_buffers()).values())
    with fake_world(8):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, by_hook)
        for _ in range(3):
            with CollectiveRecorder() as recorder:
                wrapped(inputs).sum().backward()
    same(ddp_calls(arrived, 8, buffers=buffers), recorder)


def test_a_difference_is_named():
    """The comparison sees a wrong count, a wrong size, and what is on one side alone."""
    plan = [
        CollectiveCall(kind="all_reduce", axis="data", ranks=8, bytes=24, count=2, phase="tally")
    ]
    with fake_world(8), CollectiveRecorder() as recorder:
        torch.distributed.all_reduce(torch.zeros(6))
        torch.distributed.all_reduce(torch.zeros(7))
        torch.distributed.broadcast(torch.zeros(1), src=0)
    assert list(collective_differences(plan, recorder.seen)) == [
        "all_reduce of 8 ranks, 24 bytes: 2 in the plan, 1 seen",
        "all_reduce of 8 ranks, 28 bytes: 0 in the plan, 1 seen",
        "broadcast of 8 ranks, 4 bytes: 0 in the plan, 1 seen",
    ]
