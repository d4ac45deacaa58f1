"""Makes docs/images/run.svg, the picture of the README, from a run directory.

    headway demo --directory runs/demo
    python docs/make_images.py runs/demo

The picture is two of the report's own: the loss, and one step of every rank.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from headway.report.canvas import style_sheet
from headway.report.curves import loss_picture
from headway.report.history import read_history
from headway.report.lanes import representative_step, timeline_picture
from headway.timeline import Timeline

TARGET = Path(__file__).parent / "images" / "run.svg"
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


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(Path(sys.argv[1])), encoding="utf-8")
