"""Settings of the whole process that several threads may need changed at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Switch:
    """A setting that the first user switches and the last one switches back.

    Args:
        turn: Switches it; returns a function that switches it back.
    """

    def __init__(self, turn: Callable[[], Callable[[], None]]) -> None:
        self._turn = turn
        self._lock = threading.Lock()
        self._inside = 0
        self._back: Callable[[], None] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """The setting is switched inside."""
        with self._lock:
            if self._inside == 0:
                self._back = self._turn()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._back is not None:
                    self._back()
                    self._back = None
