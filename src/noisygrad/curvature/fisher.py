"""The Fisher of a network under a likelihood, as passes through its layers: sampled, exact or empirical.

Each estimate is one or more backward passes of a *summed* log-likelihood to the outputs of the layers, by
`torch.autograd.grad`, separate from the user's own backward pass, so nothing that scales the user's loss affects the
statistics. A pass starts from the log-likelihood's own derivative (`Likelihood.score`).

- sampled: targets drawn from the model's own prediction; one pass, unbiased (the paper's footnote 2);
- exact: the square root of the output Fisher, column by column; K passes for K outputs;
- empirical: the targets of the data.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from noisygrad.curvature.capture import Record
from noisygrad.curvature.layout import check_order, measure_layouts, perhaps_shared
from noisygrad.curvature.passes import Batch, MatrixPass, Pass, PositionsPass, SummedPass
from noisygrad.curvature.summaries import PassSummary, Summarise, gradient_hooks, hookable
from noisygrad.families.units import Unit
from noisygrad.kernels.products import without_autocast
from noisygrad.likelihoods import Counted, Likelihood

FisherKind = Literal["sampled", "exact", "empirical"]
Parameters = Sequence[tuple[Unit, Tensor]]
"""The units without a layer, each with its parameter."""


def fisher_passes(
    kind: FisherKind,
    likelihood: Likelihood,
    output: Tensor,
    target: Tensor,
    *,
    records: Sequence[Record],
    others: Parameters,
    generators: Sequence[torch.Generator],
    dtype: torch.dtype,
    keep: int | None = None,
    summarise: Summarise | None = None,
    counted: Counted | None = None,
    paired: bool = False,
) -> Iterator[dict[str, Pass]]:
    """The passes whose mean is the Fisher: for each, every unit that took part, by name.

    `output` keeps its graph. Of `others` only a summed gradient is known; each example's share gets a random sign
    (`SummedPass` says why), which changes nothing for the layers. Only the first `keep` examples are used. With
    `summarise`, only what it returns is kept of a pass. `counted` says what counts of the targets; None if all does.
    `paired` says that the rows of a layer are put together with another's, or with the weights of `counted`. ValueError
    where their order matters, and is not the loss's.
    """
    lead = len(likelihood.replicas)
    kept = output.shape[lead] if keep is None else keep
    counted = None if counted is None else counted.first(kept)
    batch = Batch(output.shape[lead], kept, dtype, counted)
    if any(record.is_doubtful(batch.size) for record in records):
        measure_layouts(output, records, batch)
    hooked = [False] * len(records) if summarise is None else hookable(records)
    if paired or batch.kept < batch.size:
        whole = replace(batch, kept=batch.size, counted=None)
        check_order(output, records, batch.size, partial(_reached, output, records, hooked, whole, _examples_of))
    if batch.kept < batch.size:
        output, target = output.narrow(lead, 0, batch.kept), target.narrow(lead, 0, batch.kept)
    summed = bool(others) or any(record.is_table and perhaps_shared(record.module, record.inputs) for record in records)
    signs = random_signs(output, lead, generators, counted) if summed else None
    if kind == "exact":
        columns = likelihood.output_fisher_factor(output.detach())
        starts: Iterable[Tensor] = (column * len(columns) ** 0.5 for column in columns)
    elif kind == "sampled":
        starts = [_sampled_score(likelihood, output.detach(), generators, counted)]
    else:
        starts = [likelihood.score(output, target)]
    root = None if counted is None else likelihood.weights_of_outputs(counted.relative().sqrt(), output)
    if kind == "exact" and root is not None and counted is not None and counted.has_parts:
        reached = _reached(output, records, hooked, batch, _positions_of, _mixture(columns) * root)
        batch = replace(batch, reached=reached)
    for start in starts:
        if root is not None:
            start = start * root  # noqa: PLW2901
        signed = start if signs is None else start * signs.reshape(*signs.shape, *[1] * (start.dim() - signs.dim()))
        yield _differentiate(output, signed, records, hooked, others, batch, summarise)


def _reached(
    output: Tensor,
    records: Sequence[Record],
    hooked: Sequence[bool],
    batch: Batch,
    places: Callable[[Pass], Tensor | None],
    start: Tensor,
) -> dict[str, Tensor]:
    """Which places in each layer are reached by the gradient that has this start."""
    found: dict[str, Tensor] = {}

    def note(unit: Unit, one: Pass) -> Pass:
        if (seen := places(one)) is not None:
            found[unit.name] = seen
        return PassSummary(one.examples, {})

    _differentiate(output, start, records, hooked, (), batch, note)
    return found


def _positions_of(one: Pass) -> Tensor | None:
    return one.reached_positions() if isinstance(one, MatrixPass) else None


def _examples_of(one: Pass) -> Tensor | None:
    if not isinstance(one, PositionsPass):
        return None
    rows = (one.gradients != 0).any(-1).any(-1)
    return rows.reshape(-1, rows.shape[-1]).any(0)  # of any group


def _mixture(columns: Tensor) -> Tensor:
    """A sum of all columns, which reaches what any of them does: one alone may be that of a single position's output.

    In different proportions, none of which is 0: gradients are linear in what they start from, and do not cancel.
    """
    proportions = torch.arange(1.0, len(columns) + 1, device=columns.device).cos_().to(columns.dtype)
    mixture: Tensor = torch.tensordot(proportions, columns, 1)
    return mixture


def _sampled_score(
    likelihood: Likelihood, output: Tensor, generators: Sequence[torch.Generator], counted: Counted | None
) -> Tensor:
    """`Likelihood.sampled_score`; a replica of fewer examples than others draws as many numbers as it would alone."""
    if counted is None or counted.extents is None:
        return likelihood.sampled_score(output, generators)
    lead, parts = len(likelihood.replicas), []
    for size in sorted(set(counted.extents)):
        own = [extent == size for extent in counted.extents]
        # Those whose turn it is not draw from a copy.
        some = [one if mine else one.clone_state() for one, mine in zip(generators, own, strict=True)]
        score = likelihood.sampled_score(output.narrow(lead, 0, size), some)
        mine = torch.tensor(own, device=output.device).view(output.shape[:lead])
        whole = score.new_zeros(output.shape)
        whole.narrow(lead, 0, size).copy_(score)
        parts.append(whole * mine.reshape(*mine.shape, *[1] * (output.dim() - lead)))
    return torch.stack(parts).sum(0)


def random_signs(
    output: Tensor, lead: int, generators: Sequence[torch.Generator], counted: Counted | None = None
) -> Tensor:
    """±1 for each example, `[*replicas, batch]`, every replica from its own generator."""
    signs = torch.zeros(len(generators), output.shape[lead], device=output.device)
    extents = None if counted is None else counted.extents
    for index, (row, generator) in enumerate(zip(signs, generators, strict=True)):
        row[: None if extents is None else extents[index]].bernoulli_(0.5, generator=generator)
    return signs.mul_(2.0).sub_(1.0).view(output.shape[: lead + 1])


@torch.no_grad()
def passes_after_backward(
    records: Sequence[Record], others: Parameters, size: int, dtype: torch.dtype
) -> dict[str, Pass]:
    """The passes of a *mean* loss that the user has already differentiated: the empirical Fisher.

    For parameters without a layer only the summed gradient is known, without signs, so their Fisher is too large.
    """
    seen = [record for record in records if record.kept]
    batch = Batch(size, size, dtype)
    gradients = [torch.stack(record.kept).sum(dim=0) * size for record in seen]
    passes = _layer_passes(seen, gradients, batch)
    for unit, parameter in others:
        if parameter.grad is not None:
            passes[unit.name] = _summed(unit, parameter.grad * size, batch)
    return passes


def _differentiate(
    output: Tensor,
    start: Tensor,
    records: Sequence[Record],
    hooked: Sequence[bool],
    others: Parameters,
    batch: Batch,
    summarise: Summarise | None,
) -> dict[str, Pass]:
    """The passes through all layers of one backward pass from the output, given its gradient.

    The gradients of `hooked` calls arrive in hooks during the backward pass; it returns those of the others.
    """
    in_hooks = list(compress(records, hooked))
    asked = [record for record, is_hooked in zip(records, hooked, strict=True) if not is_hooked]
    places = [*(record.edge for record in asked), *(get_gradient_edge(parameter) for _, parameter in others)]
    if not places:
        return {}
    units = {record.unit.name: record.unit for record in records}  # in the order of the forward pass
    found: dict[str, Pass] = {}
    device = output.device.type

    def keep(name: str, one: Pass, inputs: Sequence[Tensor]) -> None:
        found[name] = kept = one if summarise is None else summarise(units[name], one)
        if isinstance(kept, PassSummary):
            kept.release_inputs(inputs)  # except those of the graph, which still exists

    def take(record: Record, gradient: Tensor) -> None:
        # Autograd records nothing during a backward pass, so no_grad is not needed.
        with without_autocast(device):
            one = _layer_pass(record, gradient, batch)
            one.counted, one.reached = batch.counted, batch.reached.get(record.unit.name)
            keep(record.unit.name, one, (record.inputs,))

    with gradient_hooks(in_hooks, take) if in_hooks else nullcontext():
        gradients = torch.autograd.grad(output, places, start.to(output.dtype), retain_graph=True, allow_unused=True)
    used = [(record, g) for record, g in zip(asked, gradients, strict=False) if g is not None]
    inputs = [record.inputs for record, _ in used]
    with torch.no_grad(), without_autocast(device):
        for name, one in _layer_passes([r for r, _ in used], [g for _, g in used], batch).items():
            keep(name, one, inputs)
    passes = {name: found[name] for name in units if name in found}
    for (unit, _), gradient in zip(others, gradients[len(asked) :], strict=True):
        if gradient is not None:
            passes[unit.name] = _summed(unit, gradient, batch)
    return passes


def _summed(unit: Unit, gradient: Tensor, batch: Batch) -> SummedPass:
    return SummedPass(gradient.detach().to(batch.dtype).flatten(start_dim=len(unit.replicas)), batch.kept)


def _layer_passes(records: Sequence[Record], gradients: Sequence[Tensor], batch: Batch) -> dict[str, Pass]:
    calls: dict[str, list[Pass]] = {}
    for record, gradient in zip(records, gradients, strict=True):
        calls.setdefault(record.unit.name, []).append(_layer_pass(record, gradient, batch))
    passes = {name: some[0] if len(some) == 1 else some[0].joined(some) for name, some in calls.items()}
    for name, one in passes.items():
        one.counted, one.reached = batch.counted, batch.reached.get(name)
    return passes


def _layer_pass(record: Record, gradient: Tensor, batch: Batch) -> Pass:
    """The pass of one call of a layer, given the gradient of its output."""
    unit, module = record.unit, record.module
    record.used = True
    one: Pass = record.layer.observe(unit, module, record.checked_inputs(), gradient, batch)
    if batch.counted is not None and isinstance(one, PositionsPass):
        batch.counted.check_layer(unit.name, one.gradients.shape[-2])
    return one
