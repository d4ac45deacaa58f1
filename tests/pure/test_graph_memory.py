"""pure: which storages are alive when, on graphs small enough to count by hand."""

from __future__ import annotations

import pytest

from headway.graph.liveness import simulate_liveness
from headway.graph.model_graph import Footprint, ModelGraph, Operator, Saved, TensorSpec
from headway.graph.operator_fusion import with_transient_bytes
from support.step_memory import operator_ranges_of, optimiser_temporaries, step_memory

N = 4 * 100
"""Bytes of every activation and weight."""


def layer(number, source, *, module=""):
    """A product with a weight of its own; keeps its input."""
    return Operator(
        name=f"p{number}",
        kind="linear",
        inputs=(source, f"w{number}"),
        roles=("input", "weight"),
        outputs=(f"p{number}",),
        parameters=(f"w{number}",),
        module=module,
        saved=(Saved(name=source, bytes=N),),
        footprint=Footprint(
            backward=(number > 0) * N + N, gradients=("new" if number else "", "new")
        ),
    )


def chain(length=3):
    spec = TensorSpec(shape=(10, 10), dtype="float32")
    operators = [layer(0, "x", module="m0")]
    operators += [layer(n, f"p{n - 1}", module=f"m{n}") for n in range(1, length)]
    graph = ModelGraph(
        operators=tuple(operators),
        values={f"p{n}": spec for n in range(length)},
        inputs={"x": spec},
        outputs=(f"p{length - 1}",),
        parameters={f"w{n}": spec for n in range(length)},
    )
    graph.check()
    return graph


def test_a_chain_by_hand():
    """Behind forward p0, p1 are kept and p2 is the caller's, who keeps its gradient, too. Backward
    of p2 makes two; then p1 goes, and of p0, p2, three gradients are five, to which p1 adds two."""
    peak = simulate_liveness(chain())
    assert [moment.total // N for moment in peak.curve] == [1, 2, 3, 6, 7, 6]
    assert peak.moment.at == "backward of p1"


def test_gradients_that_are_there_are_added_to():
    peak = simulate_liveness(chain(), gradients=True)
    found = [m.total // N for m in peak.curve if m.at == "backward of p2"]
    assert found == [3 + 6]


def test_micro_batches_under_way():
    both = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    found = {m.at: m.total // N for m in simulate_liveness(chain(), actions=both).curve[:7]}
    assert found["forward of p2"] == 6
    assert simulate_liveness(chain(), actions=both).bytes > simulate_liveness(chain()).bytes + 2 * N


def test_a_stage_lets_go_of_what_it_sends():
    """Units 1 and 2: p0 has come, p1 is kept; p2 is gone until its gradient comes."""
    peak = simulate_liveness(chain(), units=(1, 3))
    assert [moment.total // N for moment in peak.curve[:3]] == [2, 3, 5]


def test_what_is_computed_again_is_not_kept():
    plain, again = chain(8), chain(8)
    regions = [(0, 4), (4, 8)]
    kept = next(m for m in simulate_liveness(plain).curve if m.at == "forward of p7")
    less = next(
        m for m in simulate_liveness(again, regions=regions).curve if m.at == "forward of p7"
    )
    assert (kept.total // N, less.total // N) == (8, 3)
    assert operator_ranges_of(plain, ["m2"]) == [(2, 3)]


def test_passing_is_what_is_above_the_kept():
    graph = with_transient_bytes(chain())
    last = graph.operators[-1].footprint
    assert (last.passing // N, last.weights // N) == (3, 1)


@pytest.mark.parametrize(("way", "bytes_"), [("loop", 10 + 2 * 30), ("foreach", 60), ("fused", 0)])
def test_temporaries_of_adamw(way, bytes_):
    assert optimiser_temporaries("adamw", (20, 10, 30), way) == bytes_


def test_a_step_holds_state_and_gradients_in_the_update():
    peak = step_memory(chain(), "adamw")
    update = peak.curve[-1]
    assert update.at == "update"
    assert update.bytes["optimiser"] == 2 * 3 * N + 3 * 4
    assert peak.bytes == max(moment.total for moment in peak.curve)
