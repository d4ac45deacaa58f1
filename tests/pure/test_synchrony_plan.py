"""pure: which ways to agree are legal, and what is said about the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.errors import PlanError
from headway.plans import Plan, Synchrony, data_parallel, explain
from headway.plans.plan import check_executable


def said(workers: int = 4, **words: Any) -> str:
    with pytest.raises(PlanError) as raised:
        data_parallel(64, processes=workers, synchrony=Synchrony(**words))
    return "\n".join(raised.value.problems)


def test_all_bad_values_are_told_at_once() -> None:
    text = said(kind="asynchronous", delay_bound=4, alpha=0.1, beta=0.3, servers=9, local_steps=0)
    for word in ("delay_bound", "alpha", "beta", "servers is 9", "local_steps is 0; at least 1"):
        assert word in text, word


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"kind": "bounded"}, "without a bound"),
        ({"kind": "bounded", "delay_bound": 1, "value_bound": 0.1}, "leave one of them out"),
        ({"delay_bound": 4}, 'only with kind "bounded"'),
        ({"merge": "elastic", "alpha": 0.1, "beta": 0.2}, "below beta"),
        ({"merge": "elastic", "kind": "asynchronous", "alpha": 0.6}, "at most 0.5"),
        ({"merge": "elastic", "alpha": 0.5, "beta": 0.5}, "at most 0.25"),
        ({"merge": "mean", "kind": "asynchronous"}, 'it can be "synchronous"'),
        ({"merge": "pairwise"}, 'it can be "asynchronous"'),
        ({"local_steps": 8}, "only with a merge of models"),
        ({"topology": "ring"}, 'it can be "replicated"'),
        ({"kind": "asynchronous", "topology": "replicated"}, "copies of the server"),
        ({"kind": "asynchronous", "topology": "single", "transfer": "all_reduce"}, "at once"),
        ({"topology": "sharded"}, "needs servers"),
        ({"topology": "single", "servers": 2}, 'only with topology "sharded"'),
        ({"topology": "single", "backup_workers": 4}, "at most 3"),
        ({"backup_workers": 1}, "a topology of servers"),
        ({"topology": "colocated", "remedy": "staleness_rate"}, "only with servers and kind"),
        ({"kind": "asynchronous", "remedy": "eager_push"}, "is for a delay_bound"),
        ({"kind": "asynchronous", "compensation": 0.1}, 'only with remedy "delay_comp'),
        ({"kind": "asynchronous", "read": "snapshot"}, "only with a delay_bound"),
        ({"topology": "single", "read": "ahead"}, 'a delay_bound or kind "asynchronous"'),
        ({"kind": "bounded", "delay_bound": 0, "read": "ahead"}, "at least 1"),
        ({"kind": "asynchronous", "read": "ahead", "fetch_every": 2}, "with fetch_every 2"),
        (
            {"kind": "asynchronous", "read": "ahead", "remedy": "delay_compensation"},
            "leave one of them out",
        ),
        ({"merge": "mean", "outer_rate": 0.5}, "only with an outer optimiser"),
        ({"merge": "mean", "outer": "nesterov", "outer_momentum": 1.0}, "below 1"),
        ({"merge": "mean", "probability": 0.5}, 'only with merge "push_sum"'),
        ({"merge": "push_sum", "kind": "asynchronous", "probability": 0.0}, "above 0"),
        ({"merge": "neighbour", "weights": ((1.0,),)}, "4 x 4"),
        ({"merge": "neighbour", "weights": ((0.5, 0.5, 0, 0),) * 4}, "not doubly stochastic"),
        ({"compress": "int8"}, "exchange.compress"),
        ({"merge": "mean", "compress": "int9"}, "synchrony.compress"),
        ({"merge": "mean", "compress": "int8"}, 'let state be "keep" or "reset"'),
        ({"merge": "mean", "copies": 3}, "no multiple of 3 copies"),
        ({"copies": 2}, "do not agree at every step"),
    ],
)
def test_what_cannot_be(words: dict[str, Any], told: str) -> None:
    assert told in said(**words)


@pytest.mark.parametrize(
    ("place", "workers", "told"),
    [("hypercube", 6, "power of two"), ("torus", 7, "a product of two numbers")],
)
def test_graphs_without_a_place_for_all(place: Any, workers: int, told: str) -> None:
    assert told in said(workers, merge="neighbour", topology=place)


def test_workers_of_several_ranks() -> None:
    plan = data_parallel(64, processes=8, synchrony=Synchrony(merge="mean", copies=2))
    assert [(axis.name, axis.size) for axis in plan.mesh.axes] == [("worker", 4), ("data", 2)]
    assert (plan.workers, plan.copies, plan.data_degree, plan.exchange_degree) == (4, 2, 8, 2)
    shares = [plan.batch.share(plan.data_rank(rank), plan.data_degree) for rank in range(8)]
    assert [share.start for share in shares] == [*range(0, 64, 8)]
    assert not plan.exact


def test_a_mesh_whose_workers_have_nothing_to_agree_by() -> None:
    plan = data_parallel(64, processes=4, synchrony=Synchrony(merge="mean"))
    with pytest.raises(PlanError, match="lets all ranks agree"):
        Plan(mesh=plan.mesh, batch=plan.batch).check()


def test_the_file_has_only_what_is_chosen_and_old_plans_keep_their_name(tmp_path: Path) -> None:
    plain = data_parallel(64, processes=4)
    assert plain.to_dict()["synchrony"] == {"kind": "synchronous"}
    assert plain.hash == data_parallel(64, processes=4, synchrony=Synchrony()).hash
    plan = data_parallel(
        64, processes=4, synchrony=Synchrony(kind="bounded", delay_bound=3, topology="single")
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.to_dict()["synchrony"] == {
        "kind": "bounded", "topology": "single", "delay_bound": 3,
    }  # fmt: skip
    assert plan.hash != plain.hash


def test_statistics_over_workers_are_refused() -> None:
    with pytest.raises(PlanError, match="do not meet in a forward pass"):
        data_parallel(64, processes=4, norm="global", synchrony=Synchrony(merge="mean"))


def test_the_executor_refuses_what_it_cannot_run() -> None:
    plan = data_parallel(64, processes=4, synchrony=Synchrony(merge="penalty", kind="soft_bounded"))
    with pytest.raises(PlanError, match="synchrony"):
        check_executable(plan)


def test_only_differences_to_a_common_model_are_compressed() -> None:
    rules = Synchrony(merge="elastic", compress="int8")
    plan = data_parallel(64, processes=4, zero=1, synchrony=rules)
    with pytest.raises(PlanError) as raised:
        check_executable(plan)
    said = "\n".join(raised.value.problems)
    assert 'synchrony.compress "int8" with merge "elastic": what is compressed' in said
    check_executable(
        data_parallel(
            64,
            processes=4,
            synchrony=Synchrony(merge="mean", state="keep", compress="int8", copies=2),
        )
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"merge": "penalty", "kind": "soft_bounded"}, ("MPCA-SGD", '"elastic"')),
        ({"kind": "asynchronous", "remedy": "prioritize"}, ("as they come", '"staleness_rate"')),
        ({"kind": "asynchronous", "remedy": "negative_momentum"}, ('"delay_compensation"',)),
        ({"topology": "proxy_tree"}, ('"colocated"', '"eager_push"')),
        ({"topology": "array"}, ("split.tensor",)),
        ({"topology": "single", "transfer": "binomial_tree"}, ('the nearest is "ad_hoc"',)),
        ({"transfer": "scatter_reduce"}, ('the nearest is "all_reduce"',)),
    ],
)
def test_what_nothing_carries_out_is_refused_by_name_with_the_nearest(
    words: dict[str, Any], told: tuple[str, ...]
) -> None:
    plan = data_parallel(64, processes=4, synchrony=Synchrony(**words))
    with pytest.raises(PlanError) as raised:
        check_executable(plan)
    said = "\n".join(raised.value.problems)
    name = next(n for n in ("merge", "remedy", "topology", "transfer") if n in words)
    if "transfer" in words:
        name = "transfer"
    assert f'synchrony.{name} "{words[name]}"' in said
    assert all(word in said for word in told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"merge": "mean"}, "keeps 1/2 of the optimiser's state (ZeRO 1)"),
        ({"kind": "asynchronous"}, "a worker keeps 1/2 of the parameters between steps (ZeRO 1);"),
    ],
)
def test_the_parts_of_a_state_are_those_of_one_worker(words: dict[str, Any], told: str) -> None:
    plan = data_parallel(64, processes=6, zero=1, synchrony=Synchrony(copies=2, **words))
    check_executable(plan)
    assert told in explain(plan)
