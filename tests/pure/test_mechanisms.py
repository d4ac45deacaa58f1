"""pure: every way to lay axes over up to 8 ranks is a legal plan; what cannot be run is named."""

from __future__ import annotations

import itertools
import json

import pytest

from headway.documents import to_type
from headway.errors import PlanError
from headway.plans import (
    LayerSplit,
    ModuleSplit,
    Plan,
    data_parallel,
    explain,
    pipelined,
    plan_difference,
)
from headway.plans.pipeline import PipelinePlan
from headway.plans.plan import check_executable
from support.sampling import sampled

SPLITS = {
    1: (LayerSplit(),),
    2: (LayerSplit(tensor=(2,)), LayerSplit(spatial=(2,)), LayerSplit(tensor=(1, 2, 1))),
    4: (
        LayerSplit(tensor=(4,)),
        LayerSplit(tensor=(2, 2)),
        LayerSplit(tensor=(1, 2, 2)),
        LayerSplit(spatial=(2, 2)),
        LayerSplit(tensor=(2,), spatial=(2,)),
    ),
    8: (
        LayerSplit(tensor=(2, 2, 2)),
        LayerSplit(tensor=(2, 2, 2), form="summa"),
        LayerSplit(spatial=(2, 2, 2)),
        LayerSplit(spatial=(2, 1, 4), head="samples"),
    ),
}


def plans():
    """(zero, pipeline ranks, split, plan) for all products of up to 8 ranks."""
    for ranks, pipe, (many, splits), zero in itertools.product(
        (1, 2, 4, 8), (1, 2, 4), SPLITS.items(), (0, 1, 3)
    ):
        if ranks % (pipe * many):
            continue
        for split in splits:
            options = {"zero": zero, "split": split, "processes": ranks}
            if pipe == 1:
                made = data_parallel(16, **options)
            else:
                made = pipelined(16, stages=pipe, pipeline=PipelinePlan(microbatches=4), **options)
            yield zero, pipe, split, made


@pytest.mark.slow
def test_every_combination_is_a_legal_plan_that_a_file_can_hold():
    every = list(plans())
    assert len(every) > 100
    for _, _, _, plan in sampled(every, 40):
        again = to_type(json.loads(plan.to_json()), Plan, where="plan")
        again.check()
        assert plan_difference(plan, again) == []
        assert again.hash == plan.hash
        assert explain(plan)
        shares = [plan.batch.share(plan.data_rank(r), plan.data_degree) for r in range(plan.ranks)]
        counted = {
            sample for rank, share in enumerate(shares) if plan.counts(rank) for sample in share
        }
        assert counted == set(range(16))


SCHEDULES = ("none", "gpipe", "1f1b", "zb-h1", "chimera")


def compositions():
    """All products of up to 8 ranks: schedule, ZeRO, split, copies, on every number of stages."""
    for ranks, stages, (many, splits) in itertools.product(
        range(1, 9), range(1, 9), SPLITS.items()
    ):
        if ranks % (stages * many):
            continue
        for schedule, zero, split in itertools.product(SCHEDULES, (0, 1, 3), splits):
            if (schedule == "none") is not (stages == 1) or (schedule == "chimera" and stages % 2):
                continue
            options = {"zero": zero, "split": split, "processes": ranks}
            pipeline = PipelinePlan(schedule=schedule, microbatches=stages) if stages > 1 else None
            yield pipelined(16 * ranks, stages=stages, pipeline=pipeline, **options)


@pytest.mark.slow
def test_every_composition_is_carried_out_or_refused_by_name():
    run, refused = 0, 0
    for plan in compositions():
        if plan.split.tensor and plan.split.spatial:
            with pytest.raises(PlanError, match="tensor and split") as error:
                check_executable(plan)
            assert "Leave one of them out" in str(error.value)
            refused += 1
        else:
            check_executable(plan)
            run += 1
    assert run > 300
    assert refused > 15


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"zero": 1}, "memory.zero 1 with a pipeline of pipedream, without a flush"),
        ({"split": LayerSplit(tensor=(2,))}, "split with a pipeline of pipedream, without a flush"),
        ({"split": LayerSplit(spatial=(2,))}, "split with a pipeline of pipedream"),
    ],
)
def test_what_the_executor_lacks_is_named(wrong, words):
    plan = pipelined(
        16,
        processes=4,
        stages=2,
        pipeline=PipelinePlan(schedule="pipedream", microbatches=4),
        **wrong,
    )
    with pytest.raises(PlanError, match=words) as error:
        check_executable(plan)
    assert "not supported" in str(error.value)


def test_a_grid_of_its_own_is_carried_out_in_stages_but_not_with_sharded_state():
    split = LayerSplit(tensor=(2,), by=(ModuleSplit(modules="blocks.1", tensor=(2, 1, 1)),))
    check_executable(pipelined(16, processes=4, stages=2, split=split))
    with pytest.raises(PlanError, match="by with a pipeline and memory"):
        check_executable(pipelined(16, processes=8, stages=2, split=split, zero=1))


def test_ranks_that_share_samples_lie_next_to_each_other():
    plan = data_parallel(16, processes=8, split=LayerSplit(tensor=(2, 2)))
    assert [plan.data_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [plan.counts(rank) for rank in range(8)] == [True, False, False, False] * 2
    hybrid = data_parallel(16, processes=8, zero=3, shards=2)
    assert [hybrid.data_rank(rank) for rank in range(8)] == list(range(8))


def test_every_way_of_splitting_changes_the_hash():
    plain = data_parallel(16, processes=2)
    for other in ({"zero": 1}, {"split": LayerSplit(tensor=(2,))}):
        assert data_parallel(16, processes=2, **other).hash != plain.hash
