"""single: our tables against those that torch makes; the only file that asks torch for its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from headway.schedule.generators.registry import make_schedule
from support.exact_play import cells, play, play_schedule

visualizer = pytest.importorskip(
    "torch.distributed.pipelining._schedule_visualizer",
    reason="this torch does not show its schedules (private module _schedule_visualizer)",
)
if not hasattr(visualizer, "get_schedule_ops"):
    pytest.skip("this torch has no get_schedule_ops", allow_module_level=True)

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
SAME = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "dualpipe-v")
SIZES = [
    *((D, N) for D in (2, 3, 4) for N in sorted({1, D, D + 1, 2 * D - 1, 2 * D, 4 * D + 1})),
    *((8, N) for N in (3, 8, 11, 16, 32)),
]


@cache
def torch_table(name, D, N, virtual=2):
    """Torch's cells, one per unit, or None where torch refuses the size.

    A pair of its DualPipeV becomes two cells, as in our table. The table that torch 2.13 shows for
    1F1B numbers the forwards of the last rank from 1 (it is not the one that torch runs); here from
    0.
    """
    chunks = None if name in ("gpipe", "1f1b") else virtual
    try:
        rows = visualizer.get_schedule_ops(NAMES[name], D, N, chunks)
    except ValueError:
        return None
    orders = []
    for row in rows:
        singles = [single for a in row if a for single in (a.sub_actions or (a,))]
        found = [
            (KINDS[a.computation_type.name], "d0", a.stage_index, a.microbatch_index)
            for a in singles
            if a.computation_type.name in KINDS
        ]
        first = min(number for kind, _, _, number in found if kind == "F")
        orders.append(
            [((k, p, s, number - first if k == "F" else number),) for k, p, s, number in found]
        )
    return orders


def pairs(name, virtual=2):
    """Our schedule and torch's table for every size that torch accepts."""
    for D, N in SIZES:
        theirs = torch_table(name, D, N, virtual)
        if theirs is not None:
            yield make_schedule(name, stages=D, microbatches=N, virtual=virtual), theirs


@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 3, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_never_slower_and_never_more_memory(name, cost):
    compared = 0
    for ours, table in pairs(name):
        mine, theirs = play_schedule(ours, cost), play(table, ours.stages, cost)
        assert mine.makespan <= theirs.makespan
        assert all(a <= b for a, b in zip(mine.peaks, theirs.peaks, strict=True))
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", SAME)
def test_the_same_order_on_every_rank(name):
    for virtual in (2, 3) if name.startswith("interleaved") else (2,):
        for ours, theirs in pairs(name, virtual):
            assert cells(ours) == theirs


def test_zbv_differs_in_the_order_of_its_last_weight_gradients_alone():
    """Torch does those of the first stages first; ours come in the order of their backwards."""
    for ours, theirs in pairs("zbv"):
        for mine, other in zip(cells(ours), theirs, strict=True):
            assert sorted(mine) == sorted(other)
            assert [u for u in mine if u[0][0] != "W"] == [u for u in other if u[0][0] != "W"]
            assert [u[0][0] for u in mine] == [u[0][0] for u in other]


def test_breadth_first_differs_in_the_direction_of_its_backwards_alone():
    """Torch begins with the last micro-batch: its gradients are summed in another order."""
    for ours, theirs in pairs("breadth-first"):
        last = ours.num_microbatches - 1
        turned = [
            [((k, p, s, last - m if k == "B" else m),) for ((k, p, s, m),) in order]
            for order in theirs
        ]
        assert cells(ours) == turned


def test_sizes_that_torch_refuses_for_loops_are_made_here():
    """Torch wants groups of equal size: 11 micro-batches over 4 ranks have none."""
    for name in ("interleaved", "interleaved-zero-bubble"):
        assert torch_table(name, 4, 11) is None
        assert play_schedule(make_schedule(name, stages=4, microbatches=11)).makespan < 11 * 3 + 5


def test_no_other_file_touches_the_private_module():
    root = Path(__file__).parents[2]
    files = [
        path for folder in ("src", "tests", "benchmarks") for path in root.glob(f"{folder}/**/*.py")
    ]
    named = [path.name for path in files if "_schedule_visualizer" in path.read_text("utf-8")]
    assert named == [Path(__file__).name]
