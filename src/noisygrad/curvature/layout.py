"""Which dimension of a layer's tensors is the batch: measured, once for each module, where sizes do not tell.

A loss of every other example alone must leave the rows of the others without a gradient. What a table of positions is
looked up for, once for all examples, gets one from all of them; a sequence in front that is as long as the batch shows
in the other dimension; rows that only look like several positions of each example show as rows of other examples. So do
rows in another order than the loss's, as of examples that the model sorts by their length.
Normalisation over the batch mixes examples, and is passed over; where it waits for other processes sizes decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from noisygrad.curvature.capture import Record, folds
from noisygrad.curvature.passes import UNFLATTENED, Batch, arrange
from noisygrad.kernels.factorisation import capturing

Order = Literal["batch first", "batch second", "shared"]
ORDERS: tuple[Order, Order] = ("batch first", "batch second")

_KNOWN: WeakKeyDictionary[nn.Module, dict[int, Order]] = WeakKeyDictionary()
"""What was measured of a module, by the number of dimensions of its input."""
_IN_ORDER: WeakSet[nn.Module] = WeakSet()
"""Modules that were not seen to have the examples in another order than the loss."""

ROW_MOVERS = (
    "Cat",
    "Flip",
    "Gather",
    "Index",
    "MaskedS",
    "PackPadded",
    "Roll",
    "Scatter",
    "Select",
    "Slice",
    "Sort",
    "Split",
    "Stack",
    "Unbind",
)
"""How the nodes of operations begin that may put rows elsewhere."""


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
        record for record in records if _known(record.module, record.inputs) is None and record.is_doubtful(batch.size)
    ]
    if doubtful and batch.size > 1 and not capturing():
        with ExitStack() as passed_over:
            for node in _normalisations(output):
                if not node.name().startswith(_OF_ONE_PROCESS):
                    break
                passed_over.callback(node.register_hook(_pass_over).remove)
            else:
                _measure(output, doubtful, replace(batch, kept=batch.size))
    for record in records:
        known = _known(record.module, record.inputs)
        if known == "batch second":
            record.unit = replace(record.unit, sequence_first=True)
        elif known == "batch first" and not record.is_table and folds(record.inputs, batch.size):
            record.unit = replace(record.unit, folded=True)


def check_order(
    output: Tensor, records: Sequence[Record], size: int, reached: Callable[[Tensor], Mapping[str, Tensor]]
) -> None:
    """Raise ValueError where rows of a layer are not those of the examples in the loss's order; once for each module.

    `reached` gives, for a gradient to start from, which examples of each layer it reaches, by name. Whatever order a
    layer sees, the loss's own has to be restored between the two: where no operation there moves rows, all is well.
    """
    new = [record for record in records if record.module not in _IN_ORDER]
    if not new or size < 2 or capturing() or any(record.unit.replicas for record in records):
        return
    if moves_rows(output) and not mixes_examples(output):
        examples = torch.arange(size, device=output.device)
        for bit in range((size - 1).bit_length()):
            second = (examples >> bit) % 2 == 1
            found = [reached(_start_of(output, mine)) for mine in (~second, second)]
            for name in found[0].keys() & found[1].keys():
                # A row that both halves reach belongs to several examples, and says nothing of an order.
                first, other = (part[name] for part in found)
                if bool(((first & ~other & second) | (other & ~first & ~second)).any()):
                    raise ValueError(
                        f"layer {name!r} saw the examples in another order than the loss has them, as where a model "
                        "sorts them by length and its outputs back. Weights, masks, stats_batch and covariances of "
                        "layers with each other would be those of other examples: give the model batches that are in "
                        "this order from the start, and their targets too"
                    )
    _IN_ORDER.update(record.module for record in new)


def moves_rows(output: Tensor) -> bool:
    """Whether the graph holds an operation that may put examples in another order."""

    def moves(node: Node) -> bool:
        dims = getattr(node, "_saved_dims", None) or (getattr(node, "_saved_dim", 0),)
        return node.name().startswith(ROW_MOVERS) and 0 in dims

    return any(map(moves, _graph(output)))


def _measure(output: Tensor, doubtful: Sequence[Record], batch: Batch) -> None:
    """Losses of every other example, then of every other pair, and so on, until all is settled.

    Activations that are zero may hide what is to be seen. But an order that holds for all of these halves of the batch
    holds for each example.
    """
    possible = {index: _candidates(record, batch) for index, record in enumerate(doubtful)}
    examples, seen = torch.arange(batch.size, device=output.device), set[int]()
    for bit in range((batch.size - 1).bit_length()):
        for side in (0, 1):
            mine = (examples >> bit) % 2 == side
            for index, gradient in _gradients(output, {index: doubtful[index] for index in possible}, mine):
                left = {order for order in possible[index] if _fits(doubtful[index], gradient, batch, order, ~mine)}
                _check(doubtful[index], left, gradient, batch)
                possible[index] = left
                seen |= {index} if bool(gradient.any()) else set()
        for index, left in list(possible.items()):
            if len(left) < 2 and index in seen:
                _remember(doubtful[index], left)
                del possible[index]


def _candidates(record: Record, batch: Batch) -> set[Order]:
    if not record.is_table:
        second = record.may_be_second(batch.size) and not record.may_be_positions(batch.size)
        return {"batch first", "batch second"} if second else {"batch first"}
    first, second = (*record.inputs.shape, 0, 0)[:2]
    found: set[Order] = {"batch second"} if second == batch.size else set()
    if first == batch.size or (first % batch.size == 0 and second != batch.size):
        found.add("batch first")
    return found


def _gradients(output: Tensor, records: Mapping[int, Record], mine: Tensor) -> list[tuple[int, Tensor]]:
    """Of a loss of some of the examples, to the outputs of those layers that it depends on."""
    if not records:
        return []
    places = [record.edge for record in records.values()]
    start = _start_of(output, mine)
    gradients = torch.autograd.grad(output, places, start, retain_graph=True, allow_unused=True)
    found = zip(records, gradients, strict=True)
    return [(index, g) for index, g in found if g is not None and bool(g.isfinite().all())]


def _start_of(output: Tensor, mine: Tensor) -> Tensor:
    # Not constant, since a softmax takes no notice of a constant.
    start = torch.arange(1.0, output.numel() + 1, device=output.device).cos_().view_as(output).to(output.dtype)
    return start * mine.view(-1, *[1] * (output.dim() - 1))


def _fits(record: Record, gradient: Tensor, batch: Batch, order: Order, others: Tensor) -> bool:
    """Whether in this order the other examples have no gradient."""
    if record.is_table or order == "batch second" or not folds(gradient, batch.size):
        arranged = arrange(gradient, batch, replace(record.unit, sequence_first=order == "batch second"))
    else:
        arranged = gradient.reshape(batch.size, -1)
    return not bool(arranged[others].any())


def _check(record: Record, left: set[Order], gradient: Tensor, batch: Batch) -> None:
    if not left and record.may_be_positions(batch.size):
        raise ValueError(
            f"layer {record.unit.name!r} saw one example with {batch.size} positions that depend on each other, while "
            f"the loss has a batch of {batch.size}. {UNFLATTENED}"
        )
    if not left and not record.is_table and folds(gradient, batch.size):
        raise ValueError(
            f"layer {record.unit.name!r} saw {gradient.shape[0]} rows, which are not several of each of the "
            f"{batch.size} examples of the loss, next to each other. Of a part of an output no statistics can "
            "be taken: give draw.nll the whole output (mask= says what does not count), or call the model on "
            "that part alone. After torch.cat([first, second]) call the layer twice, or use torch.stack(…, 1)"
        )


def _known(module: nn.Module, inputs: Tensor) -> Order | None:
    return _KNOWN.get(module, {}).get(inputs.dim())


def _remember(record: Record, left: set[Order]) -> None:
    """What was found, if one order is left, or none of a table; else nothing is known."""
    if len(left) == 1 or record.is_table:
        order: Order = next(iter(left), "shared")
        _KNOWN.setdefault(record.module, {})[record.inputs.dim()] = order


def mixes_examples(output: Tensor) -> bool:
    """Whether the graph holds a normalisation by the statistics of its own batch."""
    return bool(_normalisations(output))


_OF_ONE_PROCESS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
"""Others wait for other processes."""


def _normalisations(output: Tensor) -> list[Node]:
    """Where the graph normalises by the statistics of its own batch."""
    return [n for n in _graph(output) if "BatchNorm" in n.name() and getattr(n, "_saved_training", True)]


def _pass_over(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradient as if the normalisation were none: it mixes examples, but leaves them in their places."""
    first, gradient = inputs[0], outputs[0]
    return inputs if first is None or gradient is None else (gradient.to(first.dtype), *inputs[1:])


def _graph(output: Tensor) -> Iterator[Node]:
    stack, seen = [output.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [following for following, _ in node.next_functions]
