"""single: the command line: overview, errors and exit codes, `plan`, and what `train` decides."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import headway
from headway.api import training
from headway.api.training import default_plan
from headway.cli import main as cli
from headway.cli.terminal.console import error_text
from headway.errors import (
    CheckpointDamaged,
    Diverged,
    HeadwayError,
    NotEqual,
    PlanError,
    RunDirectoryTaken,
    Stalled,
    UsageError,
    os_reason,
    shown_path,
)
from headway.launch.local import LaunchResult
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.check import check_recipe
from headway.run.training.job import TrainingOutcome
from support.golden import check_golden
from support.patience import patient

RECIPE = """
    name = "small"
    batch = "8 samples"
    stop = "3 steps"

    [model]
    call = "torch.nn:Linear"
    in_features = 2
    out_features = 1

    [data]
    call = "small_data:data"

    [loss]
    criterion = "torch.nn:MSELoss"

    [optimizer]
    call = "torch.optim:SGD"
    lr = 0.1
"""
DATA = """
    import torch

    def data():
        return torch.utils.data.TensorDataset(torch.ones(20, 2), torch.ones(20, 1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a recipe, outside of any world."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.toml").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "small_data.py").write_text(textwrap.dedent(DATA))
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """The calls of launch_local and of work_here; no process is started."""
    calls = []
    outcome = TrainingOutcome(steps=3, loss=0.5, validation=None, stopped_by=None)

    def launch_local(entry, arguments, **options):
        calls.append((arguments[0], options))
        return LaunchResult(results=[outcome], stopped_by=None, attempts=1)

    def work_here(entry, arguments, *, place, **options):
        calls.append((arguments[0], {"place": place, **options}))
        return outcome

    monkeypatch.setattr("headway.launch.local.launch_local", launch_local)
    monkeypatch.setattr("headway.launch.worker.run_rank_here", work_here)
    monkeypatch.setattr(training, "start_forkserver", lambda processes: None)
    return calls


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- overview -------------------------------------------------------------------------------------


def test_the_overview_needs_neither_torch_nor_the_parser():
    shown = python(
        "import sys\nfrom headway.cli.main import main\nassert main(['--help']) == 0\n"
        "heavy = {'torch', 'pydantic', 'cyclopts', 'rich', 'numpy', 'inspect'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    check_golden("cli/overview.txt", shown)


def test_the_page_of_train_needs_no_torch(capsys):
    shown = python(
        "import sys\nfrom headway.cli.main import main\nassert main(['train', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    for option in ("--processes", "--directory", "--resume", "--plan", "--set", "--trace-steps"):
        assert option in shown


def test_the_overview_begins_with_what_is_used_most():
    shown = cli.overview().splitlines()
    at = shown.index("Train a model")
    assert [line.split()[0] for line in shown[at + 1 : at + 4]] == ["train", "verify", "report"]


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.words)
def test_the_help_of_a_command_begins_with_an_example_that_it_takes(command, capsys):
    assert cli.main([*command.words.split(), "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"Example: headway {command.words} {command.example}".rstrip()
    words = [*command.words.split(), *shlex.split(command.example)]
    cli.build_app().parse_args(cli.parser_words(words), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("words", [[], ["-h"], ["help"], ["--help"]])
def test_ways_to_the_overview(words, capsys):
    assert cli.main(words) == 0
    assert "Usage: headway COMMAND" in capsys.readouterr().out


def test_a_verdict_for_a_missing_directory_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="there is no run directory"):
        headway.verify("support.recipes:trapped", directory=tmp_path / "none")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == headway.__version__


def test_every_command_exists_and_has_a_page(capsys):
    for command in cli.COMMANDS:
        assert cli.main([*command.words.split(), "--help"]) == 0
        assert f"Usage: headway {command.words}" in capsys.readouterr().out


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["plan", "shw"], "there is no command 'plan shw'; did you mean plan show or plan svm?"),
        (
            ["zzz"],
            "legal: checkpoint, cluster, collective, compare, demo, evaluate, exchange, explain, "
            "import, launch, plan, report, schedule, segment, simulate, study, taxonomy, train, "
            "verify",
        ),
        (["--trance"], "there is no option '--trance'"),
        (["train", "x.toml", "--procesess", "2"], "Did you mean --processes?"),
        (["train", "x.toml", "--processes", "two"], "--processes"),
        (["train", "x.toml", "--device", "tpu"], "--device"),
        (["train"], "headway train --help"),
        (["plan", "show"], "headway plan show --help"),
    ],
)
def test_wrong_words_are_a_usage_error(words, message, capsys):
    assert cli.main(words) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("HW-1001 ")
    assert message in shown
    assert "Traceback" not in shown


