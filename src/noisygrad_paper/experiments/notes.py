"""How far jobs in other processes are: each keeps a note of it in a folder, which a thread of this process reads."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY_SECONDS = 1.0


class ProgressFile:
    """In the process of a job: what it calls to say how far it is, at most once in a second kept in its note."""

    def __init__(self, folder: str | None, number: int) -> None:
        self._path = None if folder is None else Path(folder) / str(number)
        self._next = 0.0

    def __call__(self, fraction: float, text: str) -> None:
        """So much is done, and this is being done."""
        now = time.monotonic()
        if self._path is None or now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        written = self._path.with_suffix(".new")
        try:
            written.write_text(json.dumps([fraction, text]), encoding="utf-8")
            os.replace(written, self._path)
        except OSError:  # a full disk, or the folder is gone with the run: no reason to stop the work
            self._path = None


@contextmanager
def notes_read(tell: Callable[[int, float, str], None]) -> Iterator[str]:
    """A folder for notes; whenever one changes, `tell` gets the job's number, the fraction and the text."""
    with tempfile.TemporaryDirectory(prefix="noisygrad-", ignore_cleanup_errors=True) as folder:
        over = threading.Event()
        thread = threading.Thread(target=_read, args=(Path(folder), tell, over), daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            over.set()
            thread.join()


def _read(folder: Path, tell: Callable[[int, float, str], None], over: threading.Event) -> None:
    known: dict[str, str] = {}
    while not over.wait(_EVERY_SECONDS):
        for path in sorted(folder.glob("[0-9]*")):
            if path.suffix:
                continue
            text = path.read_text(encoding="utf-8")
            if known.get(path.name) != text:
                known[path.name] = text
                tell(int(path.name), *json.loads(text))
