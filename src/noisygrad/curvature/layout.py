"""Which dimension of a layer's tensors is the batch: measured, once for each module, where sizes do not tell.

A loss of every other example alone must leave the rows of the others without a gradient. What a table of positions is
looked up for, once for all examples, gets one from all of them; a sequence in front that is as long as the batch shows
in the other dimension; rows that only look like several positions of each example show as rows of other examples.
Where normalisation over the batch mixes examples nothing can be measured, and sizes decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from noisygrad.curvature.capture import Record
from noisygrad.curvature.passes import Batch, arrange
from noisygrad.kernels.factorisation import capturing

Order = Literal["batch first", "batch second", "shared"]

_KNOWN: WeakKeyDictionary[nn.Module, dict[int, Order]] = WeakKeyDictionary()
"""What was measured of a module, by the number of dimensions of its input."""
_FEATURES_LAST = (nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm)


def is_shared(module: nn.Module, inputs: Tensor, batch: Batch) -> bool:
    """Whether a table was looked up once for all examples; a row of indices is taken for such where it is not known."""
    known = _known(module, inputs)
    if known is not None:
        return known == "shared"
    return perhaps_shared(module, inputs) and batch.size not in (inputs.shape[0], inputs.shape[-1])


def perhaps_shared(module: nn.Module, inputs: Tensor) -> bool:
    """Whether a table may have been looked up once for all examples, as far as is known."""
    if not isinstance(module, nn.Embedding):
        return False
    known = _known(module, inputs)
    return known == "shared" if known else inputs.dim() == 1 or (inputs.dim() == 2 and inputs.shape[0] == 1)


def measure_layouts(output: Tensor, records: Sequence[Record], batch: Batch) -> None:
    """Find out what is doubtful, and mark the records that have the batch in their second dimension.

    Raises ValueError where the rows of a layer are not those of the loss's examples, as of a part of an output.
    """
    if any(record.unit.replicas for record in records):
        return
    doubtful = [
        record
        for record in records
        if _known(record.module, record.inputs) is None and (_is_table(record) or _is_ambiguous(record, batch))
    ]
    if doubtful and batch.size > 1 and not capturing() and not mixes_examples(output):
        for parity in (0, 1):
            doubtful = _measure(output, doubtful, batch, parity)
            if not doubtful:
                break
    for record in records:
        if _known(record.module, record.inputs) == "batch second":
            record.unit = replace(record.unit, sequence_first=True)


def _measure(output: Tensor, doubtful: Sequence[Record], batch: Batch, parity: int) -> list[Record]:
    """What a loss of the examples with one parity tells; returns the records of which more is to be seen."""
    start = torch.zeros_like(output)
    mine = start[parity::2]
    # Not constant, since a softmax takes no notice of a constant.
    mine.copy_(torch.arange(1.0, mine.numel() + 1, device=output.device).cos_().view_as(mine))
    places = [record.edge for record in doubtful]
    gradients = torch.autograd.grad(output, places, start, retain_graph=True, allow_unused=True)
    unsettled = []
    for record, gradient in zip(doubtful, gradients, strict=True):
        if gradient is None or not bool(gradient.any()):
            continue
        if _is_table(record):
            _remember(record, _order_of_table(record, gradient, batch, parity))
        elif _folds(gradient, batch):
            if not _leaves_others(gradient.reshape(batch.size, -1), parity):
                raise ValueError(
                    f"layer {record.unit.name!r} saw {gradient.shape[0]} rows, which are not several of each of the "
                    f"{batch.size} examples of the loss. Of a part of an output no statistics can be taken: give "
                    "draw.nll the whole output (mask= says what does not count), or call the model on that part alone"
                )
            if parity == 0:
                unsettled.append(record)
            else:
                _remember(record, "batch first")
        elif _leaves_others(gradient, parity):
            _remember(record, "batch first")
        elif _leaves_others(gradient.transpose(0, 1), parity):
            _remember(record, "batch second")
    return unsettled


def _order_of_table(record: Record, gradient: Tensor, batch: Batch, parity: int) -> Order:
    for order in ("batch first", "batch second"):
        unit = replace(record.unit, sequence_first=order == "batch second")
        try:
            arranged = arrange(gradient, batch, unit)
        except ValueError:
            continue
        if _leaves_others(arranged, parity):
            return order
    return "shared"


def _leaves_others(rows: Tensor, parity: int) -> bool:
    return not bool(rows[1 - parity :: 2].any())


def _is_table(record: Record) -> bool:
    return isinstance(record.module, nn.Embedding)


def _is_ambiguous(record: Record, batch: Batch) -> bool:
    sizes = record.inputs.shape
    square = len(sizes) > 2 and sizes[0] == sizes[1] == batch.size and isinstance(record.module, _FEATURES_LAST)
    return square or _folds(record.inputs, batch)


def _folds(tensor: Tensor, batch: Batch) -> bool:
    """Whether the first dimension may be the batch and positions in one."""
    first, second = (*tensor.shape, 0, 0)[:2]
    return first > batch.size and first % batch.size == 0 and not (tensor.dim() > 2 and second == batch.size)


def _known(module: nn.Module, inputs: Tensor) -> Order | None:
    return _KNOWN.get(module, {}).get(inputs.dim())


def _remember(record: Record, order: Order) -> None:
    _KNOWN.setdefault(record.module, {})[record.inputs.dim()] = order


def mixes_examples(output: Tensor) -> bool:
    """Whether the graph holds a normalisation by the statistics of its own batch."""
    stack, seen = [output.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "BatchNorm" in node.name() and getattr(node, "_saved_training", True):
            return True
        stack += [following for following, _ in node.next_functions]
    return False
