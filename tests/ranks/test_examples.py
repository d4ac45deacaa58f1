"""ranks: the programs, the notebook and the job files in examples/ do as they are written.

The notebook is executed twice: its cells in one process whose main module has no file, as in a
notebook, which needs nothing; and by a kernel of Jupyter, where nbclient and ipykernel are
installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from support.commands import headway_here
from support.patience import patient

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "notebook.ipynb"
NOT_SLOW = ("own_loop", "gan")
LINES = 60
CELLS = """
import ast, json, sys

cells = json.load(open(sys.argv[1]))["cells"]
del sys.modules["__main__"].__file__
for text in ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]:
    for node in ast.parse(text).body:  # the value of an expression is shown
        exec(compile(ast.Interactive([node]), "/tmp/ipykernel_1/1.py", "single"), globals())
"""


def needs(program: Path) -> str:
    """The package that a program cannot do without, and that is not installed."""
    text = program.read_text()
    missing = [
        name
        for name in ("transformers", "ray")
        if re.search(rf"^ *(from|import) {name}\b", text, flags=re.MULTILINE)
        and importlib.util.find_spec(name) is None
    ]
    return ", ".join(missing)


def variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}


def run(*words: str, cwd: Path) -> str:
    """What a program prints, which ends in order."""
    done = subprocess.run(
        [*words], cwd=cwd, capture_output=True, text=True, env=variables(), timeout=patient(120),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in NOT_SLOW else pytest.mark.slow)
        for path in PROGRAMS
    ],
)
def test_the_program_runs(program, tmp_path):
    if missing := needs(program):
        pytest.skip(f"needs {missing}")
    assert "loss" in run(sys.executable, str(program), cwd=tmp_path)


def test_programs_are_short():
    assert PROGRAMS
    for program in PROGRAMS:
        assert len(program.read_text().splitlines()) <= LINES, program.name


def test_every_example_is_in_the_table():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in (*(path.name for path in PROGRAMS), NOTEBOOK.name, *WRITTEN):
        assert f"| `{name}` |" in text, name


def test_a_program_without_its_package_says_so(tmp_path):
    if importlib.util.find_spec("ray"):
        pytest.skip("ray is installed")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "ray_job.py")], cwd=tmp_path, capture_output=True, text=True,
        env=variables(), timeout=patient(60), check=False,
    )  # fmt: skip
    said = "skipped: the package ray is not installed; pip install 'headway[ray]'\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.slow
def test_two_processes_print_the_numbers_of_the_gan_on_one(tmp_path):
    """In float64, six digits; tests/ranks/test_several_models.py compares every parameter."""
    program = str(FOLDER / "gan.py")
    alone = run(sys.executable, program, cwd=tmp_path).splitlines()
    assert float(alone[-1].rsplit(maxsplit=1)[-1]) < 0.1
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(sys.executable, *launcher, program, cwd=tmp_path).splitlines() == alone


@pytest.mark.slow
def test_the_resumed_stream_ends_as_the_one_that_was_not_stopped(tmp_path):
    printed = run(sys.executable, str(FOLDER / "stream_of_shards.py"), cwd=tmp_path)
    whole, resumed = re.findall(r": (\d\.\d{4})", printed)
    assert whole == resumed


def numbers_of_the_notebook(printed: str) -> list[float]:
    assert "EQUAL to the serial run (4 steps, " in printed
    return [float(number) for number in re.findall(r"validation (\d\.\d{4})", printed)]


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path):
    (tmp_path / "kernel.py").write_text(CELLS)
    narrow, wide = numbers_of_the_notebook(
        run(sys.executable, "kernel.py", str(NOTEBOOK), cwd=tmp_path)
    )
    assert max(narrow, wide) < 0.05
    assert narrow != wide  # the second run has seen the new width


@pytest.mark.slow
def test_jupyter_runs_the_notebook(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", variables()["PYTHONPATH"])
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=int(patient(120)), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = json.dumps(notebook.cells)
    assert len(numbers_of_the_notebook(printed)) == 2


WRITTEN = {
    "slurm/shapes.sh": ("--write", "slurm", "--time", "2:00:00"),
    "kubernetes/shapes.yaml": (
        "--write", "kubernetes", "--image", "registry/shapes:1", "--claim", "runs",
    ),
}  # fmt: skip
COMMAND = ("image_classifier:recipe", "--nodes", "2", "-n", "4", "-d", "/shared/runs/shapes")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_job_file_is_what_the_command_writes(name):
    """Apart from the secret: nobody shall use one that everybody can read."""
    done = headway_here("launch", *COMMAND, *WRITTEN[name], cwd=FOLDER)
    assert done.code == 0, done.err
    made = re.sub(r'(HEADWAY_SECRET: )"[0-9a-f]{64}"', r'\1"not a secret"', done.out)
    assert made == (FOLDER / name).read_text(encoding="utf-8")
