"""Where data come from: bundled sets, the data folder of the project, packages that carry data, Python's own texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..task import Arrays
from . import images, tables, texts, trunks

if TYPE_CHECKING:
    from ..store import Store

SOURCES: Mapping[str, Callable[[Store], Arrays]] = {
    **images.SOURCES,
    **tables.SOURCES,
    **texts.SOURCES,
    **trunks.SOURCES,
}
"""What makes the arrays of each file of the store."""
