"""pure: graphs as data: indices, checks, files, cuts, blocks, folding, legal splits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.documents import read_document
from headway.errors import DocumentError, PlanError
from headway.graph.aten.flops import flops_of, traffic_of
from headway.graph.aten.index_expression import OperatorCall
from headway.graph.aten.operator_axes import axes_of
from headway.graph.model_graph import (
    LoopAxis,
    ModelGraph,
    Operator,
    OperatorAxes,
    Saved,
    TensorSpec,
    Window,
    Work,
    common_factors,
    format_index,
    locate_axis,
    matching_runs,
    parse_index,
)
from headway.graph.operator_fusion import fuse_light_operators
from headway.graph.operator_registry import OPERATORS
from headway.graph.repeated_blocks import find_repeated_blocks
from headway.graph.sharding_rules import enumerate_rules
from headway.graph.stage_boundaries import cut_points


def spec(*shape, dtype="float32"):
    return TensorSpec(shape=shape, dtype=dtype)


def operator(graph, kind, inputs, shape, *, roles=(), module="", attributes=None, name=None):
    """One more operator at the end of a graph, as a capture would write it."""
    name = name or f"op{len(graph.operators)}"
    sources = tuple(graph.tensors[tensor] for tensor in inputs)
    roles = roles or ("self", "other", "third")[: len(inputs)]
    call = OperatorCall(
        kind=kind,
        roles=tuple(roles),
        inputs=sources,
        outputs=(spec(*shape),),
        attributes=attributes or {},
    )
    trained = tuple(tensor in graph.parameters for tensor in inputs)
    needs = (True,) * len(inputs)
    found = Operator(
        name=name,
        kind=kind,
        inputs=tuple(inputs),
        roles=tuple(roles),
        outputs=(name,),
        parameters=tuple(t for t in inputs if t in graph.parameters),
        module=module,
        axes=axes_of(call),
        flops=flops_of(call, needs, trained),
        traffic=traffic_of(call, needs, trained, view=False),
        saved=tuple(Saved(name=t, bytes=graph.tensors[t].bytes) for t in inputs),
        attributes=attributes or {},
    )
    return replace(
        graph,
        operators=(*graph.operators, found),
        values=graph.values | {name: spec(*shape)},
        outputs=(name,),
    )


def perceptron(layers=3):
    """x [8, 16]; per layer: linear, relu, sum with what came in."""
    weights = {f"layers.{n}.weight": spec(16, 16) for n in range(layers)}
    graph = ModelGraph(operators=(), inputs={"x": spec(8, 16)}, parameters=weights)
    stream = "x"
    for n in range(layers):
        module = f"layers.{n}"
        graph = operator(
            graph, "linear", [stream, f"{module}.weight"], (8, 16),
            roles=("input", "weight"), module=module,
        )  # fmt: skip
        graph = operator(graph, "relu", [graph.outputs[0]], (8, 16), module=module)
        graph = operator(graph, "add", [graph.outputs[0], stream], (8, 16), module=module)
        stream = graph.outputs[0]
    graph.check()
    return graph


# -- indices ---------------------------------------------------------------------------------------


def test_an_index_and_its_text():
    dims = parse_index("b s h*k 1")
    assert dims == (("b",), ("s",), ("h", "k"), ())
    assert format_index(dims) == "b s h*k 1"
    assert locate_axis(dims, "k", {"h": 4, "k": 8}) == (2, 4)
    assert locate_axis(dims, "h", {"h": 4, "k": 8}) == (2, 1)
    assert locate_axis(dims, "v", {}) is None


def test_factors_of_two_groupings():
    assert common_factors([6, 4], [2, 12]) == [2, 3, 4]
    assert common_factors([4, 6], [3, 8]) is None
    assert common_factors([8], [8]) == [8]


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_segments_of_a_reshape_have_equal_products(factors, data):
    cut = data.draw(st.integers(0, len(factors)))
    first = (*factors[:cut], _product(factors[cut:]))
    second = (_product(factors[:cut]), *factors[cut:])
    for left, right in matching_runs(first, second):
        assert _product(first[d] for d in left) == _product(second[d] for d in right)
    used = [d for left, _ in matching_runs(first, second) for d in left]
    assert used == [d for d, size in enumerate(first) if size > 1]


def _product(numbers):
    result = 1
    for number in numbers:
        result *= number
    return result


# -- checks and files ------------------------------------------------------------------------------


def test_all_problems_of_a_graph_come_at_once():
    graph = perceptron(1)
    first = graph.operators[0]
    wrong = replace(
        graph,
        operators=(
            replace(first, inputs=("y", "layers.0.weight")),
            first,
            replace(first, name="other", outputs=("z",)),
        ),
        outputs=("nothing",),
    )
    with pytest.raises(PlanError, match="cannot exist") as caught:
        wrong.check()
    assert caught.value.problems == (
        "op0 uses y, which nothing has made",
        "two operators are called op0",
        "op0 makes op0, which is there already",
        "other makes z, of which no shape is given",
        "the result nothing is not made",
    )


def test_an_index_that_does_not_fit_is_found():
    graph = perceptron(1)
    first = graph.operators[0]
    short = replace(first.axes, inputs=("x0", "o k"))
    wrong = replace(graph, operators=(replace(first, axes=short), *graph.operators[1:]))
    with pytest.raises(PlanError) as caught:
        wrong.check()
    assert caught.value.problems == ("op0: x has shape (8, 16), its index is 'x0'",)


def test_a_file_and_back(tmp_path):
    graph = perceptron()
    path = tmp_path / "graph.json"
    path.write_text(graph.to_json())
    assert read_document(path, ModelGraph) == graph
    assert read_document(path, ModelGraph).hash == graph.hash
    assert replace(graph, outputs=("x",)).hash != graph.hash


def test_a_file_with_problems(tmp_path):
    data = json.loads(perceptron(1).to_json())
    data["operators"][0]["axis"] = data["operators"][0].pop("axes")
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DocumentError, match=r"unknown key operators\.0\.axis; did you mean axes"):
        read_document(path, ModelGraph)


# -- totals ----------------------------------------------------------------------------------------


def test_totals():
    graph = perceptron(2)
    linear = 2 * 8 * 16 * 16
    assert graph.flops == Work(
        forward=2 * linear, input_gradient=2 * linear, weight_gradient=2 * linear
    )
    assert sum(spec.elements for spec in graph.parameters.values()) == 2 * 256
    assert graph.saved_bytes == 5 * 8 * 16 * 4  # x is the caller's, and the result is not kept
    assert perceptron(2).traffic == perceptron(1).traffic + perceptron(1).traffic


def test_types_have_their_sizes():
    sizes = {"float64": 8, "bfloat16": 2, "int64": 8, "bool": 1, "float8_e4m3fn": 1}
    assert {dtype: spec(2, 3, dtype=dtype).bytes // 6 for dtype in sizes} == sizes


# -- cuts and blocks -------------------------------------------------------------------------------


def test_cuts_are_where_one_tensor_crosses():
    found = cut_points(perceptron())
    assert [(cut.place, cut.tensors, cut.bytes) for cut in found if cut.place % 3 == 0] == [
        (3, ("op2",), 512),
        (6, ("op5",), 512),
    ]
    assert {cut.place for cut in found} == {1, 2, 3, 6}  # x itself is the caller's
    assert len(cut_points(perceptron(), 2)) == 8


def test_what_is_made_of_nothing_does_not_cross():
    graph = ModelGraph(operators=(), inputs={"x": spec(8, 16)})
    graph = operator(graph, "zeros", [], (8, 16))
    for stream in ("x", "op1", "op2"):
        graph = operator(graph, "add", [stream, "op0"], (8, 16))
    assert [cut.tensors for cut in cut_points(graph)] == [("op1",), ("op2",)]


def test_blocks_are_equal_whatever_they_are_called():
    found = find_repeated_blocks(perceptron(4))
    assert list(found.uses.values()) == [4]
    graph = perceptron(3)
    second = graph.operators[4]
    other = replace(second, kind="gelu")
    operators = tuple(other if o is second else o for o in graph.operators)
    assert list(find_repeated_blocks(replace(graph, operators=operators)).uses.values()) == [2, 1]


def test_wiring_inside_of_a_block_counts():
    graph = perceptron(3)
    last = graph.operators[8]
    crossed = replace(last, inputs=(last.inputs[0], graph.operators[6].outputs[0]))
    operators = (*graph.operators[:8], crossed)
    assert list(find_repeated_blocks(replace(graph, operators=operators)).uses.values()) == [2, 1]


# -- folding ---------------------------------------------------------------------------------------


def test_folding_keeps_sums_and_equal_blocks():
    graph = perceptron()
    light = fuse_light_operators(graph)
    light.check()
    assert [o.kind for o in light.operators] == ["linear", "relu"] * 3
    assert light.flops == graph.flops
    assert light.traffic == graph.traffic
    assert light.saved_bytes == graph.saved_bytes
    assert list(find_repeated_blocks(light, smallest=2).repeated.values()) == [3]


def test_what_is_not_linear_does_not_swallow_a_pending_sum():
    """linear, relu: split over k gives a sum, which the relu must not see half of."""
    light = fuse_light_operators(perceptron(1))
    linear = light.operators[0]
    inputs, outputs = light.specs(linear)
    assert any(rule.outputs == ("P",) for rule in enumerate_rules(linear, inputs, outputs, 2))


def test_a_residual_joins_the_sum_and_a_reshape_names_heads():
    weights = {"w": spec(16, 32)}
    graph = ModelGraph(
        operators=(), inputs={"x": spec(8, 32), "r": spec(8, 16)}, parameters=weights
    )
    graph = operator(graph, "linear", ["x", "w"], (8, 16), roles=("input", "weight"))
    graph = operator(graph, "add", ["op0", "r"], (8, 16))
    graph = operator(graph, "view", ["op1"], (8, 4, 4))
    light = fuse_light_operators(graph)
    (only,) = light.operators
    assert only.parts == ("op0", "op1", "op2")
    assert only.axes.inputs == ("x0 k", "o.0*o.1 k", "x0 o.0*o.1")
    assert only.axes.outputs == ("x0 o.0 o.1",)
    inputs, outputs = light.specs(only)
    found = {rule.axis: rule for rule in enumerate_rules(only, inputs, outputs, 2)}
    assert found["k"].inputs == ("S1", "S1", "P")
    assert found["o.1"].inputs == ("R", "S0/4", "S1/4")
    assert found["o.1"].outputs == ("S2",)


# -- rules -----------------------------------------------------------------------------------------


def test_a_replicated_input_gets_a_pending_gradient():
    linear = perceptron(1).operators[0]
    inputs, outputs = perceptron(1).specs(linear)
    found = {rule.axis: rule for rule in enumerate_rules(linear, inputs, outputs, 4)}
    assert found["o"].gradients == ("P", "S0")
    assert found["x0"].gradients == ("S0", "P")
    assert found["k"].gradients == ("S1", "S1")


def test_an_axis_that_cannot_be_divided_is_left_out():
    linear = perceptron(1).operators[0]
    inputs, outputs = perceptron(1).specs(linear)
    assert {rule.axis for rule in enumerate_rules(linear, inputs, outputs, 3)} == {""}
    assert len(enumerate_rules(linear, inputs, outputs, 1)) == 1


def test_an_operator_without_a_rule_is_replicated():
    call = OperatorCall(
        kind="mine::op", roles=("x",), inputs=(spec(4),), outputs=(spec(4),), attributes={}
    )
    assert axes_of(call) == OperatorAxes(known=False)
    unknown = Operator(name="o", kind="mine::op", inputs=("x",), outputs=("y",), axes=axes_of(call))
    assert [rule.inputs for rule in enumerate_rules(unknown, (spec(4),), (spec(4),), 2)] == [("R",)]
    assert ModelGraph(operators=(unknown,)).unknown == ("mine::op",)


def test_a_known_kind_called_in_an_unknown_way_is_unknown():
    call = OperatorCall(
        kind="einsum",
        roles=("operands.0",),
        inputs=(spec(4, 4),),
        outputs=(spec(4),),
        attributes={"equation": "ii->i"},
    )
    assert not axes_of(call).known


def test_of_two_rules_with_the_same_placements_the_cheaper_stays():
    axes = OperatorAxes(
        loops=(
            LoopAxis(name="a", size=4, window=Window(kernel=3, padding=1)),
            LoopAxis(name="b", size=4, kind="statistics", exchange=10),
        ),
        inputs=("a*b",),
        outputs=("a*b",),
    )
    both = Operator(name="o", kind="k", inputs=("x",), outputs=("y",), axes=axes)
    found = enumerate_rules(both, (spec(16),), (spec(16),), 2)
    assert [(rule.axis, rule.inputs) for rule in found] == [
        ("", ("R",)), ("a", ("S0",)), ("b", ("S0/4",)),
    ]  # fmt: skip


def test_the_table_knows_what_models_are_made_of():
    needed = "linear matmul conv2d batch_norm embedding embedding_bag softmax layer_norm view cat"
    assert all(OPERATORS[name].expression for name in needed.split())
    assert sum(bool(row.expression) for row in OPERATORS.values()) > 150
