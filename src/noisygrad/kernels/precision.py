"""Products of float32 matrices in full precision, whatever the user allows elsewhere.

An inverse has large and small directions; rounding errors that are small in the former are large in the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from noisygrad.kernels.switches import Switch


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
