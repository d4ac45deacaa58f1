"""pure: memory and time of support vector machines before they are trained."""

from __future__ import annotations

import json
import math

import pytest

from headway.cli.main import main
from headway.cluster.link import Link
from headway.cost.device import DeviceModel
from headway.cost.machines import Machine
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.cost.support_vectors import (
    PROCESS_BYTES,
    SampleSet,
    fewest_ranks,
    fit_range,
    message_bytes,
    outer_step,
    plan_ranks,
    rank_memory,
    value_seconds,
)


def machine(*, rate: float = 86e9, stream: float = 10e9, latency: float = 0.0) -> Machine:
    """One core, as the one on which the sets below were measured, and a network of 1 GB/s."""
    device = DeviceModel(
        name="core", peak={"fp32": rate}, memory=16e9, memory_rate=stream, efficiency=1.0
    )
    level = LinkLevel(name="all", width=math.inf, link=Link(rate=1e9, latency=latency))
    return Machine(device=device, network=HierarchicalNetwork((level,)), dtype="fp32")


DENSE = SampleSet(rows=1_000_000, columns=100)
SPARSE = SampleSet(rows=1_000_000, columns=50_000, nonzeros=20)


@pytest.mark.parametrize("data", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_memory_is_rows_by_ranks(data):
    """All but the process, the working set and support vectors, which every rank has."""
    one, eight = (rank_memory(data, ranks) for ranks in (1, 8))
    shared = {"working set", "blocks"}
    for name, size in one.parts.items():
        expected = size if name in shared else size / 8
        assert eight.parts[name] == pytest.approx(expected, rel=1e-6)
    assert one.per_support == eight.per_support
    assert one.at_most(10) - one.at_most(0) == pytest.approx(10 * one.per_support)
    assert one.at_most(0) == PROCESS_BYTES + sum(one.parts.values())


def test_parts_of_memory_by_hand():
    parts = rank_memory(DENSE, 4).parts
    assert parts["samples"] == 250_000 * 100 * 8
    assert parts["scaled copy"] == 250_000 * 102 * 4
    parts = rank_memory(SPARSE, 4).parts
    assert parts["samples"] == 250_000 * (20 * 12 + 8)
    assert "samples of a pair" not in parts
    three = rank_memory(SampleSet(rows=1_000_000, columns=100, classes=3), 4).parts
    assert three["samples of a pair"] == three["samples"]


def test_no_part_is_a_matrix_of_all_pairs():
    sizes = [
        sum(rank_memory(SampleSet(rows=n, columns=10), 1).parts.values()) for n in (10**6, 10**7)
    ]
    assert sizes[1] < 10 * sizes[0]


def test_the_rank_that_has_most_counts():
    equal, more = rank_memory(DENSE, 4), rank_memory(DENSE, 4, rows=400_000)
    assert more.parts["samples"] == 1.6 * equal.parts["samples"]


def test_parts_of_an_outer_step_by_hand():
    step = outer_step(DENSE, 4, machine(latency=1e-4), active=0.5)
    own, value = 125_000, (2 * 102 + 125) / 86e9
    assert value_seconds(DENSE, machine().device) == pytest.approx(value)
    assert step.parts["kernel values"] == pytest.approx(own * 256 * value)
    assert step.parts["choice"] == pytest.approx(own * 15 * 8 / 10e9)
    # A ring of four: three steps, in which three quarters of all that is gathered arrive.
    candidates = 4 * 8 * (7 + 5 * 512)
    assert step.parts["all-gather of candidates"] == pytest.approx(
        3 * 1e-4 + 3 / 4 * candidates / 1e9
    )
    most = 64 + math.sqrt(2 * 64 * math.log(4))
    rows = 4 * most * 800
    assert step.parts["all-gather of rows"] == pytest.approx(
        2 * 3 * 1e-4 + 3 / 4 * (rows + 32) / 1e9
    )
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.bound_by == "kernel values"


def test_alone_nothing_is_sent():
    parts = outer_step(DENSE, 1, machine(latency=1)).parts
    assert parts["all-gather of candidates"] == parts["all-gather of rows"] == 0


def test_sparse_rows_cost_their_nonzeros():
    assert message_bytes(SPARSE) == 8 + 16 * 20
    wider = SampleSet(rows=1_000_000, columns=5_000_000, nonzeros=20)
    assert value_seconds(SPARSE, machine().device) == value_seconds(wider, machine().device)
    assert value_seconds(SPARSE, machine().device) < value_seconds(DENSE, machine().device)


@pytest.mark.parametrize(
    ("data", "vectors", "steps", "seconds"),
    [
        (SampleSet(rows=16_000, columns=16), 2_800, 146, 1.2),
        (SampleSet(rows=116_600, columns=74), 2_600, 73, 4.5),
        (SampleSet(rows=39_073, columns=134, nonzeros=14), 14_100, 401, 10),
    ],
    ids=["letter", "KDD04", "Adult"],
)
def test_what_was_measured_lies_in_the_range(data, vectors, steps, seconds):
    """CPU seconds of one core."""
    share = vectors / data.rows
    found = fit_range(data, 1, machine(), support=(share, share))
    assert found.steps[0] <= steps <= found.steps[1]
    assert found.seconds[0] <= seconds <= found.seconds[1]
    assert found.seconds[1] < 6 * found.seconds[0]


def test_fewest_ranks_is_the_first_that_fits():
    room = 4e9
    least = fewest_ranks(DENSE, memory=room, support=(0.1, 0.2))
    assert least is not None
    assert least > 1
    before, at = (
        plan.fits
        for plan in plan_ranks(
            DENSE, (least - 1, least), machine(), memory=room, support=(0.1, 0.2)
        )
    )
    assert (before, at) == (False, True)
    # Every rank has the machine at the end.
    assert fewest_ranks(DENSE, memory=PROCESS_BYTES + 1e8, support=(0.1, 0.2)) is None


# -- headway plan svm ------------------------------------------------------------------------------


def planned(capsys, *words: str) -> str:
    assert main(["plan", "svm", *words]) == 0
    return capsys.readouterr().out


HIGGS = ("--rows", "11000000", "--columns", "28", "--cluster", "dgx-a100")
URL = ("--rows", "2400000", "--columns", "3200000", "--nonzeros", "115", "--cluster", "cpu")


@pytest.mark.parametrize("words", [HIGGS, URL], ids=["HIGGS", "URL"])
def test_the_command_tells_memory_time_and_what_binds(words, capsys):
    said = planned(capsys, *words)
    for text in ("samples x", "kernel values", "all-gather of candidates", "all-gather of rows",
                 "support vectors", "scaled copy", "whole fit", "it fits on 1 rank",
                 "assumed:"):  # fmt: skip
        assert text in said
    facts = json.loads(planned(capsys, *words, "--json"))
    assert facts["fewest_ranks"] == 1
    for plan in facts["ranks"]:
        assert plan["step_seconds"] == pytest.approx(sum(plan["step"].values()))
        assert plan["bound_by"] == max(plan["step"], key=plan["step"].get)
        most = (
            sum(plan["memory"].values())
            + plan["bytes_per_support_vector"] * (plan["support_vectors"][1])
        )
        assert plan["most_bytes"] == pytest.approx(most)
        assert plan["fits"] == (plan["most_bytes"] <= facts["memory_bytes"])
        assert plan["seconds"][0] <= plan["seconds"][1]


def test_the_command_says_how_many_ranks_it_takes(capsys):
    words = (*HIGGS, "--nodes", "4", "--memory", "10 GiB", "--ranks", "1,2")
    facts = json.loads(planned(capsys, *words, "--json"))
    assert [plan["fits"] for plan in facts["ranks"]] == [False, False]
    least = facts["fewest_ranks"]
    assert f"it fits on none of these; it does on {least} ranks" in planned(capsys, *words)
    more = json.loads(planned(capsys, *words[:-1], f"{least - 1},{least}", "--json"))
    assert [plan["fits"] for plan in more["ranks"]] == [False, True]
    none = planned(capsys, *HIGGS, "--memory", "2 GiB")
    assert "it fits on no number of ranks" in none
    assert "too much" in none


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rows", "1", "--columns", "0", "--cluster", "cpu"), "--columns 0: at least 1"),
        ((*URL, "--nonzeros", "0"), "--nonzeros"),
        ((*HIGGS, "--ranks", "16"), "the cluster has 8 ranks"),
        ((*HIGGS, "--ranks", "0"), "--ranks: at least 1"),
        ((*HIGGS, "--support", "0.4..0.2"), "--support: '0.4..0.2' is no share"),
        ((*HIGGS, "--support", "a"), "--support: 'a' is no share"),
        ((*HIGGS, "--working-set", "1"), "--working-set 1: 2 to 1024"),
        ((*HIGGS, "--memory", "much"), "--memory"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, said, capsys):
    assert main(["plan", "svm", *words]) == 1
    assert said in capsys.readouterr().err
