"""pure: every way to lay axes over up to 8 ranks is a legal plan; what cannot be run is named."""

from __future__ import annotations

import itertools
import json

import pytest

from headway.documents import to_type
from headway.errors import PlanError
from headway.plan import LayerSplit, Plan, data_parallel, difference, explain, pipelined
from headway.plan.mechanisms import check_mechanisms, lacking
from headway.plan.pipeline import Pipeline

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
                made = pipelined(16, stages=pipe, pipeline=Pipeline(microbatches=4), **options)
            yield zero, pipe, split, made


def test_every_combination_is_a_legal_plan_that_a_file_can_hold():
    count = 0
    for _, _, _, plan in plans():
        again = to_type(json.loads(plan.to_json()), Plan, where="plan")
        again.check()
        assert difference(plan, again) == []
        assert again.hash == plan.hash
        assert explain(plan)
        shares = [plan.batch.share(plan.data_rank(r), plan.data_degree) for r in range(plan.ranks)]
        counted = {
            sample for rank, share in enumerate(shares) if plan.counts(rank) for sample in share
        }
        assert counted == set(range(16))
        count += 1
    assert count > 100


def test_what_the_executor_lacks_names_both_parts():
    run, refused = 0, 0
    for zero, pipe, split, plan in plans():
        reasons = list(lacking(plan))
        parts = {
            "pipeline": pipe > 1,
            "memory.zero": zero > 0,
            "split.tensor": bool(split.tensor),
            "split.spatial": bool(split.spatial),
        }
        if sum(parts.values()) <= 1:
            assert not reasons
        if not reasons:
            check_mechanisms(plan)
            run += 1
            continue
        refused += 1
        with pytest.raises(PlanError, match="no mechanism yet"):
            check_mechanisms(plan)
        words = " ".join(reasons)
        named = [name for name in parts if name in words or ("split" in name and "split" in words)]
        assert len([name for name in named if parts[name]]) >= 2, (reasons, parts)
    assert run > 20
    assert refused > 20


def test_ranks_that_share_samples_lie_next_to_each_other():
    plan = data_parallel(16, processes=8, split=LayerSplit(tensor=(2, 2)))
    assert [plan.data_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [plan.counts(rank) for rank in range(8)] == [True, False, False, False] * 2
    hybrid = data_parallel(16, processes=8, zero=3, shards=2)
    assert [hybrid.data_rank(rank) for rank in range(8)] == list(range(8))


def test_a_plan_of_before_keeps_its_hash_and_its_file():
    plain = data_parallel(16, processes=2)
    assert "split" not in plain.to_dict()
    assert "zero" not in plain.to_dict()["memory"]
    for other in ({"zero": 1}, {"split": LayerSplit(tensor=(2,))}):
        assert data_parallel(16, processes=2, **other).hash != plain.hash
