"""Progress display of a run, from the event files that its ranks write.

`Progress` folds events without side effects, and `describe_event` gives the text of one event,
beside the plan's prediction where there is one. `ProgressDisplay` follows RUN/events.jsonl and the
file of rank 0 in a thread: a live line in a terminal, otherwise at most one step line every two
seconds and one line for every other event.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TextIO

from headway.cli.terminal.console import show_error
from headway.documents import parse_json, to_type
from headway.errors import HeadwayError
from headway.plans.prediction import Prediction
from headway.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.live import Live


StepParts = tuple[float, float, float]
"""Seconds of compute, of waiting for others, of the update."""
PART_NAMES = ("compute", "wait", "update")


def read_prediction(predicted: Mapping[str, Any] | None) -> Prediction | None:
    """The prediction in the first event of a run; None: its plan has none.

    Raises:
        DocumentError: It is of another form.
    """
    if not predicted:
        return None
    found: Prediction = to_type(dict(predicted), Prediction, where="the first event")
    return found


def compare_with_prediction(
    expected: Prediction | None, seconds: float, parts: Sequence[StepParts]
) -> str:
    """ " (predicted 104 ms, -5%; compute 80.1 ms/78 ms, ...)", measured before predicted.

    Args:
        expected: None: "".
        seconds: Of a step, as measured.
    """
    if expected is None or seconds <= 0:
        return ""
    texts = [f"predicted {format_seconds(expected.seconds)}, {expected.seconds / seconds - 1:+.0%}"]
    known = (expected.compute, expected.waiting, expected.update)
    if parts:
        found = (median(part[number] for part in parts) for number in range(len(PART_NAMES)))
        texts.append(
            ", ".join(
                f"{word} {format_seconds(one)}/{format_seconds(other)}"
                for word, one, other in zip(PART_NAMES, found, known, strict=True)
            )
        )
    return f" ({'; '.join(texts)})"


Event = Mapping[str, Any]
RECENT = 20
"""Steps over which speed and exchange are averaged."""
_STEPS = ("step", "svm_step")
_MUCH_WAITING, _LONG_STEP = 0.5, 0.05
"""Share of a step, and seconds of one, from which on other plans are worth a search."""
EVERY_SECONDS = 2.0
POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Progress:
    """What must be remembered of earlier events to describe the next one.

    Attributes:
        steps: At which step the run is complete; None before the start event.
        seconds: Durations of the most recent steps, oldest first.
        exposed: Of those, the part in which rank 0 waited for the exchange, as a ratio.
        memory_bytes: Of rank 0.
        parts: Of those steps, on rank 0: seconds of compute, of waiting, of the update.
        expected: What the plan predicts; None: nothing.
        clock: Where the number of steps is not known before: seconds so far, and until the end.
    """

    steps: int | None = None
    step: int = 0
    seconds: tuple[float, ...] = ()
    exposed: tuple[float, ...] = ()
    memory_bytes: int | None = None
    parts: tuple[StepParts, ...] = ()
    expected: Prediction | None = None
    clock: tuple[float, float] | None = None

    def after(self, event: Event) -> Progress:
        """The memory after an event; an unknown event changes nothing."""
        match event.get("event"):
            case "start":
                known = read_prediction(event.get("predicted"))
                # Anew: a restart forgets the speed of the attempt before it.
                return Progress(steps=event.get("steps"), step=event["step"], expected=known)
            case "step":
                recent = (*self.seconds, event["seconds"])[-RECENT:]
                return dataclasses.replace(self, step=event["step"], seconds=recent)
            case "svm_step":
                clock = event["seconds"], event["remaining"]
                return dataclasses.replace(self, step=event["step"], clock=clock)
            case "rank_step":
                share = event["exposed"] / event["seconds"] if event["seconds"] else 0.0
                parts = event.get("compute", 0.0), event["exposed"], event.get("update", 0.0)
                return dataclasses.replace(
                    self,
                    exposed=(*self.exposed, share)[-RECENT:],
                    memory_bytes=event.get("memory_bytes"),
                    parts=(*self.parts, parts)[-RECENT:],
                )
            case _:
                return self

    @property
    def done(self) -> tuple[float, float]:
        """How much of how much."""
        if self.clock is None:
            return self.step, self.steps or 1
        return self.clock[0], max(sum(self.clock), 1e-3)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the recent speed; None where it is not known."""
        if self.steps is None or not self.seconds:
            return None
        # The median: a single slow step does not move the estimate.
        return max(self.steps - self.step, 0) * median(self.seconds)


