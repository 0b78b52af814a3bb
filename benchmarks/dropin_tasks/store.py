"""Data as plain .npz files in one folder, made when first asked for: another machine needs only the folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from .task import Arrays


class UnavailableError(Exception):
    """The data cannot be had here; the message says what to install or where to point."""


def default_folder() -> Path:
    """Where data are kept unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "noisygrad-dropin"


class Store:
    """A folder of prepared data.

    `only_prepared`: never look for the data themselves, as on a machine that has none of the packages.
    """

    def __init__(self, folder: Path, *, only_prepared: bool = False) -> None:
        self.folder, self.only_prepared = folder, only_prepared
        self._held: dict[str, Arrays] = {}

    def arrays(self, name: str) -> Arrays:
        """The arrays of a source; raises `UnavailableError` where they can be neither read nor made."""
        if name not in self._held:
            path = self.folder / f"{name}.npz"
            if not path.exists():
                if self.only_prepared:
                    raise UnavailableError(
                        f"{path.name} is not in the prepared folder: run --prepare where it can be made"
                    )
                self._write(path, self._make(name))
            with np.load(path, allow_pickle=False) as file:
                self._held[name] = {key: file[key] for key in file.files}
        return self._held[name]

    def _make(self, name: str) -> Arrays:
        from .sources import SOURCES  # what it needs is only imported where data are made

        return SOURCES[name](self)

    def _write(self, path: Path, arrays: Arrays) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **arrays)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
