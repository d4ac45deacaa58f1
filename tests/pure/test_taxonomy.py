"""pure: the words of plans, against the tables of the taxonomy's paper, typed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.errors import UsageError
from headway.plans import ExchangePlan, PipelinePlan, Plan, Synchrony, data_parallel, pipelined
from headway.plans.published_systems import published_system, published_systems
from headway.plans.taxonomy import (
    SELECTION_RULES,
    explain_taxonomy,
    selection_rules,
    taxonomy_words,
)

# Langer et al. 2020, table 1: A, B, C, D, E.
TABLE = """
BigDL | D | central | sync | scatter-reduce | colocated k=n
CaffeOnSpark | D | central | sync | scatter-reduce | colocated k=n
COTS HPC | M | central | sync | - | distributed array
D-PSGD | D | decentral | sync | 2:1 reduce | closed ring
DistBelief | M+D | central | async | ad hoc | sharded servers
EASGD | D | decentral | async | ad hoc | single master
FireCaffe | D | central | sync | binomial tree | single server
GoSGD | D | decentral | soft-bounded async | ad hoc | p2p mesh
MPCA-SGD | D | decentral | soft-bounded async | binomial tree | dedicated master
MXNet | M+D | central | bounded async | scatter-reduce / ad hoc | colocated k=n
Parameter Server | M+D | central | bounded async | reduce / ad hoc | sharded
Petuum | M+D | central | bounded async | ad hoc, eager scatter | sharded
Project Adam | M+D | central | async | ad hoc | sharded
PyTorch | M+D | central | sync | all-reduce | single or replicated
SparkNet | D | decentral | sync | reduce | dedicated master
TensorFlow | M+D | central | bounded async | scatter/all-reduce / ad hoc | colocated k=n
TreeEASGD | D | decentral | bounded async | ad hoc | tree
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
# The paper's words of D and E for what has one word here; a row with alternatives has one of them.
SAME: dict[str, tuple[str, ...]] = {
    "colocated k=n": ("colocated servers, one per worker",),
    "sharded servers": ("2 sharded servers",),
    "sharded": ("2 sharded servers",),
    "single master": ("master",),  # one process in both
    "dedicated master": ("master",),
    "single or replicated": ("single server", "replicated server"),
    "scatter-reduce / ad hoc": ("scatter-reduce", "ad hoc"),
    "reduce / ad hoc": ("reduce", "ad hoc"),
    "scatter/all-reduce / ad hoc": ("scatter-reduce", "all-reduce", "ad hoc"),
    "ad hoc, eager scatter": ("ad hoc",),  # the scatter is a remedy: eager push
}
# Of other papers, as far as they are told: A, B, C, D, E.
OTHERS = """
Zou | D | central | sync | | 2 sharded servers
Chimera | M+D | central | sync | |
MLSL | M+D | central | sync | all-reduce |
Das | M+D | central | sync | all-reduce |
DES | M+D | central | sync | all-reduce |
FFN on Theta | D | central | sync | all-reduce |
FFN | D | central | async | | 2 sharded servers
CommLib | D | central | sync | all-reduce |
RPC-RDMA | D | central | sync | ad hoc |
SVM | D | central | sync | all-reduce |
Blink | D | central | sync | |
Oyama | M+D | central | sync | |
Bian | M | central | sync | |
Whale | M+D | central | sync | |
Adasum | D | central | sync | |
Persia | D | central | bounded async | |
"""


