"""Pictures below each other in one file, in light or dark as the reader has it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.report.canvas import style_sheet

MARGIN = 16
HEADING = 26


def stack(pictures: Sequence[tuple[str, str]]) -> str:
    """Pictures (heading, SVG text) below each other."""
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
