"""Files that several processes add to: locks that end with their process, and writes that are whole or not at all."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from noisygrad.archive import lock

if sys.platform == "win32":
    BINARY = os.O_BINARY
else:
    BINARY = 0


def write_all(descriptor: int, data: bytes, path: Path) -> None:
    """One write, safe on the disk afterwards; a full disk leaves the file as it was."""
    before = os.fstat(descriptor).st_size
    written = os.write(descriptor, data)
    if written < len(data):
        os.ftruncate(descriptor, before)
        raise OSError(f"only {written} of {len(data)} bytes could be added to {path}, which is as before: disk full?")
    os.fsync(descriptor)


@contextmanager
def locked(descriptor: int, path: Path, kind: Literal["shared", "exclusive"]) -> Iterator[None]:
    """Hold a lock of an open file, and close the file at the end, which lets the lock go; so does the process's end."""
    try:
        try:
            lock(descriptor, kind)
        except OSError as reason:
            raise OSError(f"cannot lock {path} ({reason}): put the results on a file system with locks") from reason
        yield
    finally:
        os.close(descriptor)
