"""Networks that were trained before, for fine-tuning; their weights are kept like data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..task import Arrays

if TYPE_CHECKING:
    from ..store import Store

SOURCES: Mapping[str, Callable[[Store], Arrays]] = {}
