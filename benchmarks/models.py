"""Forty models as people have them, each split in four ways and planned: what is EQUAL, what not.

    python benchmarks/models.py --log models.jsonl
    python benchmarks/models.py --models llama unet --cells stages tensor
    python benchmarks/models.py --table models.jsonl > docs/models.md

A cell is a line of the log: two processes, two steps in float64 against the serial run. It says
"equal" with the largest relative error, "refused" with headway's own error, "DIFFERENT", or, as
what must not be, "crash" with an exception that is not headway's. "plan" asks for plans on a DGX
A100, makes the trial that `headway train` would make of the choice, and runs what is said to run on
two of its GPUs. Each model has a process of
its own, which a time limit ends; models whose package is not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 600.0
"""Seconds for all cells of a model."""
CELLS: dict[str, tuple[str, ...]] = {
    "data 2": (),
    "ZeRO 3": ("zero=3",),
    "stages 2": ("stages=2",),
    "tensor 2": ("split.tensor=[2]",),
    "plan": (),
}


def tried(name: str, cell: str) -> dict[str, Any]:
    """One cell of the table."""
    import headway
    import model_zoo
    from headway.errors import HeadwayError, NotEqual, WorkerFailed

    case = model_zoo.CASES[name]
    begun = time.perf_counter()
    try:
        if cell == "plan":
            outcome, said = "planned", planned(case)
        else:
            settings = [*CELLS[cell], *case.settings.get(cell.split()[0], ())]
            result = headway.verify(f"model_zoo:{name}", processes=2, steps=2, overrides=settings)
            result.check()
            errors = [error for error in result.runs[0].errors.values() if error is not None]
            outcome, said = "equal", f"{max(errors):.1e}"
    except NotEqual as error:
        outcome, said = "DIFFERENT", str(error)
    except HeadwayError as error:
        # A worker that fell, or an error that nobody has foreseen, is no answer.
        refused = not isinstance(error, WorkerFailed) and error.code != "HW-9000"
        outcome, said = ("refused" if refused else "crash"), f"{error.code} {error}"
    except Exception as error:
        outcome, said = "crash", f"{type(error).__name__}: {error}"
    said = said.replace(f"{HERE.parent}{os.sep}", "")
    seconds = round(time.perf_counter() - begun, 1)
    return {"model": name, "source": case.source, "cell": cell, "outcome": outcome, "said": said,
            "seconds": seconds}  # fmt: skip


def planned(case: Any) -> str:
    """The plan that is chosen on eight GPUs, in words; of two, each that is said to run runs."""
    import headway
    from headway.errors import NotEqual
    from headway.planner.search.plan_point import describe_point

    found = headway.plan(case.recipe(), "dgx-a100")
    found.plan.check()
    said = [f"{describe_point(found.chosen)} ({found.runs(found.chosen)})"]
    pairs = headway.plan(case.recipe(), "dgx-a100", devices=2)
    for point in pairs.frontier:
        runs = pairs.runs(point)
        said.append(f"on two: {describe_point(point)} ({runs})")
        if runs == "yes":
            try:
                plan = pairs.plan_of(point)
                headway.verify(f"model_zoo:{case.name}", plan=plan, steps=2).check()
            except NotEqual:  # of batch normalisation over micro-batches; it runs
                if not case.settings:
                    raise
    return "; ".join(said)


def of_one_model(name: str, cells: list[str]) -> None:
    for cell in cells:
        print(json.dumps(tried(name, cell)), flush=True)


def of_all(names: list[str], cells: list[str], log: Path | None) -> None:
    """Every model in a process of its own."""
    for name in names:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--cells", *cells]
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, error = child.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, error = child.communicate()
            error = f"more than {LIMIT:g} s"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        for cell in cells[len(lines) :]:  # it ended before it had said these
            last = error.strip().splitlines()[-1:] or ["no word"]
            lines.append(json.dumps({
                "model": name, "source": "", "cell": cell, "outcome": "crash", "said": last[0],
                "seconds": 0.0,
            }))  # fmt: skip
        for line in lines:
            entry = json.loads(line)
            print(f"{name:20} {entry['cell']:9} {entry['outcome']:9} {entry['seconds']:6} s  "
                  f"{entry['said'].partition(chr(10))[0][:150]}", flush=True)  # fmt: skip
        if log is not None:
            with log.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)


INTRODUCTION = """# Models as people have them

Made by `python benchmarks/models.py --log models.jsonl`, then `--table models.jsonl`. A cell is two
processes and two steps in float64 against the serial run: "yes" is `headway verify` saying EQUAL;
under "plan", that a plan was found, and that each one said to run on two devices did run. The
models are in `benchmarks/model_zoo.py`: those of transformers, torchvision and timm are made from
their configurations, small, with random weights; the others are written as users write theirs.
None knows of headway.

Models with batch normalisation have `norm = "global"` under data and ZeRO, and one micro-batch
under stages; two more have a module kept whole under tensor, as the error told. All other cells
have no setting but the split itself.
"""


def table(log: Path) -> str:
    """The page in Markdown: the table, and why each cell that is not equal is not."""
    entries = {}
    for line in log.read_text().splitlines():  # of a cell that was tried again the last counts
        entry = json.loads(line)
        entries[entry["model"], entry["cell"]] = entry
    names = list(dict.fromkeys(name for name, _ in entries))
    lines = [INTRODUCTION]
    lines += ["| model | of | " + " | ".join(CELLS) + " |", "|---|---|" + "---|" * len(CELLS)]
    notes = []
    for name in names:
        row = []
        for cell in CELLS:
            entry = entries.get((name, cell))
            good = entry is not None and entry["outcome"] in ("equal", "planned")
            if entry is not None and not good:
                notes.append(f"- {name}, {cell}: {entry['said'].partition(chr(10) + '  at')[0]}")
            row.append("" if entry is None else "yes" if good else entry["outcome"])
        source = next(e["source"] for (n, _), e in entries.items() if n == name and e["source"])
        lines.append(f"| {name} | {source} | " + " | ".join(row) + " |")
    counts = [
        sum((name, cell) in entries and entries[name, cell]["outcome"] in ("equal", "planned")
            for name in names) for cell in CELLS
    ]  # fmt: skip
    lines.append(f"| of {len(names)} | | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return
    cells = [cell for cell in CELLS if any(cell.startswith(asked) for asked in given.cells)]
    if given.one:
        of_one_model(given.one, cells)
        return
    import model_zoo

    missing = {
        case.source for case in model_zoo.CASES.values()
        if case.source != "own" and importlib.util.find_spec(case.source) is None
    }  # fmt: skip
    for package in sorted(missing):
        print(f"{package} is not installed: its models are left out")
    names = [
        name for name in given.models or model_zoo.CASES
        if model_zoo.CASES[name].source not in missing
    ]  # fmt: skip
    of_all(names, cells, given.log)


if __name__ == "__main__":
    main()
