"""ranks: swap's building blocks, the hierarchical all-reduce, and HiTopKComm with its residuals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.nodes import Nodes
from headway.comm.algorithms.hierarchical import HierarchicalAllReduce, segments
from headway.comm.algorithms.method import (
    AllReduce,
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    PeerGroup,
    PointToPointOperations,
    ScratchBuffers,
    StatelessMethod,
    all_gather,
    check_uniform_nodes,
    complete,
    first_tag,
    pipeline_rounds,
    reduce_scatter,
    send_receive,
    send_receive_chunked,
    split_evenly,
)
from headway.comm.compress.sparsification import HierarchicalTopK
from headway.comm.lanes.routes import make_route
from headway.errors import PlanError
from support.compressor_states import merge_states, spread_states
from support.ranks import ranks, run_ranks

LAYERS = (("first.weight", 700), ("first.bias", 1), ("second.weight", 253), ("second.bias", 46))


def drive(rounds) -> int:
    """Carry a generator of rounds out; returns how many there were."""
    count = 0
    for waiting in rounds:
        assert isinstance(waiting, PointToPointOperations)
        for work in waiting.works:
            work.wait()
        count += 1
    return count


def whole(world) -> PeerGroup:
    return PeerGroup(world.group, tuple(range(world.size)), world.rank)


def two_by_two() -> Nodes:
    return Nodes(((0, 1), (2, 3)))


def fused(values: Tensor, flags: list[float], layers=LAYERS, number=0) -> FusedBuffer:
    pieces, start = [], 0
    for name, size in layers:
        pieces.append(GradientSlice(name, start, start + size, (size,)))
        start += size
    assert start == values.numel()
    return FusedBuffer(
        torch.cat((values, torch.tensor(flags, dtype=values.dtype))), (*pieces,), number
    )


def gradients(rank: int, step: int = 0, dtype=torch.float64) -> Tensor:
    make = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(1000, generator=make, dtype=torch.float64).to(dtype)


# ---- building blocks -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shards_are_a_partition_of_almost_equal_parts(length, count):
    spans = split_evenly(length, count, start=10)
    assert [i for span in spans for i in range(span.start, span.stop)] == [*range(10, 10 + length)]
    sizes = [span.stop - span.start for span in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_scratch_gives_the_same_memory_again_and_never_to_two():
    scratch, like = ScratchBuffers(), torch.empty(0)
    one, two = scratch.take(5, like), scratch.take(5, like)
    assert one.data_ptr() != two.data_ptr()
    scratch.give(one)
    assert scratch.take(5, like, torch.float64).dtype == torch.float64
    assert scratch.take(5, like).data_ptr() == one.data_ptr()


def test_tags_of_exchanges_that_may_be_under_way_together_differ():
    tags = {
        first_tag(number, turn) + part
        for number in (0, 1, 2)
        for turn in range(16)
        for part in (0, 1023)
    }
    assert len(tags) == 3 * 16 * 2


def building_blocks(world):
    circle, scratch = whole(world), ScratchBuffers()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for size in (0, 1, world.size - 1, world.size, 1001):
            make = torch.Generator().manual_seed(size + 10_000 * world.rank)
            own = torch.randint(-9, 9, (size,), generator=make).to(dtype)
            summed = own.clone()
            dist.all_reduce(summed, group=world.group)
            flat, spans = own.clone(), split_evenly(size, world.size)
            assert drive(reduce_scatter(flat, spans, circle, 3, scratch)) == 1
            mine = spans[world.rank]
            assert torch.equal(flat[mine], summed[mine])
            assert torch.equal(flat[: mine.start], own[: mine.start])
            assert torch.equal(flat[mine.stop :], own[mine.stop :])
            drive(all_gather(flat, spans, circle, 3))
            assert torch.equal(flat, summed)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_reduce_scatter_and_all_gather_equal_the_plain_collective(size):
    run_ranks(size, building_blocks)


@ranks(3)
def test_uneven_spans_and_empty_ones(world):
    spans = (slice(0, 0), slice(0, 90), slice(90, 100))
    flat = torch.arange(100.0) * (world.rank + 1)
    drive(reduce_scatter(flat, spans, whole(world), 0, ScratchBuffers()))
    assert torch.equal(flat[spans[world.rank]], torch.arange(100.0)[spans[world.rank]] * 6)
    drive(all_gather(flat, spans, whole(world), 0))
    assert torch.equal(flat, torch.arange(100.0) * 6)


def bits(world, cut: int) -> Tensor:
    flat = torch.randn(50, generator=torch.Generator().manual_seed(world.rank))
    spans = [slice(0, cut), *(slice(cut, cut) for _ in range(world.size - 2)), slice(cut, 50)]
    drive(reduce_scatter(flat, spans, whole(world), 0, ScratchBuffers()))
    drive(all_gather(flat, spans, whole(world), 0))
    return flat


def test_a_sum_has_the_same_bits_whoever_owns_the_span():
    one, other = run_ranks(5, bits, 3), run_ranks(5, bits, 41)
    assert all(torch.equal(one[0], flat) for flat in (*one, *other))


@ranks(2)
def test_messages_with_other_tags_do_not_need_the_same_order(world):
    """What makes several exchanges under way together safe."""
    circle, other = whole(world), 1 - world.rank
    tags = [5, 6] if world.rank == 0 else [6, 5]
    found = {tag: torch.zeros(1) for tag in tags}
    waits = [
        send_receive(circle, [(found[tag], other)], [(torch.tensor([float(tag)]), other)], tag)
        for tag in tags
    ]
    for waiting in waits:
        for work in waiting.works:
            work.wait()
    assert {tag: value.item() for tag, value in found.items()} == {5: 5.0, 6: 6.0}


def test_a_conveyor_keeps_its_window_full_and_resumes_in_turn():
    log: list[str] = []

    def task(name: str):
        for step in range(3):
            log.append(f"{name}{step}")
            yield PointToPointOperations(())

    assert drive(pipeline_rounds((task(name) for name in "abc"), 2)) == 9
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2", "c0", "c1", "c2"]
    assert drive(pipeline_rounds([iter(())], 2)) == 0


# ---- hierarchical, dense -----------------------------------------------------------------------


class Half(StatelessMethod):
    """Stands for an elementwise compressor: the sum in 16 bits."""

    elementwise = True

    def rounds(self, fused, route):
        small = fused.buffer.half()
        yield dist.all_reduce(small, group=route.group, async_op=True)
        fused.buffer.copy_(small)


def dense(world, nodes: Nodes, dtype, inner: ExchangeMethod | None = None) -> Tensor:
    route = make_route(None, nodes, hierarchical=True)
    method = HierarchicalAllReduce(inner)
    flags = [float(world.rank == 1), 0.0, 1.0, float(world.rank == world.size - 1)]
    for number in (0, 7):  # twice: the second time with memory that was used before
        bucket = fused(gradients(world.rank, number, dtype), flags, number=number)
        complete(method, bucket, route)
    return bucket.buffer


@pytest.mark.parametrize(
    "nodes",
    [
        Nodes(((0, 1), (2, 3))),
        Nodes(((0, 3), (1, 2))),  # the ranks of a column are not ascending
        Nodes(((0, 1, 2, 3),)),
        Nodes(((0,), (1,), (2,), (3,))),
        Nodes(((0, 1), (2, 3), (4, 5))),
        Nodes(((0, 1, 2), (3, 4, 5))),
    ],
    ids=str,
)
def test_hierarchical_is_the_sum_on_any_nodes(nodes, monkeypatch):
    results = run_ranks(nodes.ranks, dense, nodes, torch.float64)
    expected = sum(gradients(rank, 7) for rank in range(nodes.ranks))
    for found in results:
        assert torch.equal(found, results[0])
        assert torch.allclose(found[:1000], expected, rtol=1e-12, atol=1e-12)
        assert (found[1000:] > 0).tolist() == [True, False, True, True]


def test_hierarchical_with_an_inner_compressor():
    found = run_ranks(4, dense, two_by_two(), torch.float32, Half())[0]
    expected = sum(gradients(rank, 7) for rank in range(4))
    assert not torch.allclose(found[:1000].double(), expected, rtol=1e-5)
    assert torch.allclose(found[:1000].double(), expected, atol=1e-2)
    assert (found[1000:] > 0).tolist() == [True, False, True, True]


@ranks(4)
def test_hierarchical_in_many_segments_and_fewer_elements_than_ranks(world):
    route = make_route(None, two_by_two(), hierarchical=True)
    method = HierarchicalAllReduce()
    for size in (1, 2, 3, 2_000_003):
        flat = torch.arange(float(size)) % 1000 + world.rank
        complete(method, FusedBuffer(flat), route)
        assert torch.equal(flat, 4 * (torch.arange(float(size)) % 1000) + 6)


def test_segments_are_even_and_bounded():
    assert len(segments(torch.empty(0), 2**20)) == 1
    assert len(segments(torch.empty(3), 1)) == 3
    assert len(segments(torch.empty(5000), 4)) == 1024
    assert [s.stop - s.start for s in segments(torch.empty(2**20), 2**21)] == [2**19, 2**19]


def test_what_cannot_be_hierarchical_is_refused_with_the_reason():
    with pytest.raises(PlanError, match="the nodes have 2, 1 ranks") as caught:
        check_uniform_nodes(Nodes(((0, 1), (2,))))
    assert "as many processes on every node" in str(caught.value)

    class Whole(StatelessMethod):
        def rounds(self, fused, route):
            yield from ()

    with pytest.raises(PlanError, match="Whole needs whole ones"):
        HierarchicalAllReduce(Whole())


# ---- HiTopKComm ---------------------------------------------------------------------------------


class Reference:
    """HiTopKComm of two nodes of two ranks in one process, on sums of nodes, without messages."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.kept = [torch.zeros(1000, dtype=torch.float64) for _ in range(2)]

    def step(self, values: list[Tensor]) -> Tensor:
        total = torch.zeros(1000, dtype=torch.float64)
        for node in range(2):
            everything = values[2 * node] + values[2 * node + 1] + self.kept[node]
            sent = torch.zeros_like(everything)
            # 1004 elements with the flags: the second shard has 498 gradients and the flags.
            for shard in (slice(0, 502), slice(502, 1000)):
                part = everything[shard]
                count = max(1, round(self.density * part.numel()))
                index = part.abs().topk(count).indices
                sent[shard][index] = part[index]
            self.kept[node] = everything - sent
            total += sent
        return total


