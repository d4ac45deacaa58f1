"""A comparison in words and rows, for its page, its files and the terminal.

The sentences say what hinders each framework. Each takes its numbers from the cells: what processes
that never talk would take is the bound of a step, what an exact exchange of gradients must send is
the bound of its bytes, and what one plain process needs is the measure of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headway.comparison.results import INDEPENDENT, REFERENCE, Cell, Interval
from headway.units import counted, format_bytes, format_seconds

HEADINGS = (
    "framework", "processes", "step", "interval", "samples/s", "to loss", "first step", "memory",
    "sent", "cpu", "lines", "losses",
)  # fmt: skip
_ABSENT = "-"
_BASELINES = {REFERENCE: "the reference", INDEPENDENT: "of its own"}


def table_rows(
    cells: Sequence[Cell], lines: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """A row for each cell, also for one that failed: it says why."""
    for cell in cells:
        written = lines.get(cell.framework)
        count = _ABSENT if written is None else str(len(written))
        if not cell.measured:
            yield (
                cell.framework,
                str(cell.processes),
                *[_ABSENT] * (len(HEADINGS) - 4),
                count,
                cell.failure,
            )
            continue
        losses = cell.failure or (
            _BASELINES[cell.framework] if cell.work is None else str(cell.work)
        )
        yield (
            cell.framework,
            str(cell.processes),
            format_seconds(cell.step.value),
            _between(cell.step),
            f"{cell.throughput:.4g}",
            _ABSENT if cell.to_target is None else format_seconds(cell.to_target),
            format_seconds(cell.first_step.value),
            format_bytes(cell.memory),
            _ABSENT if cell.sent is None else format_bytes(cell.sent),
            format_seconds(cell.cpu.value),
            count,
            losses,
        )


def _between(interval: Interval) -> str:
    return f"{format_seconds(interval.low)} to {format_seconds(interval.high)}"


def csv_rows(
    cells: Sequence[Cell], lines: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, object]]:
    """Plain numbers: seconds, bytes; what is not known is empty."""
    for cell in cells:
        row: dict[str, object] = {"framework": cell.framework, "processes": cell.processes}
        if cell.measured:
            row |= {
                "step_s": cell.step.value,
                "step_low_s": cell.step.low,
                "step_high_s": cell.step.high,
                "samples_per_s": cell.throughput,
                "target_loss": "" if cell.target is None else cell.target,
                "to_target_s": "" if cell.to_target is None else cell.to_target,
                "first_step_s": cell.first_step.value,
                "peak_bytes": cell.memory,
                "sent_bytes_per_step": "" if cell.sent is None else cell.sent,
                "cpu_s_per_step": cell.cpu.value,
                "last_loss": cell.losses[-1],
                "rounds": len(cell.rounds),
                "predicted_s": "" if cell.predicted is None else cell.predicted,
            }
        row |= {
            "lines": len(lines[cell.framework]) if cell.framework in lines else "",
            "losses": "" if cell.work is None else str(cell.work),
            "failure": cell.failure,
        }
        yield row


CSV_COLUMNS = (
    "framework", "processes", "step_s", "step_low_s", "step_high_s", "samples_per_s",
    "target_loss", "to_target_s", "first_step_s", "peak_bytes", "sent_bytes_per_step",
    "cpu_s_per_step", "last_loss", "rounds", "predicted_s", "lines", "losses", "failure",
)  # fmt: skip


def headway_sentences(cells: Sequence[Cell]) -> Iterator[str]:
    """Where headway stands: against the fastest of those that compute the same; its plan."""
    for count in sorted({cell.processes for cell in cells}):
        here = [cell for cell in cells if cell.processes == count and cell.measured]
        others = [
            cell
            for cell in here
            if cell.framework not in (REFERENCE, INDEPENDENT)
            and not cell.framework.startswith("headway")
            and cell.work is not None
            and cell.work.step is None
        ]
        for cell in here:
            if not cell.framework.startswith("headway"):
                continue
            if cell.plan:
                told = (
                    ""
                    if cell.predicted is None
                    else (
                        f", {format_seconds(cell.predicted)} a step predicted and "
                        f"{format_seconds(cell.step.value)} measured"
                    )
                )
                yield f"{cell.framework} on {counted(count, 'process')}: {cell.plan}{told}."
            best = min(others, key=lambda one: one.step.value, default=None)
            ratio = None if best is None else cell.ratio(best)
            if best is not None and ratio is not None:
                yield (
                    f"On {counted(count, 'process')} {best.framework} is the fastest of the "
                    f"others with equal losses; its step takes {ratio.value:.2f} times as long as "
                    f"that of {cell.framework} ({ratio.low:.2f} to {ratio.high:.2f} in "
                    f"{counted(len(cell.rounds), 'round')})."
                )


def hindrances(cells: Sequence[Cell], model_bytes: int) -> Iterator[tuple[str, str]]:
    """Of each framework, on its most processes: what takes it longer than it must; a sentence."""
    alone = next((c for c in cells if c.framework == REFERENCE and c.measured), None)
    names = dict.fromkeys(cell.framework for cell in cells)
    for name in names:
        if name in (REFERENCE, INDEPENDENT):
            continue
        measured = [c for c in cells if c.framework == name and c.measured and c.processes > 1]
        if not measured:
            continue
        cell = max(measured, key=lambda one: one.processes)
        bound = next(
            (
                c for c in cells
                if (c.framework, c.processes) == (INDEPENDENT, cell.processes) and c.measured
            ),
            None,
        )  # fmt: skip
        said = [*_parts(cell, bound, alone, model_bytes)]
        if said:
            yield name, f"On {counted(cell.processes, 'process')}: {'; '.join(said)}."


def _parts(cell: Cell, bound: Cell | None, alone: Cell | None, model_bytes: int) -> Iterator[str]:
    if bound is not None:
        step, least = cell.step.value, bound.step.value
        if step >= least:
            yield (
                f"{format_seconds(step - least)} of a step of {format_seconds(step)} "
                f"({(step - least) / step:.0%}) are exposed communication and what the framework "
                f"adds: processes that never talk take {format_seconds(least)}"
            )
        else:
            yield (
                f"a step takes {format_seconds(step)}, less than the {format_seconds(least)} of "
                "processes that never talk and each have a whole model"
            )
        more = cell.cpu.value - bound.cpu.value
        yield (
            f"{format_seconds(cell.cpu.value)} of processor time a step, "
            f"{format_seconds(abs(more))} {'more' if more >= 0 else 'less'} than theirs"
        )
    if cell.sent is not None and model_bytes:
        least_bytes = 2 * (cell.processes - 1) / cell.processes * model_bytes
        yield (
            f"each process sends {format_bytes(cell.sent)}, {cell.sent / least_bytes:.2f} times "
            f"the {format_bytes(least_bytes)} of an all-reduce of the gradients"
        )
    if alone is not None:
        yield (
            f"{format_bytes(cell.memory)} at the peak, {cell.memory / alone.memory:.2f} times "
            "that of one plain process"
        )
