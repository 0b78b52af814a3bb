"""Files that several processes add to: locks that end with their process, and writes that are whole or not at all."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


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
            _lock(descriptor, kind)
        except OSError as reason:
            raise OSError(f"cannot lock {path} ({reason}): put the results on a file system with locks") from reason
        yield
    finally:
        os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    BINARY = os.O_BINARY

    def _lock(descriptor: int, kind: Literal["shared", "exclusive"]) -> None:
        # Windows locks bytes, and for readers too: one far behind the end hinders nobody but other lockers.
        os.lseek(descriptor, 2**40, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)

else:
    import fcntl

    BINARY = 0

    def _lock(descriptor: int, kind: Literal["shared", "exclusive"]) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX)
