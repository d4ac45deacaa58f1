"""Makes the pictures of the documentation that are not a command's own.

    headway demo --directory runs/demo
    python docs/make_images.py runs/demo

images/pipelines.svg: some pipeline schedules on one time axis. images/run.svg, where a run is
given: two pictures of its report, the loss and one step of every rank.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from headway.cli.schedule_costs import Costs
from headway.cli.schedule_figures import figures
from headway.report.canvas import style_sheet
from headway.report.curves import loss_picture
from headway.report.history import read_history
from headway.report.lanes import representative_step, timeline_picture
from headway.report.schedule_picture import picture_svg
from headway.schedule.named import make_schedule
from headway.timeline import Timeline

IMAGES = Path(__file__).parent / "images"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "chimera", "chimera-split")
RANKS = 4
MARGIN = 16
HEADING = 26


def stack(pictures: list[tuple[str, str]]) -> str:
    """Pictures (heading, SVG text) below each other, in light or dark as the reader has it."""
    parts, top, width = [], float(MARGIN), 0.0
    for heading, svg in pictures:
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        assert box is not None
        wide, high = float(box.group(1)), float(box.group(2))
        parts.append(
            f'<text x="{MARGIN}" y="{top + 14}" fill="var(--ink)" '
            f'style="font: 600 14px system-ui, sans-serif">{heading}</text>'
        )
        place = f'x="{MARGIN}" y="{top + HEADING}" width="{wide}" height="{high}"'
        parts.append(svg.strip().replace("<svg ", f"<svg {place} ", 1))
        top, width = top + HEADING + high + MARGIN, max(width, wide)
    width += 2 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {top:g}" '
        f'width="{width:g}" height="{top:g}">\n<style>:root {{ {style_sheet(0)} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root {{ {style_sheet(1)} }} }}</style>\n"
        '<rect width="100%" height="100%" rx="8" fill="var(--card)"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def picture(run: Path) -> str:
    """The README's picture of a run that is long enough to have a traced step."""
    history = read_history(run)
    step = representative_step(history)
    spans = [span for span in history.timeline.spans if span.node == f"step {step}"]
    loss, timeline = loss_picture(history), timeline_picture(Timeline(tuple(spans)))
    assert loss is not None
    assert timeline is not None
    ranks = len({span.rank for span in spans})
    return stack([("Loss", loss), (f"Step {step} on {ranks} ranks", timeline)])


def schedules_picture() -> str:
    """Schedules of as many micro-batches as ranks."""
    shown = [
        figures(make_schedule(name, stages=RANKS, microbatches=RANKS), Costs())
        for name in SCHEDULES
    ]
    heading = f"{RANKS} ranks, {RANKS} micro-batches, backward twice as long as forward"
    return stack([(heading, picture_svg(shown))])


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "pipelines.svg").write_text(schedules_picture(), encoding="utf-8")
    if sys.argv[1:]:
        (IMAGES / "run.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