def sparse_steps(world, density: float, steps: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    route = make_route(None, two_by_two(), hierarchical=True)
    method = HierarchicalTopK(density)
    found = []
    for step in range(steps):
        flags = [float(world.rank == 3), 0.0, 1.0, float(world.rank == step)]
        bucket = fused(gradients(world.rank, step), flags)
        complete(method, bucket, route)
        found.append((bucket.buffer, method.state()))
    return found


@pytest.mark.parametrize("density", [0.01, 0.1, 0.9])  # the last: sums are smaller than parcels
def test_hitopkcomm_equals_the_reference_in_one_process_exactly(density):
    results = run_ranks(4, sparse_steps, density, 3)
    reference = Reference(density)
    for step in range(3):
        expected = reference.step([gradients(rank, step) for rank in range(4)])
        for rank in range(4):
            flat, _ = results[rank][step]
            assert torch.equal(flat[:1000], expected)
            assert (flat[1000:] > 0).tolist() == [True, False, True, True]
        for node in range(2):
            state = merge_states([results[2 * node + place][step][1] for place in range(2)])
            assert torch.equal(spread(state), reference.kept[node])


def spread(state: dict[str, Tensor], layers=LAYERS) -> Tensor:
    """A residual by name and offset as one vector."""
    flat, start = torch.zeros(sum(size for _, size in layers), dtype=torch.float64), 0
    for name, size in layers:
        for key, values in state.items():
            found, offset, what = key.rsplit("/", 2)
            assert what == "residual"
            if found == name:
                assert int(offset) + values.numel() <= size
                flat[start + int(offset) :][: values.numel()] += values
        start += size
    return flat


def law(world, checkpoint: int) -> tuple[Tensor, dict[str, Tensor]]:
    route = make_route(None, two_by_two(), hierarchical=True)
    method, total = HierarchicalTopK(0.01), torch.zeros(1000, dtype=torch.float64)
    for step in range(100):
        bucket = fused(gradients(world.rank, step, torch.float32), [1.0] * 4)
        complete(method, bucket, route)
        total += bucket.gradients
        if step == checkpoint:
            saved = method.state()
            method = HierarchicalTopK(0.01)
            method.restore(saved)
    return total, method.state()


def test_sent_and_residual_are_the_sum_of_all_gradients_also_over_a_checkpoint():
    results, undisturbed = run_ranks(4, law, 50), run_ranks(4, law, -1)
    everything = sum(
        gradients(rank, step, torch.float32).double() for rank in range(4) for step in range(100)
    )
    kept = spread(merge_states([state for _, state in results]))
    assert kept.abs().max() > 1
    assert torch.allclose(results[0][0] + kept, everything, atol=1e-4)
    assert torch.equal(results[0][0], undisturbed[0][0])  # bit for bit


def after(world, nodes: Nodes, states: list[dict[str, Tensor]], step: int):
    """One more step on other ranks, with two buckets instead of one, from saved states."""
    route = make_route(None, nodes, hierarchical=True)
    values, start = gradients(world.rank, step), 0
    total, kept = torch.zeros(0, dtype=torch.float64), {}
    for number, part in enumerate((LAYERS[:1], LAYERS[1:])):
        method = HierarchicalTopK(0.02)
        method.restore(states[world.rank])
        assert method.state().keys() == states[world.rank].keys()
        size = sum(size for _, size in part)
        bucket = fused(values[start : start + size], [1.0] * len(part), part, number)
        complete(method, bucket, route)
        total = torch.cat((total, bucket.gradients))
        kept |= method.state()
        start += size
    return total, kept


@pytest.mark.parametrize(
    "nodes",
    [Nodes(((0,), (1,))), Nodes(((0, 1),)), two_by_two(), Nodes(((0, 1, 2), (3, 4, 5)))],
    ids=str,
)
def test_residuals_survive_other_ranks_and_other_buckets(nodes):
    """2 x 2 ranks with one bucket, then other ranks with two: nothing is lost or sent twice."""
    first = run_ranks(4, sparse_steps, 0.01, 3)
    states = spread_states([result[-1][1] for result in first], nodes.ranks)
    second = run_ranks(nodes.ranks, after, nodes, states, 3)
    sent = sum(result[0][:1000] for result in first[0]) + second[0][0]
    kept = spread(merge_states([state for _, state in second]))
    assert (kept.abs().max() > 1) == (nodes.count > 1)
    everything = sum(gradients(rank, step) for rank in range(4) for step in range(3))
    everything += sum(gradients(rank, 3) for rank in range(nodes.ranks))
    assert torch.allclose(sent + kept, everything, atol=1e-12)
    assert all(torch.equal(total, second[0][0]) for total, _ in second)


def coarse(world) -> tuple[Tensor, dict[str, Tensor]]:
    route = make_route(None, two_by_two(), hierarchical=True)
    method = HierarchicalTopK(0.05)
    total = torch.zeros(1000, dtype=torch.float64)
    for _ in range(40):
        bucket = fused(((129 + torch.arange(1000) % 7 * 2) / 128).to(torch.bfloat16), [1.0] * 4)
        complete(method, bucket, route)
        total += bucket.gradients
    return total, method.state()


def test_in_16_bits_the_residual_keeps_what_the_wire_rounds_off():
    results = run_ranks(4, coarse)
    kept = spread(merge_states([state for _, state in results]))
    expected = 40 * 4 * ((129 + torch.arange(1000) % 7 * 2) / 128).to(torch.bfloat16).double()
    error = (results[0][0] + kept - expected).abs().max() / expected.max()
    assert error < 1e-6, error  # all sums are of two equal terms, and so exact in 16 bits


@ranks(4)
def test_hitopkcomm_with_tiny_buckets(world):
    """Empty shards, shards of flags only, fewer elements than ranks."""
    route = make_route(None, two_by_two(), hierarchical=True)
    for sizes in ([1], [1, 1], [2, 3], [1, 1, 1, 1, 1, 1]):
        layers = [(f"p{number}", size) for number, size in enumerate(sizes)]
        values = torch.arange(1.0, sum(sizes) + 1)
        flags = [float(world.rank == place) for place in range(len(sizes))]
        bucket = fused(values.clone(), flags, layers)
        complete(HierarchicalTopK(1.0), bucket, route)
        assert torch.equal(bucket.gradients, 4 * values)
        assert (bucket.flags > 0).tolist() == [place < 4 for place in range(len(sizes))]


def sent_bytes(world, method: ExchangeMethod) -> int:
    """What this rank sends to the other node, counted where it is handed to torch."""
    route, count = make_route(None, two_by_two(), hierarchical=True), 0
    real = dist.isend

    def counting(tensor, *, group, group_dst, tag):
        nonlocal count
        if group is route.across:
            count += tensor.numel() * tensor.element_size()
        return real(tensor, group=group, group_dst=group_dst, tag=tag)

    dist.isend = counting
    try:
        bucket = fused(torch.randn(100_000), [1.0], [("all", 100_000)])
        complete(method, bucket, route)
    finally:
        dist.isend = real
    return count


def test_hitopkcomm_sends_the_formulas_bytes_across():
    per_node = sum(run_ranks(4, sent_bytes, HierarchicalTopK(0.01))[:2])
    assert per_node == pytest.approx(1 * 0.01 * 100_000 * 8, rel=0.01)


def fit(world, density: float, feedback: bool) -> int:
    """Steps of logistic regression on separable data until the loss is 0.15."""
    make = torch.Generator().manual_seed(7)
    truth = torch.randn(200, generator=make)
    inputs = torch.randn(512, 200, generator=make) * torch.linspace(0.05, 2, 200)
    labels = (inputs @ truth > 0).float()
    mine = slice(world.rank, None, 4)
    weight = torch.zeros(200, requires_grad=True)
    route = make_route(None, two_by_two(), hierarchical=True)
    method: ExchangeMethod = HierarchicalTopK(density) if density < 1 else AllReduce()
    for step in range(1, 400):
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        (grad,) = torch.autograd.grad(loss(inputs[mine] @ weight, labels[mine]), weight)
        bucket = fused(grad, [1.0], [("weight", 200)])
        complete(method, bucket, route)
        if not feedback:
            method.restore({})
        with torch.no_grad():
            weight -= 0.5 * bucket.gradients / 4
            if loss(inputs @ weight, labels) < 0.15:
                return step
    return 400


@pytest.mark.slow
def test_error_feedback_reaches_the_dense_loss_and_without_it_training_is_slower():
    dense_steps = run_ranks(4, fit, 1.0, True)[0]
    with_feedback = run_ranks(4, fit, 0.05, True)[0]
    without = run_ranks(4, fit, 0.05, False)[0]
    assert with_feedback <= 1.3 * dense_steps
    assert without > 1.3 * dense_steps


def sampled_steps(world) -> Tensor:
    route = make_route(None, two_by_two(), hierarchical=True)
    method, total = HierarchicalTopK(0.05, sampled=True), torch.zeros(1000, dtype=torch.float64)
    for step in range(5):
        bucket = fused(gradients(world.rank, step), [1.0] * 4)
        complete(method, bucket, route)
        assert 40 <= int((bucket.gradients != 0).sum()) <= 100
        total += bucket.gradients
    return total, method.state()


def test_hitopkcomm_by_mstopk_keeps_the_law_and_draws_the_same_again():
    results, again = run_ranks(4, sampled_steps), run_ranks(4, sampled_steps)
    everything = sum(gradients(rank, step) for rank in range(4) for step in range(5))
    kept = spread(merge_states([state for _, state in results]))
    assert torch.allclose(results[0][0] + kept, everything, atol=1e-12)
    assert all(torch.equal(found, again[0][0]) for found, _ in results)


@ranks(2)
def test_a_stream_carries_unequal_messages_in_parcels(world):
    """More parcels than are under way at a time; each is usable when it is there."""
    sizes = (1_000_003, 700_001)
    mine = torch.arange(float(sizes[world.rank])) + world.rank
    received, seen = torch.zeros(sizes[1 - world.rank]), 0
    for waiting, there in send_receive_chunked(whole(world), received, mine, 1 - world.rank, 0):
        for work in waiting.works:
            work.wait()
        expected = torch.arange(float(there.start), there.stop) + 1 - world.rank
        assert torch.equal(received[there], expected)
        seen += there.stop - there.start
    assert seen == received.numel()
    assert list(
        send_receive_chunked(whole(world), torch.empty(0), torch.empty(0), 1 - world.rank, 0)
    )
