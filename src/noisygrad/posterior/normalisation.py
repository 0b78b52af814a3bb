"""Batch normalisation for one draw of the weights.

Running statistics are averages over the draws of many training steps. Where draws differ much, as those of a
factorised posterior do, they fit none of them: in training each draw is normalised by what it makes of its own batch.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from noisygrad.distributed import processes
from noisygrad.posterior.inputs import Call
from noisygrad.posterior.modes import with_attributes


def running_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of batch normalisation that keep running statistics, by name.

    Raises ValueError where there are none, or where they would wait for other processes.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.track_running_stats
    }
    if not norms:
        raise ValueError("norm_data is for batch normalisation, and the model has none with running statistics")
    if processes().size > 1 and any(isinstance(norm, nn.SyncBatchNorm) for norm in norms.values()):
        raise ValueError(
            "norm_data cannot be used with SyncBatchNorm in several processes, whose draws are not the same. Load the "
            "posterior in one process, into a model with BatchNorm"
        )
    return norms


def norm_batches(data: Call, batch_size: int | None, dim_of: Callable[[Tensor], int]) -> list[Call]:
    """The examples in batches of nearly the same size, at least two in each: every k-th one, in case they are sorted.

    Raises ValueError where there are fewer than two.
    """
    count = data.examples(dim_of)
    if count < 2:
        raise ValueError(f"norm_data must have at least two examples to have statistics, got {count}")
    batches = 1 if batch_size is None else min(math.ceil(count / batch_size), count // 2)
    return [data.chosen(slice(first, None, batches), dim_of) for first in range(batches)]


def own_statistics(
    norms: Mapping[str, _BatchNorm],
    buffers: Mapping[str, Tensor],
    parts: Iterable[Call],
    forward: Callable[[dict[str, Tensor], Call], Tensor],
) -> dict[str, Tensor]:
    """The model's buffers with the statistics of these inputs in place of the running ones.

    `norms` are from `running_norms`, and are afterwards as before; so are `buffers`, all that the model has. The parts
    are batches of inputs of nearly the same size, since each counts the same. `forward` runs the model with the draw's
    weights and the buffers that it is given, and updates these in place.
    """
    own = dict(buffers)
    for name in norms:
        prefix = f"{name}." if name else ""
        for buffer, start in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            own[prefix + buffer] = torch.full_like(buffers[prefix + buffer], start)
    with with_attributes(norms.values(), training=True, momentum=None):  # plain means over the batches they see
        for part in parts:
            forward(own, part)
    return own
