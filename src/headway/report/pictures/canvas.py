"""One SVG text from matplotlib's object interface, for light and dark schemes.

The same data give the same bytes. Colours are names that the page's style sheet resolves; each
carries its light value for a picture that stands alone. Text stays text. `stack_svg` puts pictures
below each other in one file.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS: Mapping[str, tuple[str, str]] = {
    # name: (light, dark)
    "ink": ("#1d2430", "#e4e9f0"),
    "muted": ("#5c6675", "#9aa6b6"),
    "grid": ("#dfe4ea", "#2c3542"),
    "card": ("#ffffff", "#171d26"),
    "series-0": ("#2563c9", "#74a9ff"),
    "series-1": ("#c2570c", "#f39c55"),
    "series-2": ("#0f8a75", "#47ccb2"),
    "series-3": ("#8b46c6", "#c193f5"),
    "series-4": ("#b0306d", "#f07fb1"),
    "series-5": ("#867012", "#d9be4e"),
    "series-6": ("#36823a", "#7fce7b"),
    "series-7": ("#586879", "#a9b8c8"),
    "forward": ("#3b7de0", "#6ea8ff"),
    "backward": ("#1b4fa3", "#3f78d8"),
    "wait": ("#dc4a1f", "#ff7d55"),
    "queued": ("#b9e0d8", "#1d5249"),
    "exchange": ("#16937f", "#3fc4ab"),
    "data": ("#c28a06", "#eabb45"),
    "update": ("#7d4cc2", "#b18bf0"),
    "lookups": ("#4f9fb8", "#7cc7dc"),
    "validate": ("#b93b80", "#ec83ba"),
    "checkpoint": ("#568a2c", "#93cc63"),
    "other": ("#b3bcc7", "#4e5a69"),
}
_NAMES = tuple(COLOURS)
Hue = Callable[[str], str]
"""The colour of a name: `colour` for SVG, the light one for PNG."""
NUM_SERIES = sum(name.startswith("series-") for name in COLOURS)


def colour(name: str) -> str:
    """The stand-in that matplotlib is given for a named colour; `draw` replaces it."""
    # matplotlib rejects CSS variables; this prefix occurs in no real colour of the pictures.
    return f"#0101{_NAMES.index(name):02x}"


def style_sheet(scheme: int) -> str:
    """The declarations of all colours for the light (0) or the dark (1) scheme."""
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())


def draw(
    name: str,
    size: tuple[int, int],
    paint: Callable[[Figure], None],
    *,
    alt: str,
    titles: Mapping[str, str] | None = None,
) -> str:
    """One picture as SVG text, to stand in a page or alone.

    Args:
        name: Distinguishes the picture's references from those of other pictures in the page.
        size: Width and height in points; one point is one unit of the picture.
        paint: Fills the figure; all colours come from `colour`.
        titles: Group id (given to an artist with `set_gid`) -> text shown when the pointer rests.
    """
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(_settings(name)):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        figure.patch.set_visible(False)
        paint(figure)
        figure.savefig(
            buffer,
            format="svg",
            # Without the date the same data give the same bytes.
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _clean(buffer.getvalue(), alt, titles or {})


def draw_png(size: tuple[int, int], paint: Callable[[Figure, Hue], None]) -> bytes:
    """One picture as PNG in light colours, at two pixels a point."""
    import matplotlib
    from matplotlib.figure import Figure

    def light(name: str) -> str:
        return COLOURS[name][0]

    buffer = io.BytesIO()
    with matplotlib.rc_context({"font.family": ["sans-serif"], "font.size": 11}):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        figure.patch.set_facecolor(light("card"))
        paint(figure, light)
        figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
    return buffer.getvalue()


def plain_axes(
    figure: Figure,
    *,
    place: tuple[int, int, int] = (1, 1, 1),
    grid: str = "y",
    hue: Hue = colour,
) -> Axes:
    """Axes without a box, with quiet grid lines behind the data.

    Args:
        place: Rows, columns, and the number of the axes among them, from 1.
    """
    axes = figure.add_subplot(*place)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(hue("grid"))
    axes.tick_params(length=0, colors=hue("muted"), labelcolor=hue("muted"))
    axes.grid(True, axis="y" if grid == "y" else "x", color=hue("grid"), linewidth=0.8)
    return axes


def legend(axes: Axes, columns: int = 4, *, hue: Hue = colour, **options: Any) -> None:
    """The legend in one line above the data, where it hides nothing.

    Args:
        options: Of `Axes.legend`.
    """
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.2,
        labelcolor=hue("ink"),
        **({"columnspacing": 1.2} | options),
    )


def _settings(name: str) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",
        # matplotlib's ids are random without a salt, and would clash between pictures with the same
        # one.
        "svg.hashsalt": f"headway {name}",
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11,
        "text.color": colour("ink"),
        # A dollar sign in a user's label does not begin a formula.
        "text.parse_math": False,
        "axes.labelcolor": colour("muted"),
        "axes.unicode_minus": True,
        "axes.formatter.useoffset": False,
        "path.simplify": True,
    }


def _clean(svg: str, alt: str, titles: Mapping[str, str]) -> str:
    """Only the drawing: no prolog, no metadata, no rules or ids that would reach other pictures."""
    # Several pictures share one page: ids and global style rules of one would reach the others.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box.group() if box else ""} role="img" aria-label="{html.escape(alt)}" '
        'stroke-linejoin="round">'
    )
    svg = head + svg[svg.index(">") + 1 :]
    for group, text in titles.items():
        svg = svg.replace(
            f'<g id="{group}">', f"<g><title>{html.escape(_printable(text))}</title>", 1
        )
    # An id that nothing refers to could only clash with one of another picture.
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(
        r' id="([^"]*)"', lambda found: found.group() if found.group(1) in used else "", svg
    )
    # The font of the page; the size is what matplotlib has laid out.
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = re.sub(r"#0101([0-9a-f]{2})", _variable, svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"\n\s*", "\n", svg).strip() + "\n"


def _variable(found: re.Match[str]) -> str:
    name = _NAMES[int(found.group(1), 16)]
    return f"var(--{name}, {COLOURS[name][0]})"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


# Pictures below each other in one file, in light or dark as the reader has it.


MARGIN = 16
HEADING = 26


def stack_svg(pictures: Sequence[tuple[str, str]]) -> str:
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