def describe_event(event: Event, progress: Progress, cause: str = "") -> str | None:
    """The text of an event; None where there is nothing to say.

    Args:
        cause: Why the attempt before this one ended, where this one is a restart.
    """
    match event.get("event"):
        case "start":
            return _started(event, cause)
        case "resume":
            return _resumed(event, cause)
        case "step":
            return _step(event, progress)
        case "svm_step":
            return _outer_step(event)
        case "validation":
            return (
                f"{_at(event, progress)}  validation loss {_loss(event['loss'])}  "
                f"{''.join(f'{n} {v:.4g}  ' for n, v in event.get('metrics', {}).items())}"
                f"{_samples(event['samples'])}  {format_seconds(event['seconds'])}"
            )
        case "checkpoint":
            return (
                f"{_at(event, progress)}  checkpoint {format_bytes(event['bytes'])}  "
                f"training paused {format_seconds(event['held_seconds'])}"
            )
        case "showcase":
            return "\n".join(["", *(f"  {line}" for line in event["text"].splitlines()), ""])
        case "fault":
            return f"{_at(event, progress)}  fault: {event['text']}"
        case "note" | "warning" as kind:
            return f"{'warning: ' * (kind == 'warning')}{event['text']}"
        case "stop":
            return _stopped(event) + _other_plans(progress)
        case _:
            return None


def _step(event: Event, progress: Progress) -> str:
    seconds = median(progress.seconds or (event["seconds"],))
    parts = [_at(event, progress), f"loss {_loss(event['loss'])}"]
    if seconds > 0:
        parts.append(f"{_count(event['samples'] / seconds)} samples/s")
    compared = compare_with_prediction(progress.expected, seconds, progress.parts)
    parts.append(f"step {format_seconds(seconds)}{compared}")
    if progress.expected is None and any(progress.exposed):
        parts.append(f"exchange {100 * fmean(progress.exposed):.0f} %")
    if progress.memory_bytes:
        parts.append(f"mem {format_bytes(progress.memory_bytes)}")
    if progress.eta_seconds is not None:
        parts.append(f"eta {_short_time(progress.eta_seconds)}")
    return "  ".join(parts)


def _outer_step(event: Event) -> str:
    """Of the training of a support vector machine."""
    parts = [f"step {event['step']}"]
    if event["pairs"] > 1:
        parts.append(f"classes {event['classes']} ({event['pair'] + 1} of {event['pairs']})")
    parts += [
        f"violation {event['violation']:.3g}",
        f"active {_count(event['active'])}",
        f"support vectors {_count(event['support'])}",
    ]
    if event["seconds"] > 0:
        parts.append(f"{_count(event['values'] / event['seconds'] / 1e6)} M kernel values/s")
    parts.append(f"eta {_short_time(event['remaining'])}")
    return "  ".join(parts)


def _at(event: Event, progress: Progress) -> str:
    total = f"/{progress.steps}" if progress.steps is not None else ""
    return f"step {event['step']}{total}"


def _started(event: Event, cause: str) -> str | None:
    if not cause and "text" in event:
        return str(event["text"])
    if not cause:
        steps = f"{counted(event.get('steps', '?'), 'step')}, {event.get('batch', '')}".rstrip(", ")
        known = read_prediction(event.get("predicted"))
        if known is None:
            return steps
        where = f" on {known.device}" if known.device else ""
        return f"{steps}\npredicted: {format_seconds(known.seconds)} a step{where}"
    if event["step"]:
        return None  # its "resume" event has said it
    return f"{cause}; no checkpoint yet: restarting from step 0, attempt {event['attempt']}"


def _resumed(event: Event, cause: str) -> str:
    before, attempt = (f"{cause}; ", f", attempt {event['attempt']}") if cause else ("", "")
    return f"{before}resumed from step {event['step']}{attempt}"


def _stopped(event: Event) -> str:
    if event["reason"] == "complete":
        return f"complete at step {event['step']}"
    return f"stopped by {event['reason']} at step {event['step']}; continue with --resume"


def _other_plans(progress: Progress) -> str:
    """What would help a run that has mostly waited and whose plan no search has chosen."""
    waited = fmean(progress.exposed or (0.0,))
    # Of shorter steps it may be overhead, which no plan takes away.
    long = median(progress.seconds or (0.0,)) >= _LONG_STEP
    if progress.expected is not None or waited < _MUCH_WAITING or not long:
        return ""
    return (
        f"\nranks waited for each other in {waited:.0%} of a step: "
        "`headway train --plan auto` looks for a plan that waits less"
    )


def _loss(value: float) -> str:
    """2.41127 -> "2.4113"; small ones keep four digits."""
    return f"{value:.4f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3e}"


def _count(value: float) -> str:
    """1203.4 -> "1 203"; small values keep three digits."""
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def _samples(number: float) -> str:
    return "1 sample" if number == 1 else f"{_count(number)} samples"


def _short_time(seconds: float) -> str:
    """146 -> "2m26s"."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{left:02d}s" if minutes else f"{left}s"


def _written(event: Event) -> float:
    when = event.get("time")
    return float(when) if isinstance(when, int | float) else 0.0


class JsonLinesTail:
    """New whole lines of a growing file of JSON objects; the file may appear later.

    Args:
        skip: Leave out what is there already (a run that is resumed).
    """

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if skip and path.exists() else 0

    def read(self) -> list[Event]:
        """The events since the last call; half lines wait, damaged ones are passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(_events(whole))


