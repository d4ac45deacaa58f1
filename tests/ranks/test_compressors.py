"""ranks: compressors keep their laws: nothing is lost, all ranks agree, bytes are as planned."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.collective.compression import COMPRESSORS, LARGE, is_dense
from headway.comm.algorithms.method import FusedBuffer, Route, complete
from headway.comm.compress.factory import make_method
from headway.comm.compress.topk_selection import top_k
from headway.errors import RunError
from headway.plans import parse_compression
from support.compressor_states import spread_states
from support.fused import CUTS, SHAPES, Buckets, draw_gradients, fuse, make_route
from support.ranks import ranks, run_ranks
from support.sampling import sampled

FEEDBACK = ["topk:0.05", "mstopk:0.05", "adaptive:0.05", "randomk:0.05", "sign", "powersgd:2"]
WHOLE = [*FEEDBACK, "int8"]
ALL = [*WHOLE, "none", "fp16", "bf16"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NO_FEEDBACK = {"none", "fp16", "bf16", "int8"}


def maker(text, seed=3):
    return lambda: make_method(parse_compression(text), seed=seed)


def test_the_lists_of_this_file_are_complete():
    assert {text.partition(":")[0] for text in ALL} == set(COMPRESSORS)
    for text in ALL:
        assert parse_compression(text).feedback is (text not in NO_FEEDBACK)


def summed(tensors, world):
    """The sum over the ranks, in float64."""
    total = {name: value.double() for name, value in tensors.items()}
    for name in sorted(total):
        dist.all_reduce(total[name], group=world.group)
    return total


def residuals(state):
    """Everything that has not been sent yet, by parameter."""
    found = {}
    for key, value in state.items():
        name, _, what = key.rpartition("/")
        if what in ("residual", "server"):
            found[name] = found.get(name, 0) + value.double()
    return found


@functools.cache
def all_gradients(step, size, dtype=torch.float64):
    """The sum over the ranks of `draw_gradients`, without asking them."""
    drawn = [draw_gradients(step, rank, dtype) for rank in range(size)]
    return {name: sum(one[name].double() for one in drawn) for name in SHAPES}


class Ledger:
    """What went in and what came out, by parameter, in float64."""

    def __init__(self):
        self.gradients = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        self.results = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}

    def enter(self, gradients, results):
        for name in SHAPES:
            self.gradients[name] += gradients[name]
            self.results[name] += results[name]

    def check(self, left, tolerance, what):
        """Sum of sent + residual = sum of gradients; arguments are sums over the ranks."""
        for name, total in self.gradients.items():
            kept = left.get(name, torch.zeros_like(total))
            error = (self.results[name] + kept - total).abs().max() / total.abs().max()
            assert error < tolerance, f"{what}, {name}: {error}"


# -- nothing is lost --------------------------------------------------------------------------


def law(world, dtype, tolerance):
    """50 steps; after 40 and 45 the state goes through a checkpoint into other buckets."""
    route = make_route(world)
    for text in FEEDBACK:
        ledger = Ledger()
        buckets = Buckets(maker(text), CUTS["one"])
        for step in range(50):
            if step in (40, 45):
                state = {k: v.clone() for k, v in buckets.state().items()}
                buckets = Buckets(maker(text), CUTS["three" if step == 40 else "other"])
                buckets.restore(state)
                for key, value in state.items():  # also before the first step after it
                    assert torch.equal(buckets.state()[key], value)
            gradients = draw_gradients(step, world.rank, dtype)
            results = buckets.exchange(gradients, route)
            ledger.enter(all_gradients(step, world.size, dtype), results)
        left = residuals(buckets.state())
        assert set(left) <= {name for name, shape in SHAPES.items() if not is_dense(shape)}
        assert left, text
        ledger.check(summed(left, world), tolerance, text)


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), sampled([(2, "float32", 1e-5), (3, "float64", 1e-12)], 1)
)
def test_what_was_sent_and_the_residual_are_the_sum_of_gradients(size, dtype, tolerance):
    run_ranks(size, law, getattr(torch, dtype), tolerance, timeout=100)


def shrink(world):
    """30 steps on four ranks, then on two, which take over the residuals of all."""
    route = make_route(world)
    pair = dist.new_group([0, 1])
    for text in FEEDBACK:
        ledger = Ledger()
        buckets = Buckets(maker(text), CUTS["one"])
        for step in range(30):
            gradients = draw_gradients(step, world.rank, torch.float64)
            results = buckets.exchange(gradients, route)
            ledger.enter(all_gradients(step, world.size), results)
        states = [None] * world.size
        dist.all_gather_object(states, buckets.state(), group=world.group)
        spread = spread_states(states, 2)
        before = [residuals(state) for state in states]
        after = [residuals(state) for state in spread]
        for name in before[0]:
            kept = sum(one[name] for one in after) - sum(one[name] for one in before)
            assert kept.abs().max() < 1e-12
        gradients = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        results, left = gradients, {}
        if world.rank < 2:
            small = Route((0, 1), world.rank, pair, route.nodes)
            buckets = Buckets(maker(text), CUTS["three"])
            buckets.restore(spread[world.rank])
            gradients = draw_gradients(99, world.rank, torch.float64)
            results = buckets.exchange(gradients, small)
            left = residuals(buckets.state())
        everywhere = {
            name: left.get(name, torch.zeros(shape).double()) for name, shape in SHAPES.items()
        }
        ledger.enter(summed(gradients, world), results)
        everywhere = summed(everywhere, world)
        if world.rank < 2:
            ledger.check(everywhere, 1e-12, text)


@pytest.mark.slow
def test_residuals_of_lost_ranks_are_taken_over():
    run_ranks(4, shrink)


@ranks(3)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(world):
    route = make_route(world)
    for text in ALL:
        straight, resumed = (Buckets(maker(text), CUTS["three"]) for _ in range(2))
        for step in range(6):
            if step == 3:
                state = resumed.state()
                resumed = Buckets(maker(text), CUTS["three"])
                resumed.restore(state)
            gradients = draw_gradients(step, world.rank)
            first, second = (b.exchange(gradients, route) for b in (straight, resumed))
            for name in SHAPES:
                assert torch.equal(first[name], second[name]), f"{text} {name} step {step}"


# -- all ranks agree --------------------------------------------------------------------------


def agree(world):
    route = make_route(world)
    for text, dtype in itertools.product(ALL, DTYPES):
        buckets = Buckets(maker(text), CUTS["three"])
        for step in range(4):
            results = buckets.exchange(draw_gradients(step, world.rank, dtype), route)
            flat = torch.cat([results[name].flatten() for name in SHAPES])
            assert flat.dtype == dtype
            assert flat.isfinite().all()
            rows = [torch.empty_like(flat) for _ in range(world.size)]
            dist.all_gather(rows, flat, group=world.group)
            for row in rows:
                assert torch.equal(row, flat), f"{text}, step {step}"


@pytest.mark.parametrize("size", sampled([1, 2, 3], 2))
def test_all_ranks_have_bitwise_the_same_result(size):
    run_ranks(size, agree)


@ranks(3)
def test_flags_are_above_zero_exactly_where_any_rank_used_the_parameter(world):
    """With gradients that dwarf them."""
    route = make_route(world)
    names = list(SHAPES)
    used = [[i % 7 == rank or i == 5 for i in range(len(names))] for rank in range(world.size)]
    expected = [any(column) for column in zip(*used, strict=True)]
    assert len(set(expected)) == 2
    for dtype in DTYPES:
        for text in ALL:
            gradients = {n: v * 1000 for n, v in draw_gradients(0, world.rank, dtype).items()}
            fused = fuse(gradients, names, flags=[float(one) for one in used[world.rank]])
            complete(maker(text)(), fused, route)
            assert (fused.flags > 0).tolist() == expected, f"{text} {dtype}"


@ranks(2)
def test_small_tensors_and_vectors_are_summed_whole(world):
    route = make_route(world)
    for text in FEEDBACK:
        gradients = draw_gradients(0, world.rank, torch.float64)
        results = Buckets(maker(text), CUTS["one"]).exchange(gradients, route)
        for name, total in summed(gradients, world).items():
            equal = torch.allclose(results[name], total, rtol=1e-14, atol=0)
            assert equal is is_dense(SHAPES[name]), f"{text} {name}"
    only = Buckets(maker("topk:0.01"), [["bias", "norm"]])
    gradients = draw_gradients(0, world.rank)
    only.exchange(gradients, route)
    assert only.state() == {}


# -- each one does what it says ---------------------------------------------------------------


@ranks(2)
def test_exact_selection_equals_its_reference_in_one_process(world):
    """Per rank and layer the largest of gradient + residual; computed here for both ranks."""
    route, name, k = make_route(world), "first", math.ceil(0.03 * 48 * 40)
    buckets = Buckets(maker("topk:0.03"), [["bias", name]])
    left = [torch.zeros(48 * 40, dtype=torch.float64) for _ in range(2)]
    for step in range(5):
        expected = torch.zeros(48 * 40, dtype=torch.float64)
        for rank in range(2):
            left[rank] += draw_gradients(step, rank, torch.float64)[name].flatten()
            places = top_k(left[rank], k)
            expected[places] += left[rank][places]
            left[rank][places] = 0
        gradients = draw_gradients(step, world.rank, torch.float64)
        result = buckets.exchange(gradients, route)[name]
        assert torch.equal(result.flatten(), expected)
    assert torch.equal(buckets.state()[f"{name}/residual"].flatten(), left[world.rank])


@ranks(2)
def test_how_parameters_are_fused_changes_no_result(world):
    """Not for int8, whose blocks begin elsewhere."""
    route = make_route(world)
    for text in [*FEEDBACK, "none", "fp16", "bf16"]:
        kinds = [Buckets(maker(text), cut) for cut in CUTS.values() if text[:5] != "adapt"]
        for step in range(3):
            gradients = draw_gradients(step, world.rank, torch.float64)
            results = [kind.exchange(gradients, route) for kind in kinds]
            for other in results[1:]:
                for name in SHAPES:
                    torch.testing.assert_close(
                        other[name], results[0][name], rtol=1e-12, atol=1e-12, msg=text
                    )


@ranks(3)
def test_random_places_are_the_same_on_all_ranks_and_new_in_each_step(world):
    route = make_route(world)
    buckets = Buckets(maker("randomk:0.02"), CUTS["one"])
    seen = []
    for step in range(2):
        result = buckets.exchange(draw_gradients(step, world.rank), route)["first"]
        assert int((result != 0).sum()) == math.ceil(0.02 * result.numel())
        seen.append(result != 0)
    assert not torch.equal(*seen)


@ranks(2)
def test_adaptive_moves_its_budget_to_the_larger_layers(world):
    """Two layers, one 10 times larger in magnitude; the total stays that of topk."""
    route = make_route(world)
    shapes = {"loud": (50, 50), "soft": (50, 50)}
    method = maker("adaptive:0.02")()
    pieces, counts = None, []
    for step in range(12):
        gradients = draw_gradients(step, world.rank, torch.float64, shapes)
        gradients["loud"] *= 10 / gradients["loud"].std()
        gradients["soft"] *= 1 / gradients["soft"].std()
        fused = fuse(gradients, list(shapes))
        fused.pieces = pieces = pieces or fused.pieces
        complete(method, fused, route)
        counts.append(tuple(method._counts))
    assert all(sum(count) == 100 for count in counts)
    assert counts[0] == (50, 50)
    assert counts[-1][0] > 70
    assert counts[-1][1] >= 12  # a quarter of its even share: no layer starves


def unbiased(world):
    """The mean over 200 roundings is the sum: squared standard errors are 1 on average."""
    route = make_route(world)
    gradients = {"w": draw_gradients(0, world.rank)["embed"]}
    exact = summed(gradients, world)["w"]
    method = maker("int8")()
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    fused = fuse(gradients, ["w"])
    for _ in range(200):
        fused.buffer.copy_(fuse(gradients, ["w"]).buffer)
        complete(method, fused, route)
        error = fused.gradients.double().view(exact.shape) - exact
        total += error
        squares += error.square()
    rounded = squares > 0
    # Of 1440 independent elements: 1 with a standard deviation of 0.04.
    deviation = float((total.square()[rounded] / squares[rounded]).mean())
    assert 0.8 < deviation < 1.2, deviation
    # The largest of its block is a whole number of steps; nearly all others are rounded.
    assert rounded.double().mean() > 0.98
    step = exact.abs().max() / 127 * (1 if world.size == 2 else 2)
    assert squares.max().sqrt() / 200**0.5 < 2 * step


@pytest.mark.parametrize("size", sampled([2, 3], 1))
def test_int8_rounds_without_bias(size):
    run_ranks(size, unbiased)


@ranks(2)
def test_ranks_round_independently(world):
    """The same block on both: the sum of two equal roundings would be an even number of steps."""
    values = draw_gradients(0, 0)["embed"].flatten()[:256].view(16, 16)
    fused = fuse({"w": values}, ["w"])
    complete(maker("int8")(), fused, make_route(world))
    steps = fused.gradients / (values.abs().max() / 126.9999)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert (steps.round() % 2 == 1).any()


@ranks(2)
def test_int8_survives_what_a_block_can_hold(world):
    """Zero blocks, tiny and huge values, more than one stretch of working memory, and so many bytes
    that two ranks gather them in parts."""
    route = make_route(world)
    values = torch.zeros(300, 700)
    assert values.numel() > LARGE
    values[0, :10] = 1e-38
    values[100] = 1e30
    values[299, -1] = -3.0
    fused = fuse({"w": values}, ["w"])
    complete(maker("int8")(), fused, route)
    result = fused.gradients.view(300, 700)
    assert result.isfinite().all()
    assert (result[1:99] == 0).all()
    torch.testing.assert_close(result[100], torch.full((700,), 2e30), rtol=0.02, atol=0)
    assert result[299, -1].item() == pytest.approx(-6.0, rel=0.02)


@ranks(2)
def test_sign_sends_the_mean_magnitude_with_the_sign(world):
    gradient = draw_gradients(0, world.rank, torch.float64)["conv"]
    method = maker("sign")()
    fused = fuse({"w": gradient}, ["w"])
    complete(method, fused, make_route(world))
    own = gradient.sign() * gradient.abs().mean().float().double()
    dist.all_reduce(own, group=world.group)
    torch.testing.assert_close(fused.gradients.view_as(own), own, rtol=1e-12, atol=1e-12)


@ranks(3)
def test_fp16_sums_what_would_overflow_and_keeps_its_precision(world):
    route = make_route(world)
    gradients = {"w": torch.full((4, 4), 60000.0), "v": torch.tensor([1.0, 1e-3, -3e-5])}
    fused = fuse(gradients, ["w", "v"])
    complete(maker("fp16")(), fused, route)
    assert fused.buffer[:16].tolist() == pytest.approx([180000.0] * 16, rel=1e-3)
    assert fused.buffer[16:19].tolist() == pytest.approx([3.0, 3e-3, -9e-5], rel=5e-3)
    fused = fuse({"w": torch.full((4, 4), 1e30)}, ["w"])
    complete(maker("bf16")(), fused, route)
    assert fused.buffer[:16].tolist() == pytest.approx([3e30] * 16, rel=0.01)


@ranks(2)
def test_chunks_of_elementwise_compressors_fly_together(world):
    route = make_route(world)
    for text in ("none", "fp16", "bf16"):
        whole = fuse(draw_gradients(0, world.rank), list(SHAPES))
        cut = FusedBuffer(whole.buffer.clone())
        complete(maker(text)(), whole, route)
        method = maker(text)()
        assert method.elementwise
        for _ in range(2):  # the second time with buffers that are used again
            buffer = cut.buffer.clone()
            flying = [method.rounds(FusedBuffer(part), route) for part in buffer.split(1000)]
            waiting = [next(rounds) for rounds in flying]
            for work, rounds in zip(waiting, flying, strict=True):
                work.wait()
                assert next(rounds, None) is None
        assert torch.equal(buffer, whole.buffer), text


@ranks(2)
def test_powersgd_is_exact_where_the_rank_suffices(world):
    """The ranks' matrices of rank 2 share their columns; one power iteration finds them all."""
    route, rank2 = make_route(world), torch.Generator().manual_seed(0)
    left = torch.randn(60, 2, generator=rank2, dtype=torch.float64)
    right = torch.randn(2, 2, 80, generator=rank2, dtype=torch.float64)
    gradient = left @ right[world.rank]
    method = maker("powersgd:2")()
    fused = fuse({"w": gradient}, ["w"])
    complete(method, fused, route)
    exact = left @ right.sum(0)
    torch.testing.assert_close(fused.gradients.view(60, 80), exact, rtol=1e-12, atol=1e-12)
    assert method.state()["w/residual"].abs().max() < 1e-12


