"""Figures inside the page: vector images as data URIs, one for light and one for dark screens."""

import base64
import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

from noisygrad.palette import ON_DARK

_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NEUTRAL = re.compile("|".join(ON_DARK), re.IGNORECASE)
_WIDE = 760  # pixels: such a figure scrolls sideways on a narrow screen rather than shrink beyond reading
_DOTS_PER_INCH = 110  # of parts that are pixels, such as matrices


def svg(figure: Figure) -> str:
    """The figure as one `<svg>` element: text as outlines, and the same bytes every time."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "noisygrad"}):
        figure.savefig(buffer, format="svg", dpi=_DOTS_PER_INCH, metadata={"Date": None})
    return _METADATA.sub("", _PROLOGUE.sub("", buffer.getvalue()), count=1)


def picture(figure: Figure, alt: str) -> str:
    """A `<picture>` element that shows the figure in the reader's colour scheme."""
    if not alt.strip():
        raise ValueError("alt is empty: say what the figure shows, for those who cannot see it")
    light = svg(figure)
    dark = _NEUTRAL.sub(lambda found: ON_DARK[found.group().lower()], light)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    wide = ' class="wide"' if width > _WIDE else ""
    return (
        f'<picture{wide}><source media="(prefers-color-scheme: dark)" srcset="{_data_uri(dark)}">'
        f'<img src="{_data_uri(light)}" alt="{html.escape(alt)}" width="{width}" height="{height}"></picture>'
    )


def _data_uri(text: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
