"""The page of `headway evaluate --report`: figures, slices with marks, the worst bodies."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from headway import __version__
from headway.errors import DataError
from headway.report.pictures.canvas import style_sheet
from headway.report.pictures.segmentation import segmentation_picture

PLANES = 3


def segmentation_page(
    name: str,
    figures: Sequence[Sequence[str]],
    errors: Sequence[tuple[str, str, Sequence[Sequence[str]]]],
    *,
    segments: Any,
    truth: Any,
    image: Any | None = None,
) -> str:
    """HTML, one file without network access or scripts.

    Args:
        figures: Name, figure and what it says, of each row of the first table.
        errors: Title, heading of the third column, and rows of each further table.
        segments: [z, y, x] ids, sliced plane by plane; `truth` and `image` likewise.

    Raises:
        DataError: The image has another shape than the segments.
    """
    if image is not None and tuple(image.shape) != tuple(segments.shape):
        raise DataError(
            f"the image has shape {list(image.shape)}, and the segments {list(segments.shape)}",
            fix="Give the image of the same voxels, or none.",
        )
    depth = segments.shape[0]
    planes = {
        z: (
            None if image is None else np.asarray(image[z]),
            np.asarray(truth[z]),
            np.asarray(segments[z]),
        )
        for z in sorted({depth * part // (PLANES + 1) for part in range(1, PLANES + 1)})
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headway.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("segmentation.html").render(
        version=__version__,
        name=name,
        light=style_sheet(0),
        figures=figures,
        errors=errors,
        planes=list(planes),
        picture=base64.b64encode(segmentation_picture(planes)).decode(),
    )