@ranks(2)
def test_powersgd_warms_up_and_recovers_from_nothing(world):
    """The same gradient of rank 3, after a step of zeros: residuals send what rank 1 leaves."""
    route, method = make_route(world), maker("powersgd:1")()
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(40, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    gradient = left @ right.T
    sums, errors = torch.zeros_like(gradient), []
    fused = fuse({"w": gradient}, ["w"])
    for step in range(31):
        fused.buffer.copy_(fuse({"w": gradient * (step > 0)}, ["w"]).buffer)
        complete(method, fused, route)
        sums += fused.gradients.view_as(sums)
        errors.append(float((sums - 2 * step * gradient).norm() / (max(step, 1) * 2)))
    assert errors[-1] < 0.2 * errors[3]
    assert errors[3] < errors[1]


@ranks(2)
def test_what_cannot_be_compressed_is_refused(world):
    route = make_route(world)
    for text in ALL[:-3]:
        with pytest.raises(RunError, match="chunk of a bucket"):
            complete(maker(text)(), FusedBuffer(torch.ones(10)), route)
    for text in [*WHOLE, "fp16", "bf16"]:
        fused = fuse({"w": torch.ones(40, 40, dtype=torch.complex64)}, ["w"])
        with pytest.raises(RunError, match="complex64"):
            complete(maker(text)(), fused, route)
    method = maker("topk:0.01")()
    fused = fuse({"w": torch.full((40, 40), math.nan)}, ["w"])
    with pytest.raises(RunError, match="gradient of w: a gradient is NaN"):
        next(method.rounds(fused, route))


@ranks(1)
def test_other_pieces_in_the_same_bucket_move_the_state_by_name(world):
    """As DDP does after its first step."""
    route, method = make_route(world), maker("topk:0.01")()
    complete(method, fuse(draw_gradients(0, 0), ["embed", "first"]), route)
    before = method.state()
    complete(
        method,
        fuse({n: torch.zeros(SHAPES[n]) for n in ("wide", "first")}, ["wide", "first"]),
        route,
    )
    after = method.state()
    assert set(after) == {"wide/residual", "wide/step", "first/residual", "first/step"}
    sent = (before["first/residual"] - after["first/residual"]).count_nonzero()
    assert sent == math.ceil(0.01 * 48 * 40)


# -- bytes ------------------------------------------------------------------------------------


def whole(handed):
    """Gathers in parts, taken together."""
    found = []
    for name, size in handed:
        if found and name == found[-1][0] == "all_gather":
            size += found.pop()[1]
        found.append((name, size))
    return found


def count_bytes(world):
    """What reaches torch.distributed, against the arithmetic of the pure plane."""
    handed = []
    kinds = dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), "all_gather")
    kinds |= {"all_gather": "all_gather", "all_to_all_single": "all_to_all"}
    true = {name: getattr(dist, name) for name in kinds if hasattr(dist, name)}

    def spy(name, place):
        def call(*arguments, **named):
            payload = arguments[place]
            handed.append((kinds[name], payload.numel() * payload.element_size()))
            return true[name](*arguments, **named)

        return call

    for name in true:
        setattr(dist, name, spy(name, 1))
    all_reduce = dist.ProcessGroup.allreduce

    def spied(group, tensors, *arguments):
        handed.extend(("all_reduce", tensor.numel() * tensor.element_size()) for tensor in tensors)
        return all_reduce(group, tensors, *arguments)

    dist.ProcessGroup.allreduce = spied
    route = make_route(world)
    shapes = SHAPES | {"large": (700, 300)}  # so large that two ranks gather it in parts
    texts = [*ALL, "topk:0.3", "randomk:1", "powersgd:5"]
    for dtype, text in itertools.product(DTYPES, texts):
        compression = parse_compression(text)
        gradients = draw_gradients(0, world.rank, dtype, shapes)
        for names in [*CUTS["other"], *CUTS["one"], ["large", "bias"]]:
            fused = fuse(gradients, names)
            method = maker(text)()
            for _ in range(2):
                handed.clear()
                complete(method, fused, route)
                planned = compression.payloads(
                    [shapes[name] for name in names], dtype.itemsize, world.size
                )
                expected = [(part.operation, part.num_bytes) for part in planned]
                assert whole(handed) == expected, f"{text} {dtype} {names}"


