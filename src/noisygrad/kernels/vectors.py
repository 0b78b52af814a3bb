"""Operations on long vectors that a CPU and a GPU do best in different ways."""

from __future__ import annotations

import torch
from torch import Tensor


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """Σ a b over the last dimension, `[..., 1]`; not by cuBLAS, which would keep some memory of its own for it."""
    on_cpu = first.device.type == "cpu"
    found: Tensor = torch.linalg.vecdot(first, second) if on_cpu else (first * second).sum(dim=-1)
    return found.unsqueeze(-1)


def scale_unless_one_(vector: Tensor, factor: Tensor) -> Tensor:
    """In place: vector · factor; a CPU looks first whether the pass over the vector would change anything."""
    if factor.device.type == "cpu" and not torch.compiler.is_compiling() and bool((factor == 1.0).all()):
        return vector
    return vector.mul_(factor)