def letters(plan: Plan) -> str:
    words = taxonomy_words(plan).parallelism
    model = "M" if set(words) - {"data"} else ""
    return "+".join(filter(None, [model, "D" if "data" in words else ""]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_survey_is_legal_and_has_its_words(row: list[str], tmp_path: Path) -> None:
    system = published_system(row[0])
    words = system.words
    assert system.surveyed
    assert not system.differs
    assert [letters(system.plan), words.optimisation, words.scheduling] == row[1:4]
    for derived, told in ((words.exchange, row[4]), (words.topology, row[5])):
        assert derived in SAME.get(told, (told,))
    system.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == system.plan


def test_the_survey_has_these_rows_and_no_others() -> None:
    surveyed = [system.name for system in published_systems() if system.surveyed]
    assert surveyed == [row[0] for row in ROWS]
    names = [system.name.lower() for system in published_systems()]
    assert len(names) == len(set(names)) == 17 + 17


@pytest.mark.parametrize("line", OTHERS.strip().splitlines(), ids=lambda line: line.split(" |")[0])
def test_other_papers_in_the_same_words(line: str, tmp_path: Path) -> None:
    name, *told = (cell.strip() for cell in line.split("|"))
    system = published_system(name)
    words = system.words
    found = [letters(system.plan), words.optimisation, words.scheduling]
    found += [words.exchange, words.topology]
    assert all(a == b for a, b in zip(found, told, strict=True) if b)
    system.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == system.plan


def test_what_the_words_of_other_papers_are_about() -> None:
    assert "eager push" in published_system("petuum").words.remedies
    assert published_system("chimera").words.pipelining == "fragment"
    assert published_system("chimera").words.parallelism == ("data", "model.vertical")
    assert published_system("whale").words.cells[0] == (
        "data + model.vertical (fragment) + model.horizontal"
    )
    assert published_system("oyama").words.parallelism == ("data", "model.horizontal")
    assert published_system("CommLib").words.details == ("hierarchical", "mstopk:0.01")
    assert [s.name for s in published_systems() if s.differs] == ["Zion", "Persia"]
    with pytest.raises(UsageError, match="did you mean GoSGD"):
        published_system("GoSDG")


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        ({}, ("data", "central", "sync", "all-reduce", "replicated server")),
        (
            {"topology": "single", "backup_workers": 1},
            ("data", "central", "sync, backup workers 1", "ad hoc", "single server"),
        ),
        (
            {"kind": "bounded", "delay_bound": 2, "on_violation": "reject"},
            (
                "data", "central", "bounded async, reject beyond 2", "ad hoc",
                "colocated servers, one per worker",
            ),
        ),
        (
            {"kind": "bounded", "value_bound": 0.5, "topology": "single"},
            ("data", "central", "bounded async, value 0.5", "ad hoc", "single server"),
        ),
        (
            {
                "merge": "mean", "local_steps": 8, "outer": "nesterov", "state": "keep",
                "compress": "int8",
            },
            (
                "data", "decentral", "sync", "all-reduce, every 8 steps, outer nesterov, int8",
                "replicated server",
            ),
        ),
        (
            {"kind": "asynchronous", "merge": "push_sum", "topology": "ring"},
            ("data", "decentral", "async", "gossip", "closed ring"),
        ),
    ],
)  # fmt: skip
def test_words_of_any_plan(words: dict[str, Any], cells: tuple[str, ...]) -> None:
    plan = data_parallel(64, processes=4, synchrony=Synchrony(**words))
    assert taxonomy_words(plan).cells == cells


def test_words_of_plans_without_copies_with_shards_and_with_stale_stages() -> None:
    alone = taxonomy_words(data_parallel(64, processes=1))
    assert alone.cells == ("none", "central", "sync", "-", "-")
    sharded = taxonomy_words(data_parallel(64, processes=4, zero=1))
    assert sharded.cells[3:] == ("scatter-reduce", "colocated servers, one per rank")
    stale = pipelined(64, processes=4, stages=4, pipeline=PipelinePlan(schedule="pipedream"))
    assert taxonomy_words(stale).pipelining == "minibatch"
    assert [rule.reproducible for rule in selection_rules(stale)] == ["medium"]
    assert taxonomy_words(stale).cells[3:] == ("-", "distributed array")
    packed = data_parallel(64, processes=4, exchange=ExchangePlan(compress="fp16"))
    assert taxonomy_words(packed).details == ("fp16",)


# Langer et al. 2020, table 2: data, model, rate, overlap, hyper-parameters, resilience, repeatable.
RULES = """
model parallel | | x | higher | + | +++ | + | trivial
model parallel, mini-batch pipelining | | x | lower | ++ | ++++ | ++ | medium
data parallel, central, sync | | | higher | + | + | + | easy
data parallel, central, async | x | | lower | +++ | ++ | +++ | hard
data parallel, decentral, sync | x | | likely lower | + | ++ | ++ | easy
data parallel, decentral, async | x | | likely lower | ++ | +++ | +++ | hard
"""


def test_the_selection_rules_are_those_of_the_paper() -> None:
    told = [[cell.strip() for cell in line.split("|")] for line in RULES.strip().splitlines()]
    assert [
        [
            rule.technique, "x" * rule.balanced_data, "x" * rule.balanced_model, rule.rate,
            rule.overlap, rule.parameters, rule.resilience, rule.reproducible,
        ]
        for rule in SELECTION_RULES.values()
    ] == told  # fmt: skip


def test_rules_of_a_plan() -> None:
    def of(name: str) -> list[str]:
        return [rule.technique for rule in selection_rules(published_system(name).plan)]

    assert of("Petuum") == ["data parallel, central, async", "model parallel"]
    assert of("SparkNet") == ["data parallel, decentral, sync"]
    assert of("COTS HPC") == ["model parallel"]
    assert selection_rules(data_parallel(64, processes=1)) == ()
    said = explain_taxonomy(published_system("GoSGD").plan)
    assert "optimisation decentral; scheduling soft-bounded async" in said
    assert "best learning rate as the cluster grows: likely lower" in said
    assert "reproducible behaviour: hard" in said
    assert "resilience to disturbance: +++" in said
