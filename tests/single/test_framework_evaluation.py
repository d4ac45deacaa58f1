"""single: the page of `headway compare --paper`, from comparisons that are made up."""

from __future__ import annotations

import pytest

from headway.api.comparison import ComparisonResult, write_comparison
from headway.api.framework_evaluation import TASKS, write_evaluation
from headway.comparison.results import INDEPENDENT, REFERENCE, Cell, SameWork
from headway.comparison.trial import TrialResult
from headway.workloads import resnet, transformer
from support.commands import headway_here


def cell(name: str, seconds: float, processes: int = 2, failure: str = "") -> Cell:
    trial = TrialResult(
        seconds=(seconds,) * 3,
        steps=2,
        losses=(2.0, 1.5, 1.2, 1.0),
        first_step=3.0,
        cpu_seconds=seconds,
        peak_bytes=10**8,
        sent_bytes=60.0,
        model_bytes=40,
    )
    return Cell(
        framework=name,
        processes=processes,
        batch=8,
        rounds={} if failure else {0: trial},
        failure=failure,
        work=None if name in (REFERENCE, INDEPENDENT) else SameWork(difference=0.0),
        target=1.0,
    )


def made_up(folder, task) -> ComparisonResult:
    folder.mkdir(parents=True)
    result = ComparisonResult(
        directory=folder,
        options={"name": task.name, "recipe": task.recipe},
        cells=(
            *(cell(REFERENCE, 3.0, 1), cell(INDEPENDENT, 2.0), cell("ddp", 4.0)),
            *(cell("headway", 2.5), cell("mine", 0.0, failure="no | such\nthing")),
        ),
        lines={"ddp": ("a", "b"), "headway": ("c",)},
        model_bytes=40,
        machine={"machine": "2 cores, a test", "date": "2026-01-02"},
    )
    write_comparison(result)
    return result


def test_the_page_has_both_tasks_with_date_figures_and_pictures(tmp_path):
    results = {task.name: made_up(tmp_path / task.name, task) for task in TASKS}
    page = write_evaluation(tmp_path, results)
    text = page.read_text()
    assert "- machine: 2 cores, a test\n- date: 2026-01-02\n" in text
    for task in TASKS:
        assert text.count(f"## {task.heading}\n") == 1
        assert text.count(f"](images/evaluation-{task.name}-") == 3
    assert len(list((tmp_path / "images").glob("*.svg"))) == 6
    assert text.count("| ddp | 2 | 4 s | 4 s to 4 s | 2 | 12 s |") == 2
    assert text.count(r"| no \| such thing |") == 2
    assert text.count("takes 1.60 times as long as that of headway") == 2
    assert text.count("**ddp**: On 2 processes: 2 s of a step of 4 s (50%)") == 2
    assert '"target": 1.0' in (tmp_path / TASKS[0].name / "compare.json").read_text()


def test_the_tasks_are_recipes_that_can_be_had():
    from headway.run.recipe.factory import load_recipe

    for task, module in zip(TASKS, (transformer, resnet), strict=True):
        recipe = load_recipe(task.recipe, task.overrides)
        assert recipe.name.startswith(module.__name__.rpartition(".")[2])
        assert sum(p.numel() for p in recipe.model().parameters()) > 3_000_000


@pytest.mark.parametrize("words", [("users:recipe",), ("--set", "batch=2")])
def test_the_tasks_cannot_be_changed(words, tmp_path):
    done = headway_here("compare", *words, "--paper", cwd=tmp_path)
    assert done.code == 1
    assert "--paper brings recipes of its own" in done.err
