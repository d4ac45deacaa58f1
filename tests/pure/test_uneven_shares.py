"""pure: batches that fall into uneven shares, for unequal devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.plans import BatchSplit, Plan, data_parallel, explain, pipelined
from headway.plans.batch import largest_remainder_shares
from headway.plans.pipeline import PipelinePlan

weights = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(weights, st.integers(0, 400))
def test_uneven_shares_partition_what_is_there(shares, present):
    split = BatchSplit(samples=sum(shares), shares=tuple(shares))
    ranks = len(shares)
    assert [len(split.share(rank, ranks)) for rank in range(ranks)] == shares
    present = min(present, split.samples)
    found = [split.share(rank, ranks, present) for rank in range(ranks)]
    assert [position for share in found for position in share] == list(range(present))
    for share, most in zip(found, shares, strict=True):
        assert len(share) <= most
        assert abs(len(share) - most * present / split.samples) < 1


@given(weights, st.integers(1, 300))
def test_whole_samples_are_handed_out_in_proportion(parts, samples):
    found = largest_remainder_shares(samples, parts)
    assert sum(found) == samples
    assert all(
        abs(share - samples * part / sum(parts)) < 1
        for share, part in zip(found, parts, strict=True)
    )
    assert largest_remainder_shares(sum(parts), parts) == tuple(parts)


def test_a_plan_says_and_keeps_its_shares(tmp_path):
    plan = data_parallel(92, processes=2, microbatch=32, shares=(60, 32))
    assert plan.batch.shares == (60, 32)
    assert "92 samples = 1 rank x 2 micro-batches x 30 samples + 1 rank x 1" in explain(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert data_parallel(10, processes=3, shares=(2, 1, 1)).batch.shares == (5, 3, 2)


def test_copies_of_a_pipeline_cut_their_shares_into_as_many_micro_batches():
    plan = pipelined(
        20, processes=4, stages=2, pipeline=PipelinePlan(microbatches=4), shares=(3, 1)
    )
    assert plan.batch.shares == (15, 5)
    sizes = [[len(m) for m in plan.batch.microbatches(plan.batch.share(c, 2))] for c in (0, 1)]
    assert sizes == [[4, 4, 4, 3], [2, 1, 1, 1]]
    assert plan.batch.largest(2) == 4
    few = pipelined(8, processes=4, stages=2, pipeline=PipelinePlan(microbatches=4), shares=(6, 2))
    assert few.batch.parts == 2  # as many as the smaller share has samples


def test_a_smaller_batch_is_shared_in_proportion():
    plan = data_parallel(12, processes=2, shares=(2, 1))
    assert BatchSplit(samples=6).shared_as(plan.batch, 2).shares == (4, 2)
    even = data_parallel(12, processes=2)
    assert BatchSplit(samples=6).shared_as(even.batch, 2) == BatchSplit(samples=6)


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ((1, 2, 3), "3 shares; the data axis has 2 ranks"),
        ((1, 0), "share 1 is 0; above 0"),
        ((50, 1), "share 1 of 12 samples is less than one"),
    ],
)
def test_shares_that_cannot_be_are_refused(shares, line):
    with pytest.raises(PlanError) as caught:
        data_parallel(12, processes=2, shares=shares)
    assert list(caught.value.problems) == [line]


def test_a_written_plan_with_wrong_shares_lists_all_that_is_wrong():
    plan = data_parallel(12, processes=2)
    wrong = replace(plan, batch=BatchSplit(samples=12, shares=(7, 0, 4)))
    with pytest.raises(PlanError) as caught:
        wrong.check()
    assert list(caught.value.problems) == [
        "batch.shares has 3 entries for 2 ranks on the data axis",
        "batch.shares add up to 11; batch.samples is 12",
        "batch.shares: rank 1 has 0 samples; at least 1",
    ]
