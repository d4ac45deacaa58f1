"""The `headway` command: its commands by name, the overview, errors and exit codes.

0 success, 1 user error, 2 plan impossible, 3 run failed, 4 verification failed, 5 hang,
70 a bug in headway, 130 interrupted

Commands are named by import strings and imported when they are called: neither they nor the parser
are needed for the overview, which therefore is quick.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway import __version__
from headway.cli.terminal.console import note, say, show_bug, show_error, show_warning, shown_log
from headway.errors import HeadwayError, UsageError, os_reason, shown_path

if TYPE_CHECKING:
    from cyclopts import App


class Command(NamedTuple):
    """A command: its words, where its function is, its line of the overview, and an example."""

    words: str
    target: str
    help: str
    example: str


TASKS = {
    "Train a model": (
        Command(
            "train",
            "train:train",
            "Train a recipe on one process or many.",
            "my_module:recipe --processes 2",
        ),
        Command(
            "verify",
            "verify:verify",
            "Compare a split run with the serial run.",
            "my_module:recipe --processes 1,2",
        ),
        Command("report", "report:report", "Write an HTML report of a run.", "runs/recipe-001"),
        Command(
            "launch",
            "launch:launch",
            "Write a job file: Slurm, Kubernetes.",
            "my_module:recipe --write slurm --nodes 2 -n 4 --directory /shared/runs/recipe",
        ),
        Command(
            "launch program",
            "launch_program:launch_program",
            "Start a Python program with horovodrun's arguments.",
            "-np 2 python train.py",
        ),
        Command(
            "import",
            "migration:import_file",
            "A configuration of DeepSpeed, Accelerate or torchtitan as a recipe.",
            "ds_config.json --processes 2 --out recipe.toml",
        ),
        Command(
            "train svm",
            "svm:train_svm",
            "Train a support vector machine on a file in libsvm's format.",
            "data.libsvm --processes 4 --C 10 --gamma 0.5",
        ),
        Command(
            "segment",
            "segment:segment",
            "Segment a volume with a flood-filling network.",
            "volume.h5 --weights weights.npz --out segments.h5",
        ),
        Command(
            "evaluate",
            "evaluate:evaluate",
            "Compare a segmentation with the truth.",
            "segments.h5:ids truth.h5:bodies --report page.html",
        ),
        Command(
            "study",
            "study:study",
            "Batch sizes and learning rates: best rates, critical batch.",
            'my_module:recipe --batches 8,16,32 --target "loss<=0.45"',
        ),
        Command(
            "compare",
            "compare:compare",
            "Train one recipe under several frameworks, side by side.",
            "my_module:recipe --with ddp,fsdp2,headway --processes 1,2",
        ),
        Command("demo", "demo:demo", "Train, verify and report a small model.", ""),
    ),
    "Find a plan": (
        Command(
            "plan search",
            "plan.search:search_plans",
            "Find plans for a recipe on a cluster; also `headway plan RECIPE`.",
            "my_module:recipe --cluster dgx-a100 --out plan.json",
        ),
        Command(
            "plan svm",
            "plan.support_vectors:plan_svm",
            "Memory and time of a support vector machine on so many ranks.",
            "--rows 11000000 --columns 28 --cluster dgx-a100",
        ),
        Command(
            "explain",
            "explain:explain",
            "A plan's bottleneck, and what would change it.",
            "plan.json",
        ),
        Command(
            "simulate",
            "simulate:simulate",
            "Simulate a step; on other hardware, with faults.",
            "plan.json",
        ),
        Command("plan show", "plan.plan_file:show", "A plan in words.", "plan.json"),
        Command("plan check", "plan.plan_file:check", "Check that plans are legal.", "plan.json"),
        Command(
            "plan diff",
            "plan.plan_file:diff",
            "What differs between two plans.",
            "one.json other.json",
        ),
        Command(
            "taxonomy",
            "plan.taxonomy:taxonomy",
            "Published systems as plans, and yours among them.",
            "plan.json",
        ),
    ),
    "Look into checkpoints": (
        Command(
            "checkpoint show", "checkpoint:show", "What a checkpoint holds.", "runs/recipe-001"
        ),
        Command(
            "checkpoint convert",
            "checkpoint:convert",
            "To and from safetensors files.",
            "runs/recipe-001 model.safetensors",
        ),
    ),
    "Describe machines": (
        Command("cluster presets", "cluster:presets", "List known machines and devices.", ""),
        Command("cluster show", "cluster:show", "A cluster: devices, links, ranks.", "dgx-a100"),
        Command(
            "cluster measure",
            "cluster:measure",
            "Measure this machine; write its cluster.toml.",
            "-n 2",
        ),
    ),
    "Study gradient exchanges and pipelines": (
        Command(
            "exchange compare",
            "exchange:compare",
            "Compare ways to exchange gradients.",
            '--layers 25 --size "1 MiB" --link "100 Mbit/s" --forward "0.7 s" --backward "1.4 s"',
        ),
        Command(
            "collective show",
            "collective:show",
            "Compare the programs of a collective.",
            '--cluster dgx-1v --bytes "100 MiB"',
        ),
        Command("schedule list", "schedule.show:list_schedules", "List pipeline schedules.", ""),
        Command(
            "schedule show",
            "schedule.show:show",
            "Draw a pipeline schedule, with figures.",
            "chimera --stages 4 --microbatches 4",
        ),
        Command(
            "schedule compare",
            "schedule.show:compare",
            "Compare all pipeline schedules.",
            "--stages 8 --microbatches 16",
        ),
        Command(
            "schedule check",
            "schedule.show:check",
            "Check a hand-written schedule table.",
            "table.csv",
        ),
        Command(
            "schedule search",
            "schedule.search:search",
            "Find a shorter table for your costs.",
            "--stages 4 --microbatches 8 --forward 1,1.5,1,1 --out searched.csv",
        ),
        Command(
            "schedule choose",
            "schedule.choose:choose",
            "Choose stages, copies and micro-batch size of a Chimera pipeline.",
            '--ranks 32 --batch 256 --layers 48 --forward "0.8 ms" --launch "5 ms" '
            '--activation "512 KiB" --held "28 MB" --weights "55.8 MB" --memory "12 GiB" '
            '--bandwidth "10 GB/s" --latency "2 us"',
        ),
    ),
}
"""The commands by what one wants to do; what is used most stands first."""
COMMANDS = tuple(command for commands in TASKS.values() for command in commands)
"""Targets are relative to headway.cli."""
GROUPS = {
    "checkpoint": "Inspect and convert checkpoints.",
    "cluster": "Machines: list presets, show a cluster, measure this machine.",
    "collective": "Programs of collectives on a cluster's links.",
    "exchange": "Ways to exchange gradients.",
    "plan": "Find plans: `headway plan RECIPE --cluster C` (options: `headway plan search "
    "--help`). Show, check and compare plan files.",
    "schedule": "Pipeline schedules: draw, compare, check, search and choose them.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name; None: that of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Taken out here, so that it may stand anywhere and no command has to declare it.
    trace = "--trace" in words
    words = [word for word in words if word != "--trace"]
    try:
        # First, as these pages need nothing of what is imported to run a command.
        if not words or words[0] in {"--help", "-h", "help", "--version"}:
            say(__version__ if words[:1] == ["--version"] else overview())
            return 0
        # Both are put back: `main` is also called within other programs, as by the tests.
        with warnings.catch_warnings(), shown_log():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = show_warning
            return run_command(words)
    except HeadwayError as error:
        return show_error(error, trace=trace)
    except KeyboardInterrupt:
        note("interrupted")
        # 128 + SIGINT, as shells have it.
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone; keep the interpreter from writing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Any word of a command line may be taken for a file; one that headway itself has opened is
        # no fault of the user's only where nothing names it.
        if isinstance(error, OSError) and isinstance(error.filename, str):
            why = os_reason(error, error.filename)
            unusable = UsageError(f"cannot be used: {why}", where=shown_path(error.filename))
            return show_error(unusable, trace=trace)
        return show_bug(error)


def overview() -> str:
    """The page of `headway --help`."""
    width = max(len(command.words) for command in COMMANDS) + 2
    lines = [
        line
        for task, commands in TASKS.items()
        for line in ("", task, *(f"  {c.words:<{width}}{c.help}" for c in commands))
    ]
    options = [("--help, -h", "This page, or that of a command."), ("--version", "The version.")]
    options.append(("--trace", "With any command: show the stack trace of an error."))
    return "\n".join(
        [
            "Usage: headway COMMAND [ARGUMENTS]",
            "",
            "Plan, check and run distributed PyTorch training; prove it equal to the serial run.",
            *lines,
            "",
            "Options",
            *(f"  {name:<{width}}{text}" for name, text in options),
            "",
            "headway COMMAND --help describes a command.",
        ]
    )


def run_command(words: list[str]) -> int:
    """The exit code of one command; `main` shows its errors.

    Raises:
        HeadwayError: Of the command, or there is no command of these words.
    """
    if words[0] == "plan" and len(words) > 1 and _is_recipe(words[1]):
        words = ["plan", "search", *words[1:]]
    _check_command(words)
    asked = _command_of(words)
    if {"--help", "-h"} & set(words) and asked is not None:
        say(f"Example: {f'headway {asked.words} {asked.example}'.rstrip()}\n")
    from cyclopts import CycloptsError

    try:
        # cyclopts would print its own error otherwise, and end the process with the result.
        result = build_app()(
            parser_words(words),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        raise _usage_error(error, words) from error
    # Commands that either succeed or raise return nothing.
    return result if isinstance(result, int) else 0


def _command_of(words: list[str]) -> Command | None:
    """The command that the words begin with; the longest one: "train svm" is no recipe "svm"."""
    found = [c for c in COMMANDS if words[: len(c.words.split())] == c.words.split()]
    return max(found, key=lambda command: len(command.words), default=None)


def parser_words(words: list[str]) -> list[str]:
    """The words for the parser: those of a command whose first one is a command too are one."""
    if words[0] == "launch" and _is_horovodrun(words[1:]):
        words = ["launch", "program", *words[1:]]
    command = _command_of(words)
    if command is not None and command.words == "launch program":
        rest = words[2:]
        # What follows is horovodrun's and the program's: none of it is for the parser.
        return [command.words, *(rest if rest[:1] in (["--help"], ["-h"]) else ["--", *rest])]
    outer = "" if command is None else command.words.rpartition(" ")[0]
    if command is None or not outer or outer in GROUPS:
        return words
    return [command.words, *words[len(command.words.split()) :]]


def _is_horovodrun(words: list[str]) -> bool:
    """Whether the words behind `launch` are options and a program, as horovodrun has them, and not
    a recipe with the launcher to write a job file for."""
    asks = {word.partition("=")[0] for word in words} & {"--write", "--help"}
    first = words[0] if words else ""
    program = first.startswith(("-", "python")) or first.endswith(".py")
    return program and first != "-h" and not asks


def _is_recipe(word: str) -> bool:
    """Whether a word is a recipe and not a command: "module:function", the path of a file, or the
    name of a bundled workload."""
    if word.startswith("-"):
        return False
    bundled = Path(__file__).parents[1] / "workloads" / f"{word.replace('-', '_')}.py"
    return any(sign in word for sign in ":./") or (word.islower() and bundled.is_file())


def _check_command(words: list[str]) -> None:
    """Refuse unknown commands before the parser does: it would import all of them to say so."""
    first = sorted({command.words.split()[0] for command in COMMANDS})
    if words[0] not in first:
        raise _unknown(words[0], first, "headway --help")
    group = words[0] if words[0] in GROUPS else None
    if group and len(words) > 1 and not words[1].startswith("-"):
        inner = [c.words.split()[1] for c in COMMANDS if c.words.startswith(f"{group} ")]
        if words[1] not in inner:
            raise _unknown(
                f"{group} {words[1]}",
                [f"{group} {name}" for name in inner],
                f"headway {group} --help",
            )


def _unknown(word: str, legal: list[str], page: str) -> UsageError:
    from headway.documents import nearest

    kind = "option" if word.startswith("-") else "command"
    return UsageError(f"there is no {kind} {word!r}{nearest(word, legal)}", fix=f"See {page}")


def build_app() -> App:
    """The parser of all commands; none of them is imported yet."""
    from cyclopts import App

    app = App(name="headway", version=__version__, help_format="plaintext")
    groups = {
        name: App(name=name, help=text, help_format="plaintext") for name, text in GROUPS.items()
    }
    for group in groups.values():
        app.command(group)
    for command in COMMANDS:
        outer, _, name = command.words.rpartition(" ")
        parent, name = (groups[outer], name) if outer in groups else (app, command.words)
        target = f"headway.cli.{command.target}"
        parent.command(target, name=name, help=command.help, help_format="plaintext")
    return app


def _usage_error(error: Exception, words: list[str]) -> UsageError:
    # The verbose text is for those who debug the parser.
    error.verbose = False  # type: ignore[attr-defined]
    command = _command_of(words)
    known = words[0] if words[0] in GROUPS else ""
    known = known if command is None else command.words
    return UsageError(
        " ".join(str(error).split()), fix=f"See {' '.join(['headway', *known.split(), '--help'])}"
    )