@pytest.mark.parametrize("size", sampled([2, 3], 1))
def test_payloads_are_those_of_the_plan(size):
    run_ranks(size, count_bytes)


# -- what it is for ---------------------------------------------------------------------------


def regression(world, text, feedback):
    """Logistic regression on data whose features have very different sizes; the final loss."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(256, 1200, generator=draw, dtype=torch.float64)
    x *= torch.logspace(0, -1, 1200, dtype=torch.float64)
    y = (x @ torch.randn(1200, generator=draw, dtype=torch.float64) > 0).double()
    own = slice(world.rank, None, world.size)
    weight = torch.zeros(1, 1200, dtype=torch.float64, requires_grad=True)
    loss_of = nn.BCEWithLogitsLoss(reduction="sum")
    route, method = make_route(world), maker(text)()
    for _ in range(150):
        weight.grad = None
        (loss_of((x[own] @ weight.T)[:, 0], y[own]) / 256).backward()
        fused = fuse({"w": weight.grad}, ["w"])
        if not feedback:
            method = maker(text)()
        complete(method, fused, route)
        with torch.no_grad():
            weight -= 0.5 * fused.gradients.view_as(weight)
    return float(loss_of((x @ weight.detach().T)[:, 0], y) / 256)


def compare(world):
    return {
        (text, feedback): regression(world, text, feedback)
        for text in ("none", "topk:0.01", "mstopk:0.01", "adaptive:0.01", "sign")
        for feedback in ((True, False) if text != "none" else (True,))
    }


@pytest.mark.slow
def test_density_of_one_percent_reaches_the_dense_loss_with_feedback_only():
    first, second = run_ranks(2, compare)
    assert first == second
    dense = first["none", True]
    assert dense < 0.05
    for (text, feedback), loss in first.items():
        if feedback:
            assert loss < 1.02 * dense, text
        else:
            assert loss > (1.5 if text == "sign" else 10) * dense, text
