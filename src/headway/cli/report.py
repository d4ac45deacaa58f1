"""`headway report RUN`: write the HTML report of a run."""

from __future__ import annotations

from pathlib import Path

from headway.cli.terminal.console import say, warn


def report(run: Path) -> None:
    """Write report.html, timeline.json and TensorBoard events into a run directory.

    Works on a run that is finished, still going, or dead, and any number of times.

    Args:
        run: The run directory that `headway train` printed.
    """
    # `headway report --help` does without the template engine.
    from headway.report import write_report

    files = write_report(run)
    say(f"report         {files.html}")
    say(f"timeline       {files.timeline}")
    if files.tensorboard is not None:
        say(f"tensorboard    {files.tensorboard}")
    for line in files.notes:
        warn(line)