ERRORS = [
    (UsageError("no"), 1),
    (PlanError("this plan cannot exist", problems=["one", "two"], where="plan.json"), 2),
    (Diverged("the loss is nan", where="rank 1, step 17", why="A", fix="B"), 3),
    (CheckpointDamaged("damaged"), 3),
    (NotEqual("different"), 4),
    (Stalled("rank 3 is missing"), 5),
    (RuntimeError("a bug"), 70),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=[type(e).__name__ for e, _ in ERRORS])
def test_exit_codes(error, code, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    assert cli.main(["plan"]) == code
    shown = capsys.readouterr().err
    if isinstance(error, HeadwayError):
        assert shown == error_text(error) + "\n"
        assert cli.main(["plan", "--trace"]) == code
        assert "Traceback" in capsys.readouterr().err
    elif code == 70:
        assert "Traceback" in shown
        assert "HW-9000 this is a bug in headway: RuntimeError: a bug" in shown


def test_the_form_of_an_error():
    check_golden("cli/error.txt", "\n\n".join(error_text(e) for e, _ in ERRORS[:6]))


def test_warnings_are_shown_without_source_lines(monkeypatch, capsys):
    monkeypatch.setattr(
        cli, "run_command", lambda words: warnings.warn("beware", stacklevel=1) or 0
    )
    assert cli.main(["plan"]) == 0
    assert capsys.readouterr().err == "warning: beware\n"


def test_a_pipe_that_closes_is_no_bug(folder):
    data_parallel(8, processes=2).save(Path("plan.json"))
    command = f"{sys.executable} -m headway plan show plan.json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", f"sleep 0.01; {command}"], capture_output=True, text=True, timeout=60
    )
    assert "HW-9000" not in done.stderr
    assert "Traceback" not in done.stderr


# -- plan -----------------------------------------------------------------------------------------


@pytest.fixture
def plans(folder):
    data_parallel(64, processes=2, microbatch=8).save(Path("old.json"))
    data_parallel(64, processes=4, exchange=ExchangePlan(overlap=False)).save(Path("new.json"))
    broken = json.loads(Path("old.json").read_text())
    broken["batch"]["samples"] = 0
    broken["exchange"]["axis"] = "dota"
    Path("broken.json").write_text(json.dumps(broken, indent=2))
    broken["mash"] = broken.pop("mesh")
    Path("misspelt.json").write_text(json.dumps(broken, indent=2))
    return folder


