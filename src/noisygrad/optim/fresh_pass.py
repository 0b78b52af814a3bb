"""`fisher_pass="fresh"`: statistics from a forward pass of their own, new weights and BatchNorm in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisygrad.curvature.capture import Capture
from noisygrad.kernels.factorisation import capturing
from noisygrad.optim.statistics import half_of, is_out_of_memory, take_statistics

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer

Run = Callable[[], tuple[Tensor, Tensor] | Tensor]


def take_fresh_statistics(optimizer: NoisyOptimizer, run: Run) -> None:
    """One more draw, for statistics alone; `run` is the user's closure."""
    pending = optimizer._pending
    pending.own_buffer()
    draws, weights = pending.draws, pending.weights
    # In evaluation mode to the end: statistics of a norm's scale ask what it was normalised by.
    with optimizer._drawn(True) as (_, capture), _evaluation_mode(optimizer.model):
        assert capture is not None
        output, target = _forward(optimizer, capture, run)
        optimizer.likelihood.check(output, target)
        with torch.autocast(optimizer.device.type, enabled=False):
            output = output if output.dtype in {torch.float32, torch.float64} else output.float()
            take_statistics(optimizer, capture, output, optimizer.likelihood.clamp_invalid_targets(output, target))
    # That draw has no gradient: the step must not count it.
    pending.draws, pending.weights = draws, weights


def _forward(optimizer: NoisyOptimizer, capture: Capture, run: Run) -> tuple[Tensor, Tensor]:
    """Output and target; of half of the examples, with a warning, where a GPU's memory does not suffice for all."""
    while True:
        first = _FirstExamples(optimizer.forward_limit)
        try:
            with first.of(optimizer.model):
                result = run()
            break
        except RuntimeError as error:
            # The ranks of a distributed training call their models together, or wait for each other for ever.
            alone = not (optimizer.ranks.active or optimizer.structure.replicas or capturing())
            if not (is_out_of_memory(error) and alone and first.given > 1):
                raise
        capture.take()
        advice = "A closure that cannot work on part of a batch needs smaller ones"
        optimizer.forward_limit = half_of(first.given, advice)
    if not isinstance(result, tuple):
        raise TypeError('fisher_pass="fresh" needs a closure that returns (output, target)')
    output, target = result
    return output, target[: first.given] if first.cut else target


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


class _FirstExamples:
    """Lets a model see the first examples of a batch: of every tensor it is called with that is as long as the first.

    Args:
        limit: How many; None for all.
    """

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
