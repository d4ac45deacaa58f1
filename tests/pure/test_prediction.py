"""pure: predictions: in plan files, in progress lines, in the report; the paces they rest on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from headway.cli.terminal.progress import (
    Progress,
    compare_with_prediction,
    describe_event,
    read_prediction,
)
from headway.cluster import Cluster, read_cluster, to_toml
from headway.cluster.device import (
    CORE_CACHE_BYTES,
    UPDATE_TENSOR_SIZES,
    Device,
    HostOverhead,
    KernelPace,
    OptimizerPace,
)
from headway.cluster.local_machine import fingerprint, fingerprint_differences
from headway.cluster.measurement import DeviceReadings, KernelTiming
from headway.cost.cluster_fit import device_of_kernels, fit_paces, fit_terms
from headway.cost.device import DeviceModel
from headway.graph.model_graph import Kernel, Operator, Work
from headway.planner.estimate.operators import measured_seconds
from headway.plans import PipelinePlan, Plan, data_parallel, pipelined
from headway.plans.prediction import Prediction
from headway.report.page.sections import predicted_spans

PARTS = {"compute": 0.06, "exchange": 0.03, "update": 0.01}
EXPECTED = Prediction(seconds=0.1, parts=PARTS, stages=(0.06,), cluster="abc", version="1")


def test_a_prediction_travels_with_the_plan_and_not_in_its_hash(tmp_path):
    plain = data_parallel(64, processes=2)
    told = dataclasses.replace(plain, prediction=EXPECTED)
    assert told.hash == plain.hash
    told.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == told


def test_lines_show_predicted_beside_measured():
    start = {"event": "start", "step": 0, "steps": 10, "predicted": dataclasses.asdict(EXPECTED)}
    rank = {"event": "rank_step", "step": 1, "seconds": 0.125, "compute": 0.08, "exposed": 0.04,
            "update": 0.005}  # fmt: skip
    step = {"event": "step", "step": 1, "loss": 2.0, "samples": 64, "seconds": 0.125}
    progress = Progress().after(start).after(rank).after(step)
    text = describe_event(step, progress)
    assert "step 125 ms (predicted 100 ms, -20%; " in text
    assert "compute 80 ms/60 ms, wait 40 ms/30 ms, update 5 ms/10 ms)" in text
    twice = {**start, "predicted": {**start["predicted"], "seconds": 0.2}}
    assert "predicted 200 ms, +60%" in describe_event(step, Progress().after(twice).after(step))
    assert "predicted" not in describe_event(step, Progress().after({**start, "predicted": None}))
    assert compare_with_prediction(read_prediction(None), 1.0, []) == ""


def test_the_predicted_timeline_ends_with_the_predicted_step():
    plan = dataclasses.replace(data_parallel(64, processes=2), prediction=EXPECTED)
    spans = predicted_spans(plan)
    assert {span.rank for span in spans} == {0, 1}
    assert max(span.end for span in spans) == pytest.approx(EXPECTED.seconds)


def test_the_predicted_timeline_of_a_pipeline_is_its_table():
    plan = pipelined(
        8, processes=2, stages=2, pipeline=PipelinePlan(schedule="gpipe", microbatches=4)
    )
    slowest, whole, m = 0.02, 0.035, 4
    seconds = whole + (m - 1) * slowest + 0.005
    told = Prediction(
        seconds=seconds, parts={"compute": m * slowest, "update": 0.005}, stages=(0.02, 0.015)
    )
    spans = predicted_spans(dataclasses.replace(plan, prediction=told))
    assert max(span.end for span in spans) == pytest.approx(seconds)
    done = [span for span in spans if span.rank == 1 and span.kind in ("forward", "backward")]
    assert sum(span.seconds for span in done) == pytest.approx(4 * 0.015)


def test_a_fingerprint_names_what_differs():
    here = fingerprint(device="cpu", ranks=2, threads=1)
    assert list(fingerprint_differences({**here, "date": "2020-01-01"}, here)) == []
    other = {**here, "torch": "1.0", "ranks": "4"}
    assert list(fingerprint_differences(other, here)) == [
        f"torch: 1.0 there, {here['torch']} here",
        "ranks: 4 there, 2 here",
    ]
    assert (
        len(list(fingerprint_differences({}, here))) == len(here) - 1
    )  # nothing said is not the same


def test_what_was_measured_survives_the_file(tmp_path):
    device = Device(
        peak={"fp32": 1e11},
        memory=2.0**30,
        memory_rate=1e10,
        overlap=0.25,
        kinds={"conv2d": KernelPace(forward=5e10, backward_stream=2e9), "relu": KernelPace()},
        updates={"AdamW fused": OptimizerPace(small=8e-9, middle=2e-9, large=5e-10)},
        host=HostOverhead(step=2e-3, microbatch=1e-3, tensor=3e-6, piped_step=3e-3),
    )
    cluster = dataclasses.replace(
        Cluster.of(1, 2), devices={"cpu": device}, measured={"torch": "2.13", "ranks": "2"}
    )
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster))
    assert read_cluster(path) == cluster


def test_known_paces_are_found_again():
    draw = np.random.default_rng(3)
    flops, moved = 10 ** draw.uniform(6, 9, 8), 10 ** draw.uniform(5, 8, 8)
    floor = 5e-6
    timed = [
        KernelTiming(
            kind="conv2d",
            forward=(f, b, f / 8e10 + b / 4e9 + floor),
            backward=(2 * f, 2 * b, 2 * f / 5e10 + 2 * floor),
        )
        for f, b in zip(flops, moved, strict=True)
    ]
    timed.append(KernelTiming(kind="relu", forward=(0.0, 1e6, 1e-4), backward=(0.0, 2e6, 4e-4)))
    found, words = fit_paces(timed, floor)
    conv = found["conv2d"]
    assert (conv.forward, conv.forward_stream) == pytest.approx((8e10, 4e9), rel=0.2)
    assert conv.backward == pytest.approx(5e10, rel=0.2)
    assert found["relu"].forward is None
    assert found["relu"].forward_stream == pytest.approx(1e6 / 0.95e-4, rel=1e-3)
    assert words.startswith("fit error ")


def test_a_call_and_weights_are_terms_of_their_own():
    draw = np.random.default_rng(5)
    shapes = 10 ** draw.uniform((6, 5, 4), (9, 8, 7), (16, 3))
    timed = [
        KernelTiming(
            kind="linear",
            forward=(f, a + w, 3e-4 + f / 8e10 + a / 4e9 + w / 1e9),
            backward=(2 * f, a + w, 2 * f / 5e10 + (a + w) / 2e9),
            weights=(w, w),
        )
        for f, a, w in shapes.tolist()
    ]
    found, _ = fit_paces(timed, 0.0)
    pace = found["linear"]
    ahead = (pace.forward, pace.forward_stream, pace.forward_weights, pace.forward_call)
    assert ahead == pytest.approx((8e10, 4e9, 1e9, 3e-4), rel=1e-3)
    assert (pace.backward, pace.backward_stream) == pytest.approx((5e10, 2e9), rel=1e-3)
    assert pace.backward_weights is None  # no slower than other bytes
    assert pace.call(backward=True) == 0.0
    f, a, w = shapes[0].tolist()
    assert pace.seconds(f, a, w, backward=False) + pace.call(backward=False) == pytest.approx(
        timed[0].forward[2], rel=1e-3
    )
    assert pace.seconds(0.0, 0.0, 2e9, backward=True) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_shapes_do_not_make_many_terms(count):
    """As many terms as times would go through all of them, and through their errors."""
    seconds = (1.1e-4, 9e-4, 1.1e-2)  # 1 GB/s, 10 % more or less
    misses = []
    terms = fit_terms(
        [(0.0, 10.0 ** (5 + n), 10.0**n, 1, s) for n, s in enumerate(seconds[:count])], misses
    )
    assert sum(term is not None for term in terms) == 1
    assert terms.stream == pytest.approx(1e9, rel=0.12)
    assert len(misses) == count


def test_cells_of_a_layer_are_called_one_after_the_other():
    """A layer of 20 places and one of 5 with the same FLOPs: 15 calls are between them."""
    timed = [
        KernelTiming(
            kind="gru",
            forward=(flops, 1.0, calls * 4e-5 + flops / 2e10),
            backward=(2 * flops, 1.0, calls * 9e-5 + 2 * flops / 3e10),
            calls=calls,
        )
        for flops, calls in ((1e6, 5), (1e7, 20), (1e7, 5), (4e7, 12), (1e6, 30))
    ]
    pace = fit_paces(timed, 0.0)[0]["gru"]
    assert (pace.forward_call, pace.backward_call) == pytest.approx((4e-5, 9e-5), rel=1e-3)
    device = dataclasses.replace(DEVICE, kinds={"gru": pace})

    def ahead(calls):
        layer = Operator(name="gru", kind="gru", flops=Work(forward=10**7), traffic=Work(forward=1))
        layer = dataclasses.replace(layer, calls=calls)
        return measured_seconds(device, layer, 0.0, dtype="fp32", scale=1.0)[0]

    assert ahead(20) - ahead(5) == pytest.approx(15 * 4e-5, rel=1e-3)


def test_what_computes_has_a_rate_though_weights_grow_like_flops():
    points = [(1e9 * n * (1.1, 0.9)[n % 3 == 1], 1e5, 1e5 * n, 1, 1e-2 * n) for n in (1, 2, 4, 8)]
    assert fit_terms(points, [], peak=1.5e11).rate == pytest.approx(1.2e11, rel=0.3)


def test_what_a_cache_does_not_hold_takes_longer():
    def seconds(moved):
        return 4e-6 + moved / 2e10 + max(0, moved - CORE_CACHE_BYTES) / 5e9

    points = [(0.0, moved, 0.0, 1, seconds(moved)) for moved in (1e4, 6e5, 3e6, 1.2e7, 2e7)]
    terms = fit_terms(points, [])
    assert (terms.stream, terms.far, terms.call) == pytest.approx((2e10, 5e9, 4e-6), rel=1e-3)
    device = dataclasses.replace(
        DEVICE, kinds={"relu": KernelPace(forward_stream=2e10, forward_far=5e9)}
    )
    relu = Operator(name="relu", kind="relu", traffic=Work(forward=10**7))

    def ahead(scale, **more):
        return measured_seconds(device, relu, 0.0, dtype="fp32", scale=scale, **more)[0]

    assert ahead(2.0) == pytest.approx(seconds(2e7) - 4e-6)
    assert ahead(2.0, parts=2) == pytest.approx(seconds(1e7) - 4e-6)
    assert ahead(2.0, moved_weights=0.0) == 2 * ahead(1.0, moved_weights=0.0)  # a bound


def test_nothing_computes_faster_than_products_at_their_best():
    shapes = [(1e7, 2e4), (1e8, 9e5), (4e8, 1e6), (1e9, 5e6), (2e9, 9e6)]
    points = [(f, 1e5, w, 1, w / 3e8 + f / 2e11) for f, w in shapes]
    assert fit_terms(points, []).rate == pytest.approx(2e11, rel=1e-3)
    assert fit_terms(points, [], peak=9e10).rate <= 9e10 * 1.001


def test_kinds_without_a_pace_have_the_nearest_one():
    grouped = Operator(name="c", kind="conv1d", attributes={"groups": 4}, flops=Work(forward=10**8))
    (kernel,) = grouped.kernels
    assert kernel.kind == "conv1d grouped"
    slow, fast = KernelPace(forward=1e9), KernelPace(forward=1e10)

    def ahead(**kinds):
        names = {name.replace("_", " "): pace for name, pace in kinds.items()}
        device = dataclasses.replace(DEVICE, kinds=names)
        return measured_seconds(device, grouped, 0.0, dtype="fp32", scale=1.0)[0]

    assert ahead(conv2d=fast) == pytest.approx(1e-2)
    assert ahead(conv2d=fast, conv2d_grouped=slow) == pytest.approx(1e-1)
    assert ahead(conv2d_grouped=fast, conv1d_grouped=slow) == pytest.approx(1e-1)


DEVICE = DeviceModel(
    name="one",
    peak={"fp32": 1e11},
    memory=2.0**34,
    memory_rate=1e10,
    efficiency=1.0,
    depth=0.0,
    kinds={
        "linear": KernelPace(forward=1e11, forward_stream=5e9, backward=8e10, backward_stream=4e9),
        "gelu": KernelPace(forward_stream=2e9, backward_stream=1e9),
    },
)


def work(kind, forward, moved):
    return Kernel(
        kind=kind,
        flops=Work(forward=forward, input_gradient=forward, weight_gradient=forward),
        traffic=Work(forward=moved, input_gradient=moved, weight_gradient=moved if forward else 0),
    )


def test_a_folded_operator_costs_the_sum_of_its_kernels():
    rows, width = 64, 256
    flops, moved = 2 * rows * width * width, 4 * (2 * rows * width + width * width)
    linear, gelu = work("linear", flops, moved), work("gelu", 0, 8 * rows * width)
    operator = Operator(name="a", kind="linear", folded=(linear, gelu))
    own = 4.0 * width * width
    forward, backward = measured_seconds(DEVICE, operator, own, dtype="fp32", scale=1.0)
    assert forward == pytest.approx(flops / 1e11 + moved / 5e9 + 8 * rows * width / 2e9)
    assert backward == pytest.approx(2 * flops / 8e10 + 2 * moved / 4e9 + 8 * rows * width / 1e9)
    # In a format with half the peak products compute twice as long and move as much.
    device = dataclasses.replace(DEVICE, peak={"fp32": 1e11, "fp64": 5e10})
    slower, _ = measured_seconds(device, operator, own, dtype="fp64", scale=1.0)
    assert slower == pytest.approx(forward + flops / 1e11)
    # A quarter of the samples: more than a quarter of the time, as weights are read all the same.
    less, _ = measured_seconds(DEVICE, operator, own, dtype="fp32", scale=0.25)
    assert less > forward / 4
    bound = [
        measured_seconds(DEVICE, operator, own, dtype="fp32", scale=s, moved_weights=0.0)[0]
        for s in (0.25, 1.0, 4.0)
    ]
    assert bound[0] * 4 == pytest.approx(bound[1])
    assert bound[1] * 4 == pytest.approx(bound[2])
    assert all(b <= f for b, f in zip(bound[:2], (less, forward), strict=True))


def test_calls_are_neither_split_nor_scaled():
    """A part of an operator is called like the whole, and so are fewer samples."""
    pace = KernelPace(forward=1e11, forward_call=1e-3, backward=1e11, backward_call=2e-3)
    device = dataclasses.replace(DEVICE, kinds={"conv2d": pace})
    one = Operator(name="a", kind="conv2d", folded=(work("conv2d", 10**9, 10**6),))
    line = dataclasses.replace(one, folded=(work("conv1d", 10**9, 10**6),))
    for parts, scale in ((1, 1.0), (4, 1.0), (1, 0.125)):
        for operator in (one, line):
            forward, backward = measured_seconds(
                device, operator, 0.0, dtype="fp32", scale=scale, parts=parts
            )
            assert forward == pytest.approx(1e-2 * scale / parts + 1e-3)
            assert backward == pytest.approx(2e-2 * scale / parts + 2e-3)
    bound, _ = measured_seconds(device, one, 0.0, dtype="fp32", scale=1.0, moved_weights=0.0)
    assert bound == pytest.approx(1e-2)


def test_a_table_is_read_by_its_samples():
    """Forward moves the rows that samples choose, however many the table has."""
    device = dataclasses.replace(
        DEVICE, kinds={"embedding": KernelPace(forward_stream=1e9, backward_stream=1e9)}
    )
    kernel = Kernel(kind="embedding", traffic=Work(forward=10**6, weight_gradient=10**8))
    table = Operator(name="a", kind="embedding", folded=(kernel,))
    times = [measured_seconds(device, table, 8e7, dtype="fp32", scale=s) for s in (1.0, 4.0)]
    assert times[1][0] == pytest.approx(4 * times[0][0])
    assert times[0][1] == pytest.approx(0.1)
    assert times[1][1] == pytest.approx(0.08 + 4 * 0.02)  # the gradient has all rows


def test_updates_follow_the_sizes_of_tensors():
    small, middle, large = UPDATE_TENSOR_SIZES
    update = OptimizerPace(small=30e-9, middle=8e-9, large=6e-9)
    assert update.seconds(small) == pytest.approx(small * 30e-9)
    assert update.seconds(10) == update.seconds(small)  # nothing but launches
    assert update.seconds(middle) == pytest.approx(middle * 8e-9)
    assert update.seconds(16 * large) == pytest.approx(16 * large * 6e-9)
    between = round((middle * large) ** 0.5)
    assert update.seconds(between) == pytest.approx(between * 7e-9, rel=1e-3)


def test_a_known_device_is_found_again():
    def seconds(m, n, k):
        return 2.0 * m * n * k / 1e11 * (1 + 20.0 / k)

    depths = (32, 128, 512)
    found = DeviceReadings(
        name="cpu",
        adds=True,
        products={"fp32": tuple((512, 512, k, seconds(512, 512, k)) for k in depths)},
        streams=((1e6, 1e-4), (1e7, 1e-3)),
        dispatch=0.0,
        kernel=0.0,
        updates={"AdamW": (9e-9, 6e-9, 5e-9), "clip": (3e-9, 2e-9, 1e-9)},
        overlap=0.123456,
        memory=2.0**30,
        spread=1.0,
        kinds=(KernelTiming(kind="relu", forward=(0.0, 1e6, 1e-4), backward=(0.0, 2e6, 4e-4)),),
    )
    device = device_of_kernels(found, "today")
    assert device.depth == pytest.approx(20.0, rel=1e-3)
    assert device.overlap == 0.12
    assert device.update == pytest.approx(6e-9)
    assert device.updates["clip"] == OptimizerPace(small=3e-9, middle=2e-9, large=1e-9)
    assert device.kinds["relu"].backward_stream == pytest.approx(5e9)
    assert device.source["kinds"].startswith(
        "measured today: several shapes of each in small steps, fit error "
    )