def _events(data: bytes) -> Iterator[Event]:
    for line in data.splitlines():
        try:
            event = parse_json(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(event, dict):
            yield event


class LineView:
    """One line for each important event; steps at most every `every` seconds, and the last one."""

    def __init__(
        self,
        stream: TextIO,
        *,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        # The first step is shown at once.
        self._next = clock()
        self._waiting: str | None = None

    def step(self, text: str, progress: Progress) -> None:
        now = self._clock()
        if now >= self._next:
            self._write(text)
            self._next = now + self._every
            self._waiting = None
        else:
            self._waiting = text

    def important(self, text: str) -> None:
        self._flush()
        self._write(text)

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._waiting is not None:
            self._write(self._waiting)
            self._waiting = None

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class LiveView:
    """A bar and a line that change in place; important events scroll by above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live: Live = Live(
            console=Console(file=stream, highlight=False),
            refresh_per_second=8,
            # Results go to standard output untouched, in a pipe as in a terminal.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def step(self, text: str, progress: Progress) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        completed, total = progress.done
        bar = ProgressBar(total=total, completed=completed, width=60)
        rows = Table.grid()
        rows.add_row(bar)
        rows.add_row(Text(text))
        self._live.update(rows)

    def important(self, text: str) -> None:
        from rich.text import Text

        # As `Text`: brackets in a string are markup to rich.
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()


class ProgressDisplay:
    """Shows the progress of the run in `directory` while the `with` lasts.

    Args:
        directory: The run directory; it may not exist yet.
        stream: Where to write; None: standard error.
        live: A live display; None: where the stream is a terminal.
        skip: Do not show again what earlier launches have written.
        cause: Why an attempt was started again, given its number; "" where it was not.
    """

    def __init__(
        self,
        directory: Path,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        skip: bool = True,
        cause: Callable[[int], str] = lambda attempt: "",
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() if live is None else live
        self._events = JsonLinesTail(directory / "events.jsonl", skip=skip)
        self._ranks = JsonLinesTail(directory / "ranks" / "rank-00000.jsonl", skip=skip)
        self._cause = cause
        self._checkpoint = float("-inf")
        self._ended = threading.Event()
        # A daemon: it must not keep a process alive whose main thread has failed.
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show what is left, then end; may be called more than once."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        view = LiveView(self._stream) if self._live else LineView(self._stream)
        progress = Progress()
        try:
            while True:
                ended = self._ended.wait(POLL_SECONDS)
                # Once more after the end, for what was written last.
                progress = self._show_news(view, progress)
                if ended:
                    return
        finally:
            # rich hides the cursor until then.
            view.close()

    def _show_news(self, view: LineView | LiveView, progress: Progress) -> Progress:
        # The parts of a step are written before its event: read behind it, they are there.
        events = list(self._events.read())
        # In the order in which rank 0 has written both: a start forgets the parts before it.
        for event in sorted([*self._ranks.read(), *events], key=_written):
            if event.get("event") == "rank_step":
                with contextlib.suppress(KeyError, TypeError):
                    progress = progress.after(event)
                continue
            if event.get("event") == "span":
                continue
            try:
                progress = progress.after(event)
                text = describe_event(event, progress, self._cause_of(event))
            except (KeyError, TypeError, ValueError):  # a display never disturbs the run
                continue
            if text is None or self._too_soon(event):
                continue
            if event.get("event") in _STEPS:
                view.step(text, progress)
            else:
                view.important(text)
        return progress

    def _cause_of(self, event: Event) -> str:
        return self._cause(event["attempt"]) if event.get("attempt") else ""

    def _too_soon(self, event: Event) -> bool:
        """Whether a checkpoint follows another one so closely that it is not worth a line."""
        if event.get("event") != "checkpoint":
            return False
        since = time.monotonic() - self._checkpoint
        if since >= EVERY_SECONDS:
            self._checkpoint = time.monotonic()
        return since < EVERY_SECONDS


class RunDisplay:
    """Shows the progress of a run, and what ends it; a `TrainingObserver`."""

    def __init__(self) -> None:
        self._causes: dict[int, str] = {}
        self._display: ProgressDisplay | None = None

    @contextlib.contextmanager
    def watch(self, directory: Path, *, launched: bool) -> Iterator[None]:
        # Beside other ranks in one terminal (torchrun, srun) a live display would be torn.
        live = None if launched else False
        self._display = ProgressDisplay(
            directory, live=live, cause=lambda attempt: self._causes.get(attempt, "")
        )
        with self._display:
            yield

    def restarted(self, attempt: int, cause: str) -> None:
        self._causes[attempt] = cause

    def failed(self, error: HeadwayError) -> None:
        if self._display is not None:
            # The process ends right after this, and the display's thread with it.
            self._display.close()
        show_error(error, trace=False)
