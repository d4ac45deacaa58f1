"""pure: the plan: legality, file form, hash, difference, text, and the laws of batch arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.documents import to_type
from headway.errors import DocumentError, PlanError
from headway.plans import (
    Axis,
    BatchSplit,
    ExchangePlan,
    LayerSplit,
    Layout,
    MemoryPolicy,
    Mesh,
    ModuleSplit,
    PipelinePlan,
    Plan,
    data_parallel,
    explain,
    pipelined,
    plan_difference,
)
from headway.plans.tables import TableSplit
from support.golden import check_golden

PLAN = data_parallel(64, processes=2, microbatch=8)
FULL = dataclasses.replace(
    data_parallel(100, processes=3, microbatch=16, precision="bfloat16"),
    layouts=(Layout(tensors="*", placements={"data": "copy"}),),
)

EVERYTHING = dataclasses.replace(
    FULL,
    split=LayerSplit(
        tensor=(1,),
        whole=("head",),
        only=("blocks",),
        by=(ModuleSplit(modules="blocks.*.mlp", tensor=(1, 1)),),
        spatial=(1,),
        head="samples",
        tables=(TableSplit(tables="emb.*", way="row", ranks=(1, 0)),),
    ),
    pipeline=PipelinePlan(shared_memory=False),
    memory=MemoryPolicy(precision="bfloat16", zero=1),
)
"""With the entries that a file leaves out where they say nothing."""

batches = st.integers(1, 300)
worlds = st.integers(1, 17)
limits = st.none() | st.integers(1, 40)


# ---- legality ---------------------------------------------------------------------------------


def test_all_problems_come_at_once():
    plan = Plan(
        mesh=Mesh(axes=(Axis(name="pipe", size=2), Axis(name="pipe", size=0))),
        batch=BatchSplit(samples=0, microbatch=0),
        layouts=(Layout(tensors="w", placements={"tensor": "split:0"}),),
        exchange=ExchangePlan(bucket="0"),
        format=7,
    )
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert caught.value.problems == (
        "format 7 is not known; this headway reads format 1",
        "mesh axis pipe has size 0; at least 1",
        "mesh axis pipe appears twice",
        "exchange.axis data is not an axis of the mesh (pipe, pipe)",
        "batch.samples is 0; at least 1",
        "batch.microbatch is 0; at least 1, or leave it out",
        "exchange.bucket is 0 bytes; at least 1",
        "layout of w: tensor is not an axis of the mesh",
        "layout of w: 'split:0' on tensor: not implemented; only copy",
    )
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    assert caught.value.exit_code == 2


def test_fewer_samples_than_ranks_says_how_many_ranks_to_use():
    with pytest.raises(PlanError, match="use at most 3 ranks"):
        data_parallel(3, processes=4)


def test_a_mesh_without_axes_is_a_problem():
    with pytest.raises(PlanError, match="mesh has no axis"):
        Plan(mesh=Mesh(axes=()), batch=BatchSplit(samples=1)).check()


def test_wrong_types_from_python_are_problems_too():
    with pytest.raises(PlanError) as caught:
        data_parallel("64", processes=2.0, microbatch=True, precision="float16")
    assert caught.value.problems == (
        "mesh.axes.0.size: 2.0 is not a whole number",
        'batch.samples: "64" is not a whole number',
        "batch.microbatch: true is not a whole number",
        "memory.precision: \"float16\" is not 'float32', 'float64' or 'bfloat16'",
    )


def test_modules_with_a_grid_of_their_own_need_the_same_ranks_and_whole_activations():
    other = ModuleSplit(modules="blocks.*.mlp", tensor=(2, 2))
    for tensor, words in (((2,), "are 4 ranks; split.tensor has 2"), ((2, 2), "nowhere whole")):
        with pytest.raises(PlanError, match=words):
            data_parallel(16, processes=4, split=LayerSplit(tensor=tensor, by=(other,)))
    assert "blocks.*.mlp over 2 x 2 (summa)" in str(LayerSplit(tensor=(4,), by=(other,)))


# ---- file form, hash, difference, text --------------------------------------------------------


@pytest.mark.parametrize("plan", [PLAN, FULL], ids=["plain", "full"])
def test_a_plan_survives_its_file(tmp_path, plan):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.hash == plan.hash


@settings(max_examples=30)  # each builds two validators
@given(batches, worlds, limits, st.sampled_from(["float32", "float64", "bfloat16"]))
def test_every_legal_plan_survives_json(samples, processes, microbatch, precision):
    plan = data_parallel(
        max(samples, processes), processes=processes, microbatch=microbatch, precision=precision
    )
    assert to_type(json.loads(plan.to_json()), Plan, where="plan") == plan
    assert plan.ranks == plan.data_degree == processes


def test_the_hash_does_not_depend_on_the_layout_of_the_file(tmp_path):
    shuffled = dict(reversed(json.loads(FULL.to_json()).items()))
    (tmp_path / "plan.json").write_text(json.dumps(shuffled))
    assert Plan.load(tmp_path / "plan.json").hash == FULL.hash
    assert re.fullmatch("[0-9a-f]{12}", FULL.hash)


def leaves(value, path=()):
    """The path of every value in plain data."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, inner in items for leaf in leaves(inner, (*path, key))]
    return [path]


