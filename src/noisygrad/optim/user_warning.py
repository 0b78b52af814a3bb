"""Warnings that name the user's own line, however many frames of ours and of torch's lie in between."""

import sys
import warnings
from pathlib import Path

import torch

_NOT_THEIRS = tuple(f"{folder}{Path('/')}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def warn_user(message: str) -> None:
    """A UserWarning at the innermost line that is neither in this package nor in torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_THEIRS) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
