"""Batch normalisation for one draw of the weights.

Running statistics are averages over the draws of many training steps. Where draws differ much, as those of a
factorised posterior do, they fit none of them: in training each draw is normalised by what it makes of its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def running_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of batch normalisation that keep running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def own_statistics(
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    parts: Iterable[Tensor],
    forward: Callable[[dict[str, Tensor], Tensor], Tensor],
) -> dict[str, Tensor]:
    """The model's buffers with the statistics of these inputs in place of the running ones.

    Args:
        model: In evaluation mode, and so again afterwards.
        buffers: All buffers by name; they stay as they are.
        parts: Batches of inputs, of the same size or nearly so, since each counts the same.
        forward: Runs the model with the draw's weights and the buffers that it is given, and updates these in place.
    """
    own = dict(buffers)
    norms = running_norms(model)
    for name in norms:
        prefix = f"{name}." if name else ""
        for buffer, start in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            own[prefix + buffer] = torch.full_like(buffers[prefix + buffer], start)
    with _averaging(norms.values()):
        for part in parts:
            forward(own, part)
    return own


@contextmanager
def _averaging(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """The layers' statistics become plain means over the batches they see."""
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm, _, _ in before:
            norm.training, norm.momentum = True, None
        yield
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
