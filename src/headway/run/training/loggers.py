"""Loggers: what a run tells to other programs while it lasts; rank 0 alone.

Anything that takes a dictionary and a step is a logger: a run of Weights & Biases (`log`), MLflow's
module, a logger of Lightning (`log_metrics`), torch's SummaryWriter (`add_scalar`). By name:
"csv" (metrics.csv in the run directory), "tensorboard", "wandb" and "mlflow".

A logger that fails is left out from then on, with a warning: training does not depend on it.
"""

from __future__ import annotations

import csv
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.documents import nearest
from headway.errors import MissingExtra, RecipeError
from headway.run.recipe.user_code import describe_value
from headway.run.training.callbacks import RunView

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


class LoggerCallback:
    """Passes steps and validations on: train/loss, train/lr, train/rate, validation/NAME."""

    def __init__(self, wanted: Iterable[str | Callable[[], Any]]) -> None:
        self._wanted = tuple(wanted)
        self._open: list[tuple[Any, Callable[[Mapping[str, float], int], None], bool]] = []

    def on_train_start(self, run: RunView) -> None:
        """Open the loggers."""
        for one in self._wanted:
            made = _named(one, run) if isinstance(one, str) else one()
            self._open.append((made, log_method(made), isinstance(one, str)))

    def on_step_end(self, run: RunView) -> None:
        """Log the step."""
        self._log({"train/loss": run.loss, "train/lr": run.lr, "train/rate": run.rate}, run.step)

    def on_validation_end(self, run: RunView) -> None:
        """Log the validation."""
        self._log({f"validation/{name}": v for name, v in run.validation.items()}, run.step)

    def on_train_end(self, run: RunView) -> None:
        """Close what was opened here; objects of the user's stay open."""
        self._close()

    def on_exception(self, run: RunView, error: BaseException) -> None:
        """Close, so that nothing is lost that was logged."""
        self._close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for one in list(self._open):
            made, log, _ = one
            try:
                log(values, step)
            except Exception as error:
                self._open.remove(one)
                warnings.warn(
                    f"the logger {describe_value(made)} failed at step {step} "
                    f"({type(error).__name__}: {error}): nothing more is logged to it",
                    stacklevel=2,
                )

    def _close(self) -> None:
        for made, _, own in self._open:
            for name in ("finish", "end_run", "close"):
                if own and callable(close := getattr(made, name, None)):
                    close()
                    break
        self._open = []


def log_method(made: Any) -> Callable[[Mapping[str, float], int], None]:
    """How values and a step are given to a logger.

    Raises:
        RecipeError: It takes none.
    """
    if callable(getattr(made, "log_metrics", None)):  # MLflow, Lightning
        return lambda values, step: made.log_metrics(dict(values), step=step)
    if callable(getattr(made, "log", None)):
        return lambda values, step: made.log(dict(values), step=step)
    if callable(getattr(made, "add_scalar", None)):
        return lambda values, step: _add_scalars(made, values, step)
    raise RecipeError(
        f"{describe_value(made)} is no logger",
        why="It has neither log(values, step=...), log_metrics(values, step=...) nor add_scalar.",
        fix=f"Name one of {', '.join(LOGGERS)}, or a function that returns such an object.",
    )


def _add_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def check_loggers(wanted: Iterable[Any]) -> None:
    """Check names and packages, before anything is trained.

    Raises:
        MissingExtra: The package of a named logger is not installed.
        RecipeError: There is no logger of a name.
    """
    for one in wanted:
        if not isinstance(one, str):
            if not callable(one):
                raise RecipeError(
                    f"the logger {describe_value(one)} is an object",
                    why="Loggers are made on rank 0 alone, once the run has begun.",
                    fix="Write a function that returns it, such as loggers=(my_logger,).",
                )
        elif one not in LOGGERS:
            raise RecipeError(f"there is no logger {one!r}{nearest(one, list(LOGGERS))}")
        elif one != "csv":
            _module(one)


def _module(name: str) -> Any:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(
            f"the logger {name!r} needs the package {name}, which is not installed",
            fix=f"pip install 'headway[{name}]'",
        ) from None


def _named(name: str, run: RunView) -> Any:
    if name == "csv":
        return CsvLogger(run.directory / "metrics.csv", after=run.step)
    module, folder = _module(name), str(run.directory)
    if name == "tensorboard":
        # Steps behind `purge_step` are those of an attempt that was killed.
        return module.SummaryWriter(f"{folder}/tensorboard", purge_step=run.step + 1)
    title = run.directory.name
    if name == "wandb":
        return module.init(project="headway", name=title, dir=folder)
    module.start_run(run_name=title)
    return module


class CsvLogger:
    """A table with one row per step, and a column for each name.

    Args:
        path: Made, or gone on with.
        after: Rows of later steps are dropped: a resumed run makes these steps again.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._columns = ["step"]
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                self._columns = list(rows.fieldnames or self._columns)
                self._rows = [row for row in rows if _step(row) <= after]
        self._write_all()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row; values of the step of the last row are added to it."""
        new = [name for name in values if name not in self._columns]
        again = bool(self._rows) and _step(self._rows[-1]) == step
        if not again:
            self._rows.append({"step": step})
        self._rows[-1].update(values)
        if new or again:
            self._columns += new
            self._write_all()
        else:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(self._rows[-1])

    def _write_all(self) -> None:
        aside = self._path.with_suffix(".partial")
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self._rows)
        aside.replace(self._path)


def _step(row: Mapping[str, Any]) -> int:
    # The last line of a killed run may be half a line.
    text = str(row.get("step") or "")
    return int(text) if text.isdecimal() else 1 << 62
