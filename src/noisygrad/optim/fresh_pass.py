"""A forward pass for statistics alone, of as many examples as there is memory for, BatchNorm in evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from noisygrad.optim.user_warning import warn_user

_OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "unable to find an engine to execute")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Also where a library of the GPU's has not found the memory that it works in, and says so in its own way."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY)


def half_of(examples: int, advice: str) -> int:
    """How many examples statistics are taken from when memory did not suffice for this many; with a warning."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn_user(
        f"out of memory while taking statistics: from now on they are taken from {examples // 2} examples of a batch. "
        f"{advice}"
    )
    return examples // 2


class FirstExamples:
    """Lets a model see the first `limit` examples of a batch: of every tensor as long as the first; None for all."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.given = 0
        """How many examples the model was last called with."""
        self.cut = False
        """Whether they were fewer than it was to be called with."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the model are watched, before any hook of the user's."""
        handle = model.register_forward_pre_hook(self._watch, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _watch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        batches = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        if not batches:
            return None
        batch = batches[0]
        self.given = batch if self._limit is None else min(batch, self._limit)
        self.cut = self.given < batch
        if not self.cut:
            return None

        def part(value: Any) -> Any:
            return value[: self.given] if isinstance(value, Tensor) and value.dim() and len(value) == batch else value

        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}
