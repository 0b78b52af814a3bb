"""Fisher statistics of one batch, of as many of its examples as memory allows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisygrad.curvature import summaries
from noisygrad.curvature.capture import Capture, Record
from noisygrad.curvature.fisher import depends_on, fisher_passes
from noisygrad.kernels.factorisation import capturing

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer


_OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "unable to find an engine to execute")


def take_statistics(optimizer: NoisyOptimizer, capture: Capture, output: Tensor, target: Tensor) -> None:
    """Add what a batch says of the Fisher to what is pending.

    Where a GPU's memory does not suffice, half of the examples are taken, with a warning, from now on.
    """
    batch = output.shape[len(optimizer.likelihood.replicas)]
    records = capture.take()
    if depends_on(output, capture.consumed_nodes) and depends_on(output, {record.edge.node for record in records}):
        raise RuntimeError(
            "two losses share a part of one forward pass (a trunk with two heads, say), of which the statistics were "
            "already taken for the first: call the model once for each draw.nll"
        )
    keep = min(batch, optimizer.options.stats_batch or batch, optimizer.stats_limit or batch)
    first = not optimizer._pending.statistics
    while True:
        try:
            _take(optimizer, records, output, target, keep)
            capture.consume(records)
            return
        except RuntimeError as error:
            # While a graph is recorded nothing can be tried again, and sums with earlier draws may be half done.
            if not is_out_of_memory(error) or keep == 1 or not first or capturing():
                raise
        pending = optimizer._pending
        pending.statistics, pending.examples, pending.trails, pending.known_finite = {}, {}, [], True
        optimizer.stats_limit = keep = half_of(keep, f"stats_batch={keep // 2} says so from the start")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Also where a library of the GPU's has not found the memory that it works in, and says so in its own way."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY)


def half_of(examples: int, advice: str) -> int:
    """So many were too many for the memory: how many statistics are taken from instead, with a warning."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warnings.warn(
        f"out of memory while taking statistics: from now on they are taken from {examples // 2} examples of a batch. "
        f"{advice}",
        stacklevel=3,
    )
    return examples // 2


def _take(optimizer: NoisyOptimizer, records: list[Record], output: Tensor, target: Tensor, keep: int) -> None:
    block_of = optimizer.structure.block_of
    scarce = optimizer.device.type in summaries.DEVICES
    passes = fisher_passes(
        optimizer.options.fisher,
        optimizer.likelihood,
        output,
        target,
        records=records,
        others=optimizer._others,
        generators=optimizer.generators,
        dtype=optimizer.dtype,
        keep=keep,
        summarise=(lambda unit, one: block_of[unit.name].summarise(unit, one)) if scarce else None,
    )
    blocks, current = optimizer.structure.blocks, optimizer.factors.statistics
    for one in passes:
        optimizer._pending.add_statistics(blocks, one, keep, current)  # only relative weights count
        del one  # before the next is made


def warn_uncalled_layers(optimizer: NoisyOptimizer) -> None:
    """Warn, once, of layers that have a gradient but no statistics: their posterior would quietly become the prior."""
    if optimizer.warned_uncalled_layers or optimizer.ranks.active:  # what one rank has not used another may have
        return
    parameters, seen = optimizer.structure.parameters, optimizer._pending.units
    unseen = [
        unit.name
        for unit in optimizer.structure.units
        if unit.name not in seen and any(parameters[slot.parameter].grad is not None for slot in unit.slots)
    ]
    if not unseen:
        return
    optimizer.warned_uncalled_layers = True
    names = ", ".join(repr(name) for name in unseen[:4]) + (", …" if len(unseen) > 4 else "")
    warnings.warn(
        f"{names}: the loss depends on the weights of {'this layer' if len(unseen) == 1 else 'these layers'}, but not "
        "by calling the layer (F.linear(x, layer.weight) does so, for example). The Fisher sees layers that are "
        "called, so the posterior of these weights will be the prior. Call the layer, or make the weight an "
        "nn.Parameter of a module of your own, which gets a diagonal block",
        stacklevel=8,
    )