def test_plan_show(plans, capsys):
    assert cli.main(["plan", "show", "old.json"]) == 0
    assert "64 samples = 2 ranks x 4 micro-batches x 8 samples" in capsys.readouterr().out
    assert cli.main(["plan", "show", "old.json", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["batch"] == {
        "samples": 64,
        "microbatch": 8,
        "parts": None,
        "shares": [],
        "norm": "local",
    }
    assert cli.main(["plan", "show", "broken.json"]) == 2
    assert "HW-2001" in capsys.readouterr().err


def test_plan_check(plans, capsys):
    assert cli.main(["plan", "check", "old.json", "new.json"]) == 0
    assert capsys.readouterr().out.count("legal") == 2
    assert cli.main(["plan", "check", "old.json", "broken.json", "misspelt.json", "none.json"]) == 2
    shown = re.sub(r"plan [0-9a-f]{12}", "plan HASH", capsys.readouterr().out)
    check_golden("cli/plan_check.txt", shown)
    assert cli.main(["plan", "check", "none.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["code"] == "HW-1101"
    assert cli.main(["plan", "check"]) == 1


def test_plan_diff(plans, capsys):
    assert cli.main(["plan", "diff", "old.json", "new.json"]) == 1
    check_golden("cli/plan_diff.txt", capsys.readouterr().out)
    assert cli.main(["plan", "diff", "old.json", "old.json"]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert cli.main(["plan", "diff", "old.json", "new.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


# -- train ----------------------------------------------------------------------------------------


def test_train_hands_over_what_was_asked(folder, launched, capsys):
    words = ["train", "recipe.toml", "-n", "2", "--set", "stop=5 steps", "--set", "clip=1"]
    assert cli.main([*words, "--timeout", "30 s", "--restarts", "1", "--trace-steps", "7"]) == 0
    (job, options) = launched[0]
    assert (job.recipe, job.overrides) == ("recipe.toml", ("stop=5 steps", "clip=1"))
    assert (job.timeout_seconds, job.trace_every, job.resume) == (30.0, 7, False)
    assert job.directory == Path("runs/small-001")
    assert (options["processes"], options["policy"].limit) == (2, 1)
    assert options["first_attempt"] == 0
    assert "runs/small-001" in capsys.readouterr().out


def test_each_run_gets_a_directory_of_its_own(folder, launched):
    for number in (1, 2, 3):
        assert cli.main(["train", "recipe.toml"]) == 0
        assert launched[-1][0].directory == Path(f"runs/small-{number:03d}")
    Path("runs/small-041").mkdir()
    Path("runs/smaller-100").mkdir()
    assert cli.main(["train", "recipe.toml"]) == 0
    assert launched[-1][0].directory == Path("runs/small-042")


def hold_run(path: str, attempt: int = 0) -> None:
    Path(path).mkdir(parents=True)
    Path(path, "recipe.json").write_text("{}")
    Path(path, "events.jsonl").write_text(json.dumps({"event": "start", "attempt": attempt}) + "\n")


def test_a_directory_that_holds_a_run(folder, launched, capsys):
    hold_run("mine", attempt=2)
    assert cli.main(["train", "recipe.toml", "-d", "mine"]) == 1
    assert f"{RunDirectoryTaken.code} mine: already holds a run" in capsys.readouterr().err
    assert not launched
    assert cli.main(["train", "recipe.toml", "-d", "mine", "--resume"]) == 0
    job, options = launched[0]
    assert (job.resume, job.directory, options["first_attempt"]) == (True, Path("mine"), 3)


def test_resume_takes_the_newest_run(folder, launched, capsys):
    assert cli.main(["train", "recipe.toml", "--resume"]) == 1
    assert "there is no run of small to resume" in capsys.readouterr().err
    hold_run("runs/small-001")
    hold_run("runs/small-007")
    Path("runs/small-009").mkdir()
    assert cli.main(["train", "recipe.toml", "--resume"]) == 0
    assert launched[0][0].directory == Path("runs/small-007")


def test_resume_where_nothing_is_yet_starts(folder, launched, capsys):
    Path("fresh").mkdir()
    assert cli.main(["train", "recipe.toml", "-d", "fresh", "--resume"]) == 0
    assert "fresh holds no run yet" in capsys.readouterr().err


def test_resume_of_a_misspelt_directory_names_the_nearest_run(folder, launched, capsys):
    hold_run("spirals-1")
    Path("spirals-2").mkdir()
    assert cli.main(["train", "recipe.toml", "-d", "spiral-1", "--resume"]) == 1
    said = capsys.readouterr().err
    assert "spiral-1: there is no such run to resume; did you mean spirals-1?" in said
    assert not launched
    assert not Path("spiral-1").exists()


PATHS = ["file", "file/below", "/proc/none", "x" * 300, f"{'x' * 300}/below"]
COMMANDS = {
    "train -d PATH": "recipe.toml",
    "train --resume -d PATH": "recipe.toml",
    "train --plan PATH": "recipe.toml",
    "train --schedule PATH": "recipe.toml",
    "train --emulate PATH": "recipe.toml",
    "report PATH": "",
    "checkpoint show PATH": "",
    "plan show PATH": "",
    "plan check PATH": "",
    "explain PATH": "",
    "cluster show PATH": "",
    "schedule check PATH": "",
}


@pytest.mark.parametrize("path", PATHS, ids=["file", "below a file", "proc", "long", "below long"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_used_is_named_in_one_error(command, path, folder, launched, capsys):
    Path("file").write_text("not a table")
    words = command.replace("PATH", path).split()
    words[1:1] = filter(None, [COMMANDS[command]])
    assert cli.main(words) in {1, 2, 3}
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert path.partition("/")[0][:20] in said
    assert not launched


def test_a_wrong_recipe_is_reported_without_torch(folder):
    Path("recipe.toml").write_text(textwrap.dedent(RECIPE).replace("batch =", "bach ="))
    shown = python(
        "import sys, io\nfrom headway.cli.main import main\n"
        "sys.stderr = io.StringIO()\nassert main(['train', 'recipe.toml', '-n', '2']) == 1\n"
        "assert 'torch' not in sys.modules\nprint(sys.stderr.getvalue())"
    )
    assert "unknown key bach; did you mean batch?" in shown
    assert not Path("runs").exists()


def test_more_processes_than_samples_is_an_impossible_plan(folder, launched, capsys):
    assert cli.main(["train", "recipe.toml", "-n", "9"]) == 2
    assert "batch.samples is 8 for 9 ranks" in capsys.readouterr().err
    assert not launched


def test_a_plan_decides_the_number_of_processes(folder, launched, capsys):
    data_parallel(8, processes=3).save(Path("plan.json"))
    assert cli.main(["train", "recipe.toml", "--plan", "plan.json"]) == 0
    assert launched[0][1]["processes"] == 3
    assert cli.main(["train", "recipe.toml", "--plan", "plan.json", "-n", "2"]) == 1
    assert "the plan is for 3 processes, not for 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0"], "--processes 0: at least 1"),
        (["--timeout", "soon"], "--timeout: 'soon' is not a duration"),
        (["--plan", "none.json"], "none.json: cannot be read"),
        (["--set", "stop"], "not of the form key=value"),
    ],
)
def test_wrong_values(folder, launched, capsys, words, message):
    assert cli.main(["train", "recipe.toml", *words]) == 1
    assert message in capsys.readouterr().err
    assert not launched
    assert not Path("runs").exists(), "nothing is created for a run that cannot start"


@pytest.mark.parametrize(("stopped_by", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_an_orderly_stop(folder, launched, monkeypatch, capsys, stopped_by, code):
    result = LaunchResult(results=[None], stopped_by=stopped_by, attempts=1, killed=(0,))
    monkeypatch.setattr("headway.launch.local.launch_local", lambda *a, **b: result)
    assert cli.main(["train", "recipe.toml", "--json"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["stopped_by"] == stopped_by
    assert "ranks 0 did not stop in time" in shown.err


def in_world(monkeypatch, rank: int, ranks: int) -> None:
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, str(value))
    assert LaunchEnv.here().found_world


def test_in_a_world_of_another_launcher_it_joins(folder, launched, monkeypatch, capsys):
    in_world(monkeypatch, 0, 2)
    assert cli.main(["train", "recipe.toml"]) == 0
    job, options = launched[0]
    assert job.directory == Path("runs/small"), "the same on every rank"
    assert options["place"].ranks == 2
    assert "runs/small" in capsys.readouterr().out
    in_world(monkeypatch, 1, 2)
    assert cli.main(["train", "recipe.toml", "-n", "2"]) == 0
    assert capsys.readouterr().out == "", "only rank 0 speaks"
    assert cli.main(["train", "recipe.toml", "-n", "4"]) == 1
    assert "contradicts the 2 that environment has started" in capsys.readouterr().err


LIGHT = """
import sys
from headway.cli.main import main
code = main(sys.argv[1:])
assert "torch" in sys.modules
heavy = {"headway.run.training.loop", "torch.distributed.tensor", "sympy"} & {*sys.modules}
assert not heavy, f"the launcher has imported {heavy}"
sys.exit(code)
"""


def test_a_run_from_end_to_end(folder):
    """The real thing: one worker process, progress in lines, results in the run directory; what
    only workers need, the launcher does not import (4 s of processor time)."""
    command = [sys.executable, "-c", LIGHT, "train", "recipe.toml", "-d", "run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["steps"], facts["stopped_by"], facts["attempts"]) == (3, None, 1)
    assert "3 steps, 8 samples = 1 rank x 1 micro-batch x 8 samples" in done.stderr
    assert "step 3/3  loss " in done.stderr
    assert "complete at step 3" in done.stderr
    assert json.loads(Path("run/recipe.json").read_text())["reference"] == "recipe.toml"


def test_a_batch_in_tokens_needs_no_more_than_the_window_of_the_file(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "words"\nbatch = "64 tokens"\nstop = "2 steps"\n'
        '[model]\ncall = "torch.nn:Identity"\n'
        '[data]\nmemmap = "words.bin"\nwindow = 16\n'
        '[loss]\ncriterion = "torch.nn:CrossEntropyLoss"\n'
        '[optimizer]\ncall = "torch.optim:AdamW"\n'
    )
    default_plan(check_recipe(str(recipe)).document, 4)
    with pytest.raises(PlanError, match=r"batch.samples is 4 for 5 ranks"):
        default_plan(check_recipe(str(recipe)).document, 5)


def test_degrees_of_a_function_are_checked_before_any_worker_starts():
    """They are known from --set; a worker would find it out when torch is there and data is."""
    degrees = {"split.tensor=[3]": "3 ranks that split", "stages=3": "3 ranks of a pipeline"}
    for change, ranks in degrees.items():
        checked = check_recipe("support.recipes:mlp", (change,))
        with pytest.raises(PlanError, match=f"4 processes are no multiple of {ranks}"):
            default_plan(checked.document, 4)
    both = check_recipe("support.recipes:mlp", (*degrees,))
    with pytest.raises(PlanError, match="6 processes are no multiple of 9 ranks"):
        default_plan(both.document, 6)
    assert default_plan(both.document, 9) is None


HIDDEN = """
from dataclasses import replace

from headway.plans import Synchrony
from support.recipes import mlp

WORDS = {"merge": "elastic", "copies": 3, "local_steps": 0, "alpha": 0.1, "beta": 0.2}

def recipe():
    return replace(mlp(), synchrony=Synchrony(**WORDS))
"""
WRONG = {
    "local_steps=0": "synchrony.local_steps is 0; at least 1",
    "delay_bound=2": "synchrony.delay_bound is 2: it means something only with",
    "alpha=0.1": "synchrony.alpha is 0.1 below beta 0.2",
    "beta=0.2": "synchrony.alpha is 0.1 below beta 0.2",
    "servers=9": "synchrony.servers is 9; at most one for each of 2 ranks",
    'merge="elastic"': "",
}


@pytest.mark.parametrize("reference", ["support.recipes:mlp", "file.toml"])
def test_who_agrees_with_whom_is_checked_before_any_worker_starts(
    folder, capsys, launched, reference
):
    """All that is wrong is told at once; no run directory is left behind."""
    Path("file.toml").write_text('recipe = "support.recipes:mlp"')
    words = [word for change in WRONG for word in ("--set", f"synchrony.{change}")]
    assert cli.main(["train", reference, "-n", "2", *words]) == 2
    told = capsys.readouterr().err
    assert not [line for line in WRONG.values() if line not in told]
    assert not launched
    assert not (folder / "runs").exists()


def test_what_a_function_says_of_workers_is_checked_before_any_starts(folder, capsys, launched):
    Path("hidden.py").write_text(HIDDEN)
    assert cli.main(["train", "hidden:recipe", "-n", "4"]) == 2
    told = capsys.readouterr().err
    for line in ("no multiple of 3 copies", "local_steps is 0", "alpha is 0.1 below beta 0.2"):
        assert line in told
    assert not launched


@pytest.mark.parametrize("command", ["train", "verify"])
def test_no_machine_holds_so_many_processes(folder, capsys, command):
    assert cli.main([command, "support.recipes:mlp", "-n", str(2**31)]) == 1
    assert "cannot start 2147483648 processes" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_directory_name_longer_than_any(folder, capsys):
    assert cli.main(["train", "support.recipes:mlp", "-d", "x" * 300]) == 1
    told = capsys.readouterr().err
    assert f"{'x' * 20}...: there can be no such run directory: a name of 300 bytes, and" in told
    assert "x" * 21 not in told


@pytest.mark.parametrize("words", [["report"], ["train", "transformer", "--plan"], ["train"]])
def test_a_path_longer_than_any_is_shortened(folder, capsys, words):
    assert cli.main([*words, f"{'x' * 300}.toml"]) == 1
    told = capsys.readouterr().err
    assert words == ["train"] or "a name of 305 bytes, and at most 255 are possible" in told
    assert "x" * 21 not in told


def test_a_path_of_too_many_folders():
    path = "a/" * 3000
    error = OSError(errno.ENAMETOOLONG, "File name too long")
    assert os_reason(error, path) == "a path of 6000 bytes, and at most 4095 are possible"
    assert len(shown_path(path)) < 300
    assert os_reason(OSError(errno.EROFS, "Read-only"), path) == "Read-only"
