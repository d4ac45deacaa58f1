"""`headway compare --paper`: the evaluation of Nichols et al. 2021 on this machine, as a page.

"A Survey and Empirical Evaluation of Parallel Deep Learning Frameworks" trains a GPT on text and a
VGG on images under each framework, and discusses time, statistical efficiency and memory. Here are
a GPT and a ResNet, of sizes that two cores train in a fraction of a second a step, on text and
images that are on every machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.api.comparison import (
    LIMIT,
    PICTURES,
    ROUNDS,
    STEPS,
    WARM_UP,
    ComparisonResult,
    compare,
)
from headway.api.inputs import ClusterInput
from headway.comparison.table import HEADINGS, headway_sentences, hindrances, table_rows
from headway.report.framework_evaluation import EvaluatedTask, evaluation_page
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import RunDirectory, choose_directory, describe_environment

PAGE = "evaluation.md"


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """A task of the evaluation.

    Attributes:
        recipe: A bundled workload.
        overrides: The changes to it.
    """

    name: str
    heading: str
    recipe: str
    overrides: tuple[str, ...]


TASKS = (
    EvaluationTask(
        name="language",
        heading="A GPT on text",
        recipe="transformer",
        overrides=(
            *("arguments.width=256", "arguments.layers=4", "arguments.heads=4"),
            *("arguments.window=128", "batch=16"),
        ),
    ),
    EvaluationTask(
        name="vision",
        heading="A ResNet on images",
        recipe="resnet",
        overrides=(
            *("arguments.images=digits", "arguments.variant=resnet18", "batch=32"),
            "arguments.learning_rate=0.002",  # rounding does not grow within the steps
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class FrameworkEvaluation:
    """Both comparisons, and the page.

    Attributes:
        page: Markdown, with the pictures beside it in images/.
        results: By the name of the task.
    """

    page: Path
    results: dict[str, ComparisonResult]


def evaluate_frameworks(
    *,
    frameworks: Sequence[str] = (),
    processes: Sequence[int] = (),
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    rounds: int = ROUNDS,
    limit: str | float = LIMIT,
    threads: int | None = None,
    emulate: ClusterInput | None = None,
    environments: str | Path | None = None,
    directory: str | Path | None = None,
) -> FrameworkEvaluation:
    """Compare frameworks on both tasks, and write the page; the arguments are those of `compare`.

    Raises:
        HeadwayError: As of `compare`.
    """
    path = choose_directory("compare-paper", directory, LaunchEnv.here(), resume=False)
    RunDirectory(path).describe(
        {"name": "evaluation of frameworks", "tasks": ", ".join(task.name for task in TASKS)},
        None,
        describe_environment(torch_version="", device="cpu", backend=""),
    )
    results = {
        task.name: compare(
            task.recipe,
            frameworks=frameworks,
            processes=processes,
            steps=steps,
            warm_up=warm_up,
            rounds=rounds,
            limit=limit,
            threads=threads,
            emulate=emulate,
            environments=environments,
            overrides=task.overrides,
            directory=path / task.name,
        )
        for task in TASKS
    }
    return FrameworkEvaluation(page=write_evaluation(path, results), results=results)


def write_evaluation(path: Path, results: dict[str, ComparisonResult]) -> Path:
    """The page of comparisons that have been made, and copies of their pictures."""
    images = path / "images"
    images.mkdir(exist_ok=True)
    tasks = []
    for task in TASKS:
        result = results[task.name]
        pictures = []
        for name, heading in PICTURES:
            copy = images / f"evaluation-{task.name}-{name}.svg"
            shutil.copyfile(result.directory / f"{name}.svg", copy)
            pictures.append((heading, f"images/{copy.name}"))
        tasks.append(
            EvaluatedTask(
                heading=task.heading,
                facts=[*result.options.items()],
                table=[HEADINGS, *table_rows(result.cells, result.lines)],
                pictures=pictures,
                sentences=[*headway_sentences(result.cells)],
                hindrances=[*hindrances(result.cells, result.model_bytes)],
            )
        )
    page = path / PAGE
    machine = next(iter(results.values())).machine
    page.write_text(evaluation_page([*machine.items()], tasks), encoding="utf-8")
    return page
