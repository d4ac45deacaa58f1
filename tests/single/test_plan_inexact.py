"""single: `headway plan --inexact`: local SGD, D-PSGD and servers beside synchronous plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.api.planning import PlanningResult
from headway.cli.main import main
from headway.errors import UsageError
from headway.planner.guidelines.inexact import InexactPlan
from headway.plans import Plan
from headway.plans.plan import check_executable

RECIPE = "support.recipes:stack"
CLUSTER = """
processes = 1
nodes = [{{ name = "a", device = "usual" }}, {{ name = "b", device = "usual" }},
         {{ name = "c", device = "usual" }}, {{ name = "d", device = "other" }}]
between = {{ rate = "{rate}", latency = "10 us" }}
[devices.usual]
{usual}
[devices.other]
{other}
"""
DEVICE = """
peak = {{ fp32 = "{peak} GFLOP/s" }}
memory = "{memory}"
memory_rate = "{stream} GB/s"
dispatch = "1 us"
sharpness = 1.0
update = "1 ns"
"""


def described(tmp_path: Path, slower: float, rate: str = "10 GB/s", memory: str = "1 GiB") -> str:
    """Four nodes, the last of them so many times as slow."""
    path = tmp_path / f"four {slower} {rate} {memory}.toml".replace("/", " per ")
    devices = {
        name: DEVICE.format(peak=4 / slow, stream=20 / slow, memory=memory)
        for name, slow in (("usual", 1), ("other", slower))
    }
    path.write_text(CLUSTER.format(rate=rate, **devices))
    return str(path)


def planned(cluster: str, **options: Any) -> PlanningResult:
    return headway.plan(RECIPE, cluster, objective="fastest", inexact=True, **options)


def by_name(result: PlanningResult) -> dict[str, InexactPlan]:
    return {one.name: one for one in result.inexact}


def test_the_choice_stays_and_nothing_inexact_is_proposed_unasked(tmp_path: Path) -> None:
    cluster = described(tmp_path, 1)
    plain = headway.plan(RECIPE, cluster, objective="fastest")
    found = planned(cluster)
    assert plain.inexact == ()
    assert found.plan.hash == plain.plan.hash
    assert found.plan.synchrony.exact
    assert {"local-2", "local-8", "local-32", "diloco-32", "d-psgd", "async", "bounded-4"} <= {
        *by_name(found)
    }
    for one in found.inexact:
        assert one.plan is not None
        assert not one.plan.synchrony.exact
        check_executable(one.plan)
        known = one.plan.prediction
        assert known is not None
        assert sum(known.parts.values()) == pytest.approx(known.seconds) == one.seconds
        assert one.rate == pytest.approx(found.outcome.question.batch / one.seconds)


def test_local_steps_divide_the_meeting(tmp_path: Path) -> None:
    found = by_name(planned(described(tmp_path, 1)))
    two, eight = found["local-2"].seconds, found["local-8"].seconds
    meeting = (two - eight) / (1 / 2 - 1 / 8)
    assert found["local-32"].seconds == pytest.approx(two - meeting * (1 / 2 - 1 / 32), rel=1e-9)


def test_a_slow_machine_changes_the_order(tmp_path: Path) -> None:
    equal, unequal = (by_name(planned(described(tmp_path, slow))) for slow in (1, 3))
    assert equal["local-32"].rate > equal["async"].rate
    assert unequal["async"].rate > 1.5 * unequal["local-32"].rate
    assert next(iter(unequal)).startswith("async")
    # In the long run a bound lets nobody be faster than the slowest; a third of the time is lost.
    assert unequal["bounded-4"].rate < 1.05 * unequal["local-32"].rate
    assert dict(unequal["bounded-4"].waits)["bound"] > 0.4
    for one in unequal.values():
        assert one.plan is not None
        assert one.plan.prediction is not None
        assert one.plan.prediction.device == "3 usual, 1 other"


def test_a_slow_link_makes_meetings_rare(tmp_path: Path) -> None:
    found = planned(described(tmp_path, 1, rate="10 MB/s"))
    rates = by_name(found)
    assert rates["local-32"].rate > 5 * max(rates["local-2"].rate, rates["async"].rate)
    assert next(iter(rates)) == "diloco-32"


def test_ranks_of_a_node_meet_inside_it_and_share_its_link(tmp_path: Path) -> None:
    path = tmp_path / "two nodes.toml"
    rates = []
    for inside in ("10 GB/s", "0.1 GB/s"):
        levels = "".join(
            f"[[levels]]\nname = '{name}'\nrate = '{rate}'\nlatency = '10 us'\n{width}"
            for name, rate, width in (("node", inside, "nodes = 1\n"), ("all", "0.1 GB/s", ""))
        )
        device = DEVICE.format(peak=4, stream=20, memory="1 GiB")
        path.write_text(
            f"processes = 2\nnodes = 2\ndevice = 'one'\n{levels}[devices.one]\n{device}"
        )
        found = by_name(planned(str(path)))
        rates.append({name: one.rate for name, one in found.items()})
        copies = found["nodes-32"].plan
        assert copies is not None
        assert (copies.workers, copies.ranks) == (2, 4)
    quick, slow = rates
    # Between four nodes nothing stays inside one.
    alone = by_name(planned(described(tmp_path, 1, rate="0.1 GB/s")))
    assert quick["async"] > 1.05 * alone["async"].rate
    assert quick["nodes-32"] > 1.5 * slow["nodes-32"]


def test_what_a_worker_holds(tmp_path: Path) -> None:
    found = planned(described(tmp_path, 1))
    model = found.outcome.question.work.graph.parameter_bytes
    held = {name: one.bytes for name, one in by_name(found).items()}
    # An outer momentum and the terms of the outer step, beside Adam's state that is averaged.
    assert held["diloco-32"] - held["local-8"] == pytest.approx(4 * model, rel=1e-6)
    assert held["async-1-server"] > held["async"]
    tight = planned(described(tmp_path, 1, memory=f"{int(held['async-1-server'] - model)} B"))
    assert "does not fit" in by_name(tight)["async-1-server"].lacks
    assert by_name(tight)["async"].plan is not None


def test_taxonomy_and_reproducibility_stand_beside_each(tmp_path: Path) -> None:
    found = by_name(planned(described(tmp_path, 1)))
    for name, technique, repeated in (
        ("local-8", "data parallel, decentral, sync", "by itself"),
        ("async", "data parallel, central, async", "by its history"),
        ("bounded-4", "data parallel, central, async", "by its history"),
    ):
        rule = found[name].rule
        assert rule is not None
        assert rule.technique == technique
        assert found[name].repeated == repeated


def test_in_words_as_data_and_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, out = described(tmp_path, 3), tmp_path / "plan.json"
    words = ["plan", RECIPE, "--cluster", cluster, "--objective", "fastest"]
    assert main([*words, "--inexact", "--take", "async", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = {row.split()[0]: row for row in shown.splitlines() if row}
    assert rows["async"].endswith("lower          by its history  yes")
    assert "do not equal the serial run's" in shown
    assert str(Plan.load(out).synchrony) == "kind=asynchronous"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inexact"] == []
    assert main([*words, "--json", "--inexact"]) == 0
    data = json.loads(capsys.readouterr().out)["inexact"]
    assert data[0]["synchrony"]["kind"] == "asynchronous"
    assert data[0]["rule"]["reproducible"] == "hard"
    assert main([*words, "--take", "async", "--out", str(out)]) != 0
    assert "--inexact" in capsys.readouterr().err


def test_plans_that_there_are_not(tmp_path: Path) -> None:
    found = planned(described(tmp_path, 1), overrides=["batch=3"])
    assert {one.lacks for one in found.inexact} == {"a batch of 3 samples for 4 devices"}
    with pytest.raises(UsageError, match="there is no plan local-7"):
        planned(described(tmp_path, 1)).save(tmp_path / "plan.json", take="local-7")
    with pytest.raises(UsageError, match=r"no tables were placed over ranks(.|\n)*split\.tables"):
        planned(described(tmp_path, 1)).save(tmp_path / "plan.json", take="tables")