def changed(data, path):
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    inner[path[-1]] = old + 1 if isinstance(old, int) else f"{old}x"
    return copy


LEAVES = [path for path in leaves(json.loads(EVERYTHING.to_json())) if path != ("prediction",)]


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
def test_any_value_changes_the_hash_and_shows_in_the_difference(path):
    data = json.loads(EVERYTHING.to_json())
    other = _unchecked(changed(data, path))
    assert other.hash != EVERYTHING.hash
    lines = plan_difference(EVERYTHING, other)
    assert len(lines) == 1
    assert lines[0].startswith(".".join(map(str, path)) + ": ")


def _unchecked(data):
    """A plan from plain data, legal or not."""
    mesh = Mesh(axes=tuple(Axis(**axis) for axis in data["mesh"]["axes"]))
    parts = {
        "batch": BatchSplit(**data["batch"]),
        "layouts": tuple(Layout(**layout) for layout in data["layouts"]),
        "split": LayerSplit(
            **_tuples(data["split"])
            | {"by": tuple(ModuleSplit(**_tuples(one)) for one in data["split"]["by"])}
            | {"tables": tuple(TableSplit(**_tuples(one)) for one in data["split"]["tables"])}
        ),
        "pipeline": PipelinePlan(**data["pipeline"]),
        "exchange": ExchangePlan(**data["exchange"]),
        "synchrony": dataclasses.replace(FULL.synchrony, **data["synchrony"]),
        "memory": MemoryPolicy(**data["memory"]),
        "format": data["format"],
    }
    return Plan(mesh=mesh, **parts)


def _tuples(data):
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


def test_the_leaves_cover_every_field():
    named = {path[0] for path in LEAVES}
    assert named == {f.name for f in dataclasses.fields(Plan)} - {"prediction"}


def test_differences_of_length_and_none():
    assert plan_difference(PLAN, PLAN) == []
    assert plan_difference(PLAN, FULL) == [
        "mesh.axes.0.size: 2 -> 3",
        "batch.samples: 64 -> 100",
        "batch.microbatch: 8 -> 16",
        "memory.precision: float32 -> bfloat16",
        "layouts.0.tensors: absent -> *",
        "layouts.0.placements.data: absent -> copy",
    ]


def test_a_plan_file_with_a_typing_error_names_the_key_and_the_line(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json().replace('"samples"', '"sampels"'))
    with pytest.raises(DocumentError) as caught:
        Plan.load(path)
    number = PLAN.to_json().split('"samples"')[0].count("\n") + 1
    assert f"{path}:{number}  unknown key batch.sampels; did you mean samples or shares?" in str(
        caught.value
    )


def test_a_well_formed_but_impossible_plan_file_is_a_plan_error(tmp_path):
    dataclasses.replace(PLAN, batch=BatchSplit(samples=1)).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"batch\.samples is 1 for 2 ranks"):
        Plan.load(tmp_path / "plan.json")


def test_the_explanation_is_the_one_that_was_read_in_review():
    plans = [
        (data_parallel(8, processes=1), None),
        (PLAN, None),
        (FULL, 1024),
        (data_parallel(7, processes=2, microbatch=2, exchange=ExchangePlan(overlap=False)), None),
    ]
    check_golden("plan/explain.txt", "\n\n".join(explain(plan, tokens) for plan, tokens in plans))


# ---- batch arithmetic -------------------------------------------------------------------------


@given(batches, worlds)
def test_shares_partition_the_batch_and_differ_by_at_most_one(samples, ranks):
    shares = [BatchSplit(samples=samples).share(rank, ranks) for rank in range(ranks)]
    assert [position for share in shares for position in share] == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(batches, worlds, st.integers(0, 300))
