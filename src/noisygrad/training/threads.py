"""Small networks train faster on one thread: their matrices are too small to share out, and threads would wait.

On two busy cores the difference is sevenfold. One thread also makes a result independent of the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """One thread for torch's CPU work inside; as many as before outside."""
    threads = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if when:
            torch.set_num_threads(threads)
