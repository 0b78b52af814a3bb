"""Memory that is used again and again, where fresh memory for each product would cost more than the product."""

import threading

import torch
from torch import Tensor

CACHE = 1 << 19
"""How many numbers a CPU's cache holds: matrices made in one place are made this many numbers at a time."""

_BUFFERS = threading.local()


def memory_bound(tensor: Tensor) -> bool:
    """Whether products of such tensors wait for memory rather than for arithmetic, as they do on a CPU."""
    return tensor.device.type == "cpu"


def scratch_buffer(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for `count` numbers on the CPU, the same at every call in a thread, so that it stays mapped.

    It is never returned to the system. A small buffer stays in the cache, too.
    """
    kept: dict[torch.dtype, Tensor] = _BUFFERS.__dict__.setdefault("kept", {})
    if dtype not in kept or kept[dtype].numel() < count:
        with torch.inference_mode(False):  # else it could not be written to outside
            kept[dtype] = torch.empty(max(count, CACHE), dtype=dtype, device="cpu")
    return kept[dtype][:count]