def test_shares_of_a_ragged_batch_partition_what_is_there(samples, ranks, present):
    split = BatchSplit(samples=samples)
    shares = [split.share(rank, ranks, present) for rank in range(ranks)]
    assert [position for share in shares for position in share] == list(range(present))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 100), st.integers(0, 300), limits)
def test_microbatches_partition_the_share_within_the_limit_and_are_few(start, length, limit):
    share = range(start, start + length)
    cuts = BatchSplit(samples=1, microbatch=limit).microbatches(share)
    assert [position for cut in cuts for position in cut] == list(share)
    assert len(cuts) == (math.ceil(length / (limit or length)) if length else 0)
    sizes = [len(cut) for cut in cuts]
    assert all(1 <= size <= (limit or length) for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(batches, worlds, limits)
def test_the_equation_is_true(samples, ranks, microbatch):
    """Its own text is evaluated as arithmetic."""
    split = BatchSplit(samples=samples, microbatch=microbatch)
    left, right = split.equation(ranks).split(" = ")
    assert left in (f"{samples} samples", "1 sample")
    sides = re.sub(r"(ranks?|micro-batch(es)?|samples?)\b", "", right)
    assert set(sides) <= set("0123456789x+() ")
    assert eval(sides.replace("x", "*")) == samples
    working = sum(bool(split.share(rank, ranks)) for rank in range(ranks))
    assert sum(int(number) for number in re.findall(r"(\d+) ranks?", right)) == working


@given(batches, worlds, st.integers(1, 9000))
def test_the_equation_in_tokens_is_true(samples, ranks, tokens):
    text = BatchSplit(samples=samples).equation(ranks, tokens)
    total, product, _ = text.split(" = ")
    plain = re.sub(r"(?<=\d) (?=\d{3}\b)", "", f"{total}|{product}")
    assert [int(number) for number in re.findall(r"\d+", plain)] == [
        samples * tokens,
        samples,
        tokens,
    ]


@pytest.mark.parametrize(
    ("samples", "ranks", "microbatch", "text"),
    [
        (64, 2, 8, "64 samples = 2 ranks x 4 micro-batches x 8 samples"),
        (1, 1, None, "1 sample = 1 rank x 1 micro-batch x 1 sample"),
        (
            7,
            2,
            2,
            "7 samples = 1 rank x 2 micro-batches x 2 samples "
            "+ 1 rank x (1 micro-batch x 2 samples + 1 micro-batch x 1 sample)",
        ),
    ],
)
def test_equations_as_people_read_them(samples, ranks, microbatch, text):
    assert BatchSplit(samples=samples, microbatch=microbatch).equation(ranks) == text


@pytest.mark.parametrize(
    ("said", "stages", "blockwise"),
    [
        ({}, (), False),
        ({"recompute": True}, (0, 1, 2, 3), False),
        ({"recompute": "stages", "recompute_stages": (2, 0)}, (0, 2), False),
        ({"recompute": "blocks"}, (0, 1, 2, 3), True),
        ({"recompute": False}, (), False),
        ({"schedule": "chimera-doubling"}, (0, 1, 2, 3), False),
        ({"schedule": "chimera-doubling", "recompute": False}, (), False),
    ],
)
def test_what_a_pipeline_computes_again(said, stages, blockwise):
    pipeline = PipelinePlan(**said)
    assert pipeline.problems(4, 8) == []
    schedule = pipeline.make(4, 8)
    assert (schedule.recompute, schedule.blockwise) == (stages, blockwise)


def test_a_pipeline_without_shared_memory_says_so():
    plan = pipelined(32, processes=4, stages=4)
    other = dataclasses.replace(plan, pipeline=PipelinePlan(shared_memory=False))
    added = "; values go over the process group"
    assert added not in explain(plan)
    assert explain(other).replace(added, "").replace(other.hash, plan.hash) == explain(plan)


def test_stages_that_are_not_there_cannot_recompute():
    wrong = PipelinePlan(recompute="blocks", recompute_stages=(0, 4, -1))
    assert wrong.problems(4, 8) == [
        f"pipeline.recompute_stages names stage {stage}; there are stages 0 to 3"
        for stage in (4, -1)
    ]
    (problem,) = PipelinePlan(recompute_stages=(1,)).problems(4, 8)
    assert problem.endswith('say what, too: recompute = "stages" or "blocks"')
