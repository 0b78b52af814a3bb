"""Settings of the whole process that several threads may need changed at the same time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class Switch:
    """A setting that the first user switches and the last one switches back; `turn` returns what switches it back."""

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


def full_precision() -> AbstractContextManager[None]:
    """No TF32 and no bfloat16 in products of float32 matrices inside; several threads may use it at once."""
    return _PRECISE.on()


def _make_precise() -> Callable[[], None]:
    """Switch rounding off; returns a function that switches it back.

    Torch has an old setting for all and newer ones for each library, and does not read the old one once a newer one was
    used.
    """
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    newer = {library: library.fp32_precision for library in libraries if hasattr(library, "fp32_precision")}
    try:
        older: str | None = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        older = None
        for library in newer:
            library.fp32_precision = "ieee"

    def restore() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for library, precision in newer.items():
            library.fp32_precision = precision

    return restore


_PRECISE = Switch(_make_precise)
