"""`step(closure)`: the draws that the optimiser makes by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisygrad.curvature.capture import Record
from noisygrad.curvature.fisher import passes_after_backward
from noisygrad.curvature.passes import Pass
from noisygrad.optim.fresh_pass import take_fresh_statistics
from noisygrad.optim.losses import measure_loss

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer

Closure = Callable[[], tuple[Tensor, Tensor] | Tensor]
"""Returns (output, target); or, having called `backward`, the mean loss."""


@torch.enable_grad()
def evaluate(optimizer: NoisyOptimizer, closure: Closure) -> None:
    """`mc_samples` draws with the closure, and where `fisher_pass="fresh"` asks for it, one more for statistics."""
    options = optimizer.options
    afresh = options.fisher_pass == "fresh" and options.stats_due(optimizer._steps + 1)
    for _ in range(options.mc_samples):
        _evaluate_once(optimizer, closure, only=options.mc_samples == 1 and not afresh)
    if afresh:
        take_fresh_statistics(optimizer, partial(_run, optimizer, closure))


def _evaluate_once(optimizer: NoisyOptimizer, closure: Closure, *, only: bool) -> None:
    with optimizer._drawn(optimizer.options.fisher_pass == "same", restore=not only) as (_, capture):
        if capture is not None:
            capture.watch_backward = True
        result = _run(optimizer, closure)
        if isinstance(result, tuple):
            if len(result) != 2:
                raise TypeError(f"the closure must return (output, target); it returned {len(result)} things")
            if capture is not None:
                capture.watch_backward = False
            measure_loss(optimizer, capture, *result).backward()
            return
        if not isinstance(result, Tensor):
            raise TypeError(f"the closure must return (output, target), or a loss; it returned {type(result).__name__}")
        warnings.warn(
            "the closure returned a loss, not (output, target): the Fisher is then the empirical one, which is a worse "
            "approximation. Return (model(x), y) for the true Fisher",
            stacklevel=8,
        )
        if all(gradient is None for gradient in _gradients(optimizer)):
            raise RuntimeError("the closure returned a loss without having called backward() on it")
        optimizer._pending.add_loss(result)
        if capture is not None:
            batch, passes = _empirical(optimizer, capture.take())
            optimizer._pending.add_statistics(optimizer.structure.blocks, passes, batch, optimizer.factors.statistics)


def _empirical(optimizer: NoisyOptimizer, records: list[Record]) -> tuple[int, dict[str, Pass]]:
    """How many examples a batch had that the user has differentiated, and its passes.

    Nobody says how many, so it is the size of a layer's input that suits all of them: of the last layer's, if it does,
    since the first may look positions up, or have the sequence in front.
    """
    seen = [record for record in records if record.kept]
    measure = partial(passes_after_backward, seen, optimizer._others, dtype=optimizer.dtype)
    lead = len(optimizer.structure.replicas)
    *likely, last = dict.fromkeys(record.inputs.shape[lead] for record in reversed(seen)) or [1]
    for size in likely:
        with suppress(ValueError):
            return size, measure(size)
    return last, measure(last)


def _run(optimizer: NoisyOptimizer, closure: Closure) -> tuple[Tensor, Tensor] | Tensor:
    earlier = _gradients(optimizer) if optimizer._pending.draws else []
    result = closure()
    if any(old is not None and new is not old for old, new in zip(earlier, _gradients(optimizer), strict=False)):
        raise RuntimeError("the closure dropped the gradients of an earlier draw: take zero_grad out of it")
    return result


def _gradients(optimizer: NoisyOptimizer) -> list[Tensor | None]:
    return [parameter.grad for parameter in optimizer.structure.parameters.values()]
