"""single: `headway schedule` draws, measures, compares and judges tables; `train` takes one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway.api.schedule_table import recipe_overrides
from headway.cli.main import main
from headway.cli.schedule.figures import ScheduleCosts, evaluate_schedule
from headway.errors import DocumentError, PlanError
from headway.launch.local import LaunchResult
from headway.plans import Plan, pipelined
from headway.report.trace_export import check_chrome_trace
from headway.run.recipe.check import check_recipe
from headway.run.training.job import TrainingOutcome
from headway.schedule.csv_format import from_csv, to_csv
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from support import schedule_command
from support.golden import check_golden

NAMES = list(SCHEDULES)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


run, facts = schedule_command.run, schedule_command.facts


# -- list and show -------------------------------------------------------------------------------


def test_list_has_every_schedule_with_source_and_options(run, facts):
    code, out, _ = run("list")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == NAMES
    for line, kind in zip(lines, SCHEDULES.values(), strict=True):
        assert kind.about in line
        assert kind.source in line
        assert all(f"--{option}" in line for option in kind.options)
    assert [row["name"] for row in facts("list")] == NAMES


def test_show_is_what_it_was(run):
    code, out, _ = run("show", "chimera", "--stages", 8, "--microbatches", 8)
    assert code == 0
    check_golden("cli/schedule_show.txt", out)


def test_aligned_is_the_paper_s_figure(run):
    _, out, _ = run("show", "chimera", "--aligned")
    rows = ["P0 0.12c3da.b", "P1 .0213cadb.", "P2 .2031acbd.", "P3 2.30a1bc.d"]
    assert out.splitlines()[3:7] == rows
    code, _, err = run("show", "1f1b", "--aligned")
    assert (code, "1f1b is an order" in err) == (1, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backward", ["2", "3"])
def test_formula_and_table_agree(facts, name, backward):
    found = facts("show", name, "--stages", 4, "--microbatches", 8, "--backward", backward)
    known = found["formula"]
    if known is None or not known["exact"]:
        return
    assert found["bubble"] == pytest.approx(known["bubble"])
    for what in ("activations", "weights"):
        assert [min(found[what]), max(found[what])] == pytest.approx(known[what])


def test_most_schedules_have_a_formula(facts):
    known = [facts("show", name, "--microbatches", 8)["formula"] for name in NAMES]
    assert sum(formula is not None for formula in known) >= 10


def test_no_formula_for_uneven_split_backwards(run, facts):
    words = ("show", "zb-h1", "--microbatches", 8)
    assert facts(*words)["formula"]
    assert facts(*words, "--input-grad", 0.5, "--weight-grad", 1.5)["formula"] is None
    words = ("show", "1f1b", "--microbatches", 8, "--input-grad", 0.5, "--weight-grad", 1.5)
    assert facts(*words)["formula"]
    assert "backward 2 (input 0.5, weights 1.5)" in run(*words)[1]


def test_costs_have_their_meaning(facts):
    def step(*words):
        return facts("show", "1f1b", "--stages", 2, "--microbatches", 1, *words)["step"]

    assert step() == 2 * 1 + 2 * 2
    assert step("--backward", 3) == 2 * 1 + 2 * 3
    assert step("--forward", 2) == 2 * 2 + 2 * 4
    assert step("--input-grad", 1, "--weight-grad", 4) == 2 * 1 + 2 * 5
    assert step("--latency", 1) == 6 + 2 * 1
    assert step("--latency", 1, "--message", 0.5) == 6 + 2 * 1.5


def test_options_reach_the_generator(facts):
    words = ("show", "chimera", "--stages", 8, "--microbatches", 8)
    assert facts(*words)["weights"] == [2] * 8
    assert facts(*words, "--pipes", 4)["weights"] == [4] * 8
    assert facts(*words, "--mode", "halving")["schedule"] == "chimera-halving"
    words = ("show", "interleaved", "--stages", 4, "--microbatches", 4)
    assert facts(*words, "--virtual", 3)["stages"] == 12


def test_messages_make_a_formula_one_without_messages(run):
    words = ("show", "1f1b", "--stages", 2)
    assert "without messages" not in run(*words)[1]
    assert "without messages" in run(*words, "--latency", 1)[1]


def test_versions_and_steady_state_are_said(run):
    _, out, _ = run("show", "pipedream", "--microbatches", 8)
    assert "versions of weights    4 3 2 1" in out
    assert "0.0% = 0, steady state" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "1f1b", "--pipes", "2"), "1f1b does not take --pipes"),
        (("show", "zbv", "--mode", "direct", "--virtual", "2"), "take --virtual, --mode"),
        (("show", "chimera", "--virtual", "2"), "It takes --pipes, --mode"),
        (("show", "chimaera"), "no schedule 'chimaera'; did you mean chimera"),
        (("show", "gpipe", "--stages", "0"), "--stages 0: at least 1"),
        (("show", "gpipe", "--microbatches", "0"), "--microbatches 0: at least 1"),
        (("show", "gpipe", "--forward", "0"), "--forward 0: more than 0"),
        (("show", "gpipe", "--latency", "-1"), "--latency -1"),
        (("show", "gpipe", "--backward", "nan"), "--backward nan: a time"),
        (("show", "gpipe", "--input-grad", "1"), "go together"),
        (
            ("show", "gpipe", "--backward", "2", "--input-grad", "1", "--weight-grad", "1"),
            "say one",
        ),
        (("show", "gpipe", "--csv", "no/where.csv"), "no/where.csv: cannot be written"),
        (("compare", "--stages", "-1"), "--stages -1: at least 1"),
        (("check", "nothing.csv"), "nothing.csv: cannot be read"),
        (("check", "nothing.csv", "--pipes", "0"), "--pipes 0: at least 1"),
    ],
)
def test_what_is_refused(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert said in err


def test_an_impossible_schedule_says_why(run):
    code, _, err = run("show", "chimera", "--stages", 5)
    assert code == 2
    assert "even number of stages" in err


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_written_table_is_valid_and_costs_the_same(facts, name):
    words = ("--forward", 1, "--backward", 3, "--latency", 0.25)
    shown = facts("show", name, "--microbatches", 8, "--csv", "x.csv", *words)
    checked = facts("check", "x.csv", *words)
    assert checked.pop("valid")
    assert shown | {"formula": None} == checked


def test_a_table_of_torch_is_read_back(run, facts):
    shown = facts("show", "chimera", "--microbatches", 8, "--torch-csv", "t.csv")
    assert "0F0" in Path("t.csv").read_text()
    assert facts("check", "t.csv", "--pipes", 2)["step"] == shown["step"]
    assert run("check", "t.csv")[0] == 2


def test_the_timeline_is_the_timed_table(facts):
    step = facts("show", "zbv", "--timeline", "t.json")["step"]
    trace = json.loads(Path("t.json").read_text())
    assert check_chrome_trace(trace) == []
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == 4 * 2 * 4 * 3
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(step * 1e6)


def written(svg):
    """The texts of a picture."""
    return ["".join(part.itertext()).strip() for part in ElementTree.fromstring(svg).iter()]


def test_pictures_of_one_schedule(facts):
    facts("show", "chimera", "--svg", "a.svg", "--png", "a.png")
    facts("show", "chimera", "--svg", "b.svg", "--png", "b.png")
    for kind in ("svg", "png"):
        assert Path(f"a.{kind}").read_bytes() == Path(f"b.{kind}").read_bytes()
    assert Path("a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = Path("a.svg").read_text()
    texts = written(text)
    assert {"P0", "P3", "forward, up", "backward, down", "idle"} <= set(texts)
    assert "chimera: step 16, bubble 25.0%" in texts
    assert "#0101" not in text
    for hue in ("forward", "backward", "data", "series-1"):  # a bar for each cell, and the legend
        assert text.count(f"fill: var(--{hue},") == 8 + 1


@pytest.mark.slow
def test_the_picture_of_all_cuts_off_what_is_much_longer(facts):
    rows = facts("compare", "--svg", "all.svg")
    text = Path("all.svg").read_text()
    for row in rows:
        assert (f">{row['name']}<" in text) == row["possible"]
    assert text.count("cut off") == 1  # GEMS


# -- compare -------------------------------------------------------------------------------------


def test_compare_has_the_figures_of_each_schedule(run, facts):
    rows = {row["name"]: row for row in facts("compare", "--stages", 4, "--microbatches", 8)}
    assert list(rows) == NAMES
    for name, row in rows.items():
        found = evaluate_schedule(
            make_schedule(name, stages=4, microbatches=8), ScheduleCosts(), options={}
        )
        assert row["step"] == found.stats.makespan
        assert row["activations"] == list(found.stats.peak_activations)
    assert (rows["chimera"]["step"], rows["1f1b"]["step"]) == (30, 33)
    _, out, _ = run("compare", "--stages", 4, "--microbatches", 8)
    lines = {line.split()[0]: line.split() for line in out.splitlines()[3:-3]}
    assert lines["chimera"][1:] == ["30", "20.0%", "3", "to", "4", "2", "48"]
    assert lines["pipedream"][-3:] == ["in", "every", "step"]
    assert lines["chimera-doubling"][-1] == "recomputes"


def test_stages_recompute_as_the_user_says(run, facts):
    words = ("show", "1f1b", "--microbatches", 8)
    row = facts(*words, "--recompute", "0,1", "--kept", 0.1)
    assert (row["recompute"], row["formula"]) == ([0, 1], None)
    assert row["activations"] == [1.3, 1.2, 2, 1]
    assert facts(*words, "--recompute", "all")["recompute"] == [0, 1, 2, 3]
    assert facts("show", "chimera-doubling", "--recompute", "none")["recompute"] == []
    assert "8 micro-batches, recomputes in stages 0, 1;" in run(*words, "--recompute", "1,0")[1]
    rows = facts("compare", "--stages", 4, "--recompute", "1")
    assert all(row["recompute"] == [1] for row in rows if row["possible"])
    for said in ("4", "x", "0,,1"):
        code, _, err = run(*words, "--recompute", said)
        assert code == 1
        assert f"--recompute {said}" in err


def test_compare_says_which_step_is_shortest(run, facts):
    rows = facts("compare", "--microbatches", 16)
    least = min(row["step"] for row in rows if row["flush"])
    best = [row["name"] for row in rows if row["flush"] and row["step"] == pytest.approx(least)]
    _, out, _ = run("compare", "--microbatches", 16)
    assert out.splitlines()[-1].endswith(f": {', '.join(best)}")
    _, out, _ = run("compare", "--stages", 1)  # all ranks are always busy
    assert "1f1b" in out.splitlines()[-1]
    assert "pipedream" not in out.splitlines()[-1]


def test_compare_shows_the_impossible_with_its_reason(run, facts):
    rows = {row["name"]: row for row in facts("compare", "--stages", 5, "--microbatches", 7)}
    assert "even number of stages" in rows["chimera"]["problems"][0]
    assert rows["1f1b"]["possible"]
    code, out, _ = run("compare", "--stages", 5, "--microbatches", 7)
    assert code == 0
    assert "chimera" in out
    assert "impossible: 5 ranks: Chimera needs an even number of stages" in out


# -- check ---------------------------------------------------------------------------------------


def broken(path="bad.csv"):
    """A table with two wrong cells."""
    text = to_csv(make_schedule("1f1b", stages=2, microbatches=3))
    Path(path).write_text(text.replace("d0.s0.F.1", "d0.s0.F.2").replace("d0.s1.B.0", "."))
    return Path(path)


def test_check_lists_all_violations_with_their_cells(run):
    broken()
    code, out, err = run("check", "bad.csv")
    assert (code, out) == (2, "")
    assert err.startswith("HW-2001 bad.csv: the table cannot be executed: 3 problems")
    assert "rank 0 has no d0.s0.F.1" in err
    assert "rank 1 has no d0.s1.B.0" in err
    assert "rank 0, cell 3 (d0.s0.F.2)" in err
    code, out, _ = run("check", "bad.csv", "--json")
    verdict = json.loads(out)
    assert code == 2
    assert not verdict["valid"]
    assert ["duplicate", 0, 3] in [[v["rule"], v["rank"], v["cell"]] for v in verdict["violations"]]


def test_check_shows_a_valid_table_written_by_hand(run):
    Path("hand.csv").write_text("d0.s0.F.0,d0.s0.B.0\nd0.s1.F.0,d0.s1.B.0\n")
    code, out, _ = run("check", "hand.csv", "--svg", "hand.svg")
    assert code == 0
    assert out.splitlines()[0] == "hand.csv: valid"
    assert "P0 0....aa" not in out
    assert "P0 0...aa" in out
    assert "formula" not in out
    assert Path("hand.svg").exists()


def test_cells_that_cannot_be_read_are_a_document_error(run):
    Path("odd.csv").write_text("d0.s0.F.0,what\n")
    code, _, err = run("check", "odd.csv")
    assert code == 1
    assert "odd.csv" in err
    assert "'what' is no action" in err


# -- the documentation ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/examples.md", "docs/pipelines.md"])
def test_the_pages_show_every_digit_that_is_printed(run, page):
    text = (ROOT / page).read_text()
    block = r"^\$ headway schedule ((?:show|compare|search|choose) [^>\n]*)\n"
    block += r"(.*?)(?=^\$|^\.\.\.|^```)"
    found = re.findall(block, text, flags=re.DOTALL | re.MULTILINE)
    assert found
    for words, shown in found:
        _, out, _ = run(*shlex.split(words))
        assert shown in out


def test_the_committed_picture_is_the_script_s():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from make_images import schedules_picture
    finally:
        sys.path.remove(str(ROOT / "docs"))
    committed = (ROOT / "docs/images/pipelines.svg").read_text()
    assert written(schedules_picture()) == written(committed)


# -- without torch -------------------------------------------------------------------------------

CHOOSE = (
    "choose --ranks 4 --batch 8 --layers 4 --forward 1ms --activation 1MB --held 1MB --weights 1MB "
    "--memory 1GB --bandwidth 1GB/s"
)
ALONE = """
import sys
from headway.cli.main import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0, words
print(*[name for name in ("torch", "scipy") if name in sys.modules])
"""


def test_no_command_imports_torch():
    words = ["show zbv --svg a.svg --csv a.csv --timeline a.json", "compare --stages 2", "list"]
    words += ["search --placement v", CHOOSE]
    lines = [f"schedule {word}" for word in [*words, "check a.csv"]]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *lines], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == ""


# -- train ---------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """The calls of launch_local; no process is started."""
    calls = []
    outcome = TrainingOutcome(steps=3, loss=0.5, validation=None, stopped_by=None)

    def launch(entry, arguments, **options):
        calls.append((arguments[0], options["processes"]))
        return LaunchResult(results=[outcome], stopped_by=None, attempts=1)

    monkeypatch.setattr("headway.launch.local.launch_local", launch)
    monkeypatch.setattr("headway.api.training.start_forkserver", lambda ranks: None)
    return calls


def test_train_lays_the_table_over_the_recipe(launched):
    schedule = make_schedule("chimera", stages=4, microbatches=4)
    Path("x.csv").write_text(to_csv(schedule))
    assert main(["train", "support.recipes:mlp", "--schedule", "x.csv"]) == 0
    job, processes = launched[0]
    assert processes == 4
    document = check_recipe(job.recipe, job.overrides).document
    assert document.stages == 4
    assert from_csv(document.pipeline.table) == schedule
    assert main(["train", "support.recipes:mlp", "--schedule", "x.csv", "-n", "8"]) == 0
    assert launched[1][1] == 8


def test_processes_are_those_of_the_recipe_s_stages(launched):
    assert main(["train", "support.recipes:mlp", "--set", "stages=3"]) == 0
    assert launched[0][1] == 3


def test_a_table_and_a_plan_contradict_each_other(launched, capsys):
    plan: Plan = pipelined(12, processes=2, stages=2)
    Path("plan.json").write_text(json.dumps(plan.to_dict()))
    Path("x.csv").write_text(to_csv(make_schedule("1f1b", stages=2, microbatches=4)))
    words = ["train", "support.recipes:mlp", "--schedule", "x.csv", "--plan", "plan.json"]
    assert main(words) == 1
    assert "--schedule x.csv contradicts --plan plan.json" in capsys.readouterr().err
    assert launched == []


def test_train_refuses_a_table_before_it_starts_anything(launched, capsys):
    broken()
    assert main(["train", "support.recipes:mlp", "--schedule", "bad.csv"]) == 2
    assert "rank 0 has no d0.s0.F.1" in capsys.readouterr().err
    assert launched == []


def test_a_table_of_torch_becomes_one_of_headway():
    schedule = make_schedule("zb-h1", stages=2, microbatches=4)
    assert main(["schedule", "show", "zb-h1", "--stages", "2", "--microbatches", "4",
                 "--torch-csv", "t.csv"]) == 0  # fmt: skip
    stages, table = recipe_overrides(Path("t.csv"))
    assert stages == "stages=2"
    document = check_recipe("support.recipes:mlp", (stages, table)).document
    assert from_csv(document.pipeline.table).order == schedule.order


def test_a_name_that_is_not_ascii_comes_through():
    Path("näme \U0001f600.csv").write_text("d0.s0.F.0,d0.s0.B.0\nd0.s1.F.0,d0.s1.B.0\n")
    overrides = recipe_overrides(Path("näme \U0001f600.csv"))
    document = check_recipe("support.recipes:mlp", overrides).document
    assert from_csv(document.pipeline.table).name == "näme \U0001f600"


def test_overrides_of_a_bad_file():
    with pytest.raises(PlanError, match="3 problems"):
        recipe_overrides(broken())
    with pytest.raises(DocumentError):
        recipe_overrides(Path("nothing.csv"))
