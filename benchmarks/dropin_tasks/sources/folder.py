"""The data folder of the project, by the environment variable that the library itself reads."""

from __future__ import annotations

import os
from pathlib import Path

from ..store import UnavailableError

VARIABLE = "NOISYGRAD_DATA"


def data_file(*place: str) -> Path:
    """A file of the data folder; raises `UnavailableError` where there is none."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise UnavailableError(f"{'/'.join(place)} is needed: point {VARIABLE} at the data folder")
    path = Path(folder, *place)
    if not path.exists():
        raise UnavailableError(f"{'/'.join(place)} is not under {VARIABLE}")
    return path
