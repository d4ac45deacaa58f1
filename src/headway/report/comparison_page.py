"""The page of `headway compare`: a table, three pictures, and what hinders each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jinja2
from markupsafe import Markup

from headway import __version__
from headway.report.pictures.canvas import style_sheet


def comparison_page(
    name: str,
    facts: Sequence[tuple[str, str]],
    table: Sequence[Sequence[str]],
    pictures: Sequence[tuple[str, str]],
    *,
    sentences: Sequence[str],
    hindrances: Sequence[tuple[str, str]],
    lines: Mapping[str, Sequence[str]],
) -> str:
    """HTML, one file without network access or scripts.

    Args:
        facts: What was compared, and where: names and texts.
        table: Headings, then rows.
        pictures: Heading and SVG.
        sentences: Where headway stands.
        hindrances: Of each framework, what hinders it.
        lines: Of each framework, the lines that a user writes for it.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headway.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("comparison.html").render(
        version=__version__,
        name=name,
        light=Markup(style_sheet(0)),
        dark=Markup(style_sheet(1)),
        facts=facts,
        headings=table[0],
        rows=table[1:],
        # Our own pictures alone: the template escapes everything else.
        pictures=[(heading, Markup(svg)) for heading, svg in pictures],
        sentences=sentences,
        hindrances=hindrances,
        lines=lines,
    )
