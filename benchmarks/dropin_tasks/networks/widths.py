"""Widths of layers under a factor."""

from __future__ import annotations


def scaled(width: int, factor: float, multiple: int = 8) -> int:
    """`width` times `factor`, as a multiple of what heads and groups divide."""
    return max(multiple, round(width * factor / multiple) * multiple)
