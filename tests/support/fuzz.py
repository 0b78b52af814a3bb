"""Random networks against dense truth: layers × dtypes × frozen parts × weight sharing × what counts.

By hand, for as many as one likes (a line for each that fails, with the seed that makes it again):

    PYTHONPATH=src:tests python -m support.fuzz 1000
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import noisygrad as ng
from support.plain_attention import with_plain_attention
from support.random_networks import Builder, Case
from support.truth import dense_fisher, measure, output_fisher, per_example_jacobians

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4}
"""Relative to the largest entry of the truth."""


def counted_parts(case: Case) -> tuple[Tensor, Tensor]:
    """The weight of each example, and of each part of its target, `[batch, *target]`."""
    counts = torch.ones(case.target.shape, dtype=torch.float64)
    if case.mask is not None:
        mask = case.mask if case.mask.dim() <= counts.dim() else case.mask.squeeze(1)
        counts = counts * mask.reshape(*mask.shape, *[1] * (counts.dim() - mask.dim()))
    if isinstance(case.likelihood, ng.Categorical):
        counts = counts * (case.target != -7)
    weights = torch.ones(len(case.x)).double() if case.weight is None else case.weight.double()
    return weights * (counts.flatten(1).any(1) if counts.dim() > 1 else counts > 0), counts


def truth(case: Case) -> Tensor:
    """Σ_b w_b Σ_t v_bt Jᵀ F_output J / Σ_b w_b over the examples that count, each example alone, in float64."""
    model, likelihood = copy.deepcopy(case.model).double(), case.likelihood
    x = case.x.double() if case.x.is_floating_point() else case.x
    weights, counts = counted_parts(case)
    total: Tensor | float = 0.0
    for example, mine, w in zip(x, counts, weights, strict=True):
        (jacobian,) = per_example_jacobians(model, example.unsqueeze(0))
        output = model(example.unsqueeze(0)).detach()[0]
        rows = output.reshape(-1, output.shape[-1])
        if isinstance(likelihood, ng.Categorical):
            v = mine.reshape(-1, 1).expand(-1, rows.shape[-1])
        else:
            v = mine.reshape(len(rows), -1)
            v = torch.cat([v, v], -1) if v.shape[-1] < rows.shape[-1] else v
        fishers = [output_fisher(likelihood, row) * scale for row, scale in zip(rows, v, strict=True)]
        total = total + w * jacobian.mT @ torch.block_diag(*fishers) @ jacobian
    assert isinstance(total, Tensor)
    return total / weights.sum()


def moments(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """A and S of the linear layers, those inside attention too, from hooks and autograd, each example alone."""
    model, likelihood = with_plain_attention(case.model).double(), case.likelihood
    x = case.x.double() if case.x.is_floating_point() else case.x
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and all(p.requires_grad for p in module.parameters())
    }
    weights, parts = counted_parts(case)
    sums: dict[str, list[Tensor]] = {name: [torch.zeros(()), torch.zeros(()), torch.zeros(())] for name in layers}
    for example, mine, w in zip(x, parts, weights, strict=True):
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
        hooks = [module.register_forward_hook(_keeper(calls[name])) for name, module in layers.items()]
        output = model(example.unsqueeze(0))
        for hook in hooks:
            hook.remove()
        columns = likelihood.output_fisher_factor(output.detach())
        columns = columns * likelihood.weights_of_outputs(mine.unsqueeze(0).sqrt(), output)
        for name, seen in calls.items():
            places = [place for _, place in seen]
            found = [torch.autograd.grad(output, places, column, retain_graph=True) for column in columns]
            rows = torch.cat([inputs.reshape(-1, inputs.shape[-1]) for inputs, _ in seen])
            if layers[name].bias is not None:
                rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
            each = torch.stack([torch.cat([g.reshape(-1, g.shape[-1]) for g in gradients]) for gradients in found])
            flat = each.flatten(0, 1)
            rows = rows[positions_that_count(case, mine, output, each)]
            for total, new in zip(sums[name], (rows.mT @ rows, torch.tensor(len(rows)), flat.mT @ flat), strict=True):
                total.data = total + w * new
    return {name: (a / count, s / weights.sum()) for name, (a, count, s) in sums.items() if count > 0}


def positions_that_count(case: Case, parts: Tensor, output: Tensor, gradients: Tensor) -> Tensor:
    """Which of a layer's positions take part, `[positions]`, given its gradients of all columns."""
    reached = (gradients != 0).any(-1).any(0)
    if len(reached) == 1 or not says_of_positions(case):
        return torch.ones_like(reached)
    if output.dim() == 2:  # the outputs have no positions
        return reached
    asked = parts.reshape(output.shape[1:-1].numel(), -1).any(1)
    return reached | asked if len(asked) == len(reached) else reached


def says_of_positions(case: Case) -> bool:
    """Whether what counts is said of parts of examples, so that padding may lie in all layers."""
    ignored = isinstance(case.likelihood, ng.Categorical) and case.likelihood.ignore_index is not None
    return (case.mask is not None and case.mask.dim() > 1) or (ignored and case.target.dim() > 1)


UNSURE = ("query", "key")
"""Inside attention: where all that a position looks at is alike, these have a gradient of 0 but for rounding, by which
positions that nothing is asked of then take part or not. The networks of `test_counted` are not of that kind."""


def _keeper(seen: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    return lambda _, inputs, output: seen.append((inputs[0].detach(), output))


def errors(seed: int) -> Iterator[tuple[Case, str, float]]:
    """For each family, the largest error relative to the truth's largest entry and to what rounding may be."""
    case = Builder(seed).case()
    given = {"target": case.target, "weight": case.weight, "mask": case.mask}
    rounding = TOLERANCES[next(case.model.parameters()).dtype]

    def compared(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0) / rounding

    if case.exact:  # what is shared between layers has random signs: only its mean is the truth
        dense = truth(case)
        full = dense_fisher(*measure(case.model, case.likelihood, case.x, "full", **given))  # type: ignore[arg-type]
        yield case, "full", compared(full, dense)
        found = dense_fisher(*measure(case.model, case.likelihood, case.x, "diagonal", **given))  # type: ignore[arg-type]
        yield case, "diagonal", compared(found.diagonal(), dense.diagonal())
    structure, statistics = measure(case.model, case.likelihood, case.x, "kronecker", **given)  # type: ignore[arg-type]
    expected = moments(case)
    largest = max((float(outputs.abs().max()) for _, outputs in expected.values()), default=0.0)
    for block in structure.blocks:
        tensors = statistics[block.name].tensors()
        if block.name not in expected or "inputs" not in tensors:
            continue
        outputs = expected[block.name][1]
        if float(outputs.abs().max()) > 1e-8 * largest:  # what cancels is rounding alone
            yield case, "outputs", compared(tensors["outputs"], outputs)
        if not (block.name.endswith(UNSURE) and says_of_positions(case)):
            yield case, "inputs", compared(tensors["inputs"], expected[block.name][0])


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    worst: dict[str, float] = {}
    failed, compared, start = 0, 0, time.perf_counter()
    for seed in range(first, first + count):
        for case, family, error in errors(seed):
            compared += 1
            worst[family] = max(worst.get(family, 0.0), error)
            if not error <= 1.0:
                failed += 1
                print(f"{family}: {error:.3g} times what rounding may be. {case}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{count} networks, {compared} comparisons, {failed} above rounding, worst {worst} of it, {seconds:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
