"""pure: messages for which a stage of a pipeline has memory."""

from __future__ import annotations

import pytest

from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.pricing import MessageBuffers, message_buffers


def of(schedule, ranks, microbatches, **options):
    return message_buffers(
        Degrees(
            tensor=1,
            data=1,
            pipeline=ranks,
            microbatch=1,
            microbatches=microbatches,
            schedule=schedule,
            **options,
        )
    )


def test_two_stages_counted_by_hand():
    """Rank 0: F0 F1 B0 F2 B1 F3 B2 B3. In B1 the result of micro-batch 2 is on its way, and the
    gradients of 2 and 3 are posted, four computes ahead. Rank 1: F0 B0 F1 B1 F2 B2 ...; in B1 the
    gradient of 0 is on its way back, and one message is posted: one more may be held."""
    back, _ = of("1f1b", 2, 4)
    assert back == MessageBuffers(entering=2, left=1, returning=2)


def test_with_one_micro_batch_nothing_else_is_under_way():
    assert of("1f1b", 4, 1)[0] == MessageBuffers()


def test_gpipe_holds_all_results_until_the_first_gradient_comes():
    back, ahead = of("gpipe", 4, 6)
    assert ahead.left == 6
    assert back.left == 0


@pytest.mark.parametrize("microbatches", [6, 8, 40, 2000])
def test_long_pipelines_are_as_their_last_eight_ranks(microbatches):
    assert of("1f1b", 64, microbatches)[0] == of("1f1b", 8, min(microbatches, 40))[0]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("interleaved", {"virtual": 2}),
        ("zb-h1", {}),
        ("zbv", {"virtual": 2}),
        ("dualpipe-v", {"virtual": 2}),
        ("chimera", {"pipes": 2}),
    ],
)
def test_every_schedule_is_counted(schedule, options):
    back, _ = of(schedule, 4, 8, **options)
    assert sum(back) > 0
