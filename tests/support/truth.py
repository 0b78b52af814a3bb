"""Dense truth for tiny networks in float64: the exact Fisher by `torch.func`, and dense views of measured statistics.

Everything is in the order of `torch.nn.utils.parameters_to_vector` over the trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import noisygrad as ng
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.fisher import FisherKind, fisher_passes
from noisygrad.families.base import Statistics
from noisygrad.likelihoods import Likelihood
from noisygrad.posterior.blocks import Family
from noisygrad.posterior.structure import Structure, build_structure
from noisygrad.posterior.weights import parameter_order

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

OPTIMIZERS = {
    "diagonal": ng.NoisyAdam,
    "kronecker": ng.NoisyKFAC,
    "tridiagonal": ng.NoisyBlockTridiagonal,
    "full": ng.NoisyFull,
}
FAMILIES = tuple(OPTIMIZERS)


class Model(nn.Module):
    """Named parts and a function of them: the smallest way to write an odd network."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def random_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights away from their special starting values (norm scales of 1, biases of 0)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def per_example_jacobians(model: nn.Module, x: Tensor) -> list[Tensor]:
    """d output / d parameters of each example on its own, `[outputs, n]`."""
    parameters = trainable(model)

    def output(weights: Mapping[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, dict(weights), (example.unsqueeze(0),)).flatten()

    found = []
    for example in x:
        parts = jacrev(output)(parameters, example)
        found.append(torch.cat([parts[name].flatten(start_dim=1) for name in parameters], dim=1))
    return found


def output_fisher(likelihood: Likelihood, output: Tensor) -> Tensor:
    """The exact Fisher of one example's flat output, written down from the distribution itself."""
    if isinstance(likelihood, ng.Gaussian):
        assert likelihood.fixed_variance is not None
        return torch.eye(len(output), dtype=output.dtype) / likelihood.fixed_variance
    if isinstance(likelihood, ng.Categorical):
        p = torch.softmax(output, -1)
        return torch.diag(p) - torch.outer(p, p)
    if isinstance(likelihood, ng.Bernoulli):
        p = torch.sigmoid(output)
        return torch.diag(p * (1 - p))
    if isinstance(likelihood, ng.Poisson):
        return torch.diag(output.exp())
    assert isinstance(likelihood, ng.HeteroscedasticGaussian)
    log_variance = output[len(output) // 2 :]
    return torch.diag(torch.cat([torch.exp(-log_variance), torch.full_like(log_variance, 0.5)]))


@torch.no_grad()
def exact_fisher(model: nn.Module, likelihood: Likelihood, x: Tensor) -> Tensor:
    """Mean over examples of Jᵀ F_output J."""
    outputs = [model(example.unsqueeze(0)).flatten() for example in x]
    terms = [
        j.mT @ output_fisher(likelihood, output) @ j
        for j, output in zip(per_example_jacobians(model, x), outputs, strict=True)
    ]
    return torch.stack(terms).mean(0)


def per_example_gradients(model: nn.Module, likelihood: Likelihood, x: Tensor, target: Tensor) -> Tensor:
    """Gradients of each example's log-likelihood, `[batch, n]`, one backward pass for each."""
    rows = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for example, y in zip(x, target, strict=True):
        loss = likelihood.log_prob(model(example.unsqueeze(0)), y.unsqueeze(0)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def measure(
    model: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    family: Family,
    kind: FisherKind = "exact",
    target: Tensor | None = None,
    seed: int = 0,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Structure, dict[str, Statistics]]:
    """The statistics of one batch as an optimiser of this family would take them, by block."""
    structure = build_structure(model, family)
    likelihood.bind((), "cpu", torch.float64)
    others = [(unit, structure.parameters[unit.slots[0].parameter]) for unit in structure.units if unit.kind == "other"]
    with Capture(structure.layers) as capture:
        output = model(x)
        counted = None
        if target is not None:
            counted, target = likelihood.counted(output, target, weight, mask)
        passes = list(
            fisher_passes(
                kind,
                likelihood,
                output,
                torch.empty(0) if target is None else target,
                records=capture.take(),
                others=others,
                generators=[torch.Generator().manual_seed(seed)],
                dtype=torch.float64,
                counted=counted,
            )
        )
    found: dict[str, Statistics] = {}
    for block in structure.blocks:
        start = block.family.identity(block.prior(lambda name: 1.0, torch.zeros(0, dtype=torch.float64)))
        measured = [block.family.measure(block.units, one, start) for one in passes]
        total = measured[0].map(torch.zeros_like)
        for m in measured:
            for name, tensor in total.tensors().items():
                tensor.add_(m.tensors()[name] / len(measured))
        found[block.name] = total
    return structure, found


def dense_fisher(structure: Structure, statistics: Mapping[str, Statistics]) -> Tensor:
    """The Fisher that the statistics of diagonal, Kronecker and full blocks stand for."""
    dense = torch.zeros(structure.size, structure.size, dtype=torch.float64)
    for block in structure.blocks:
        tensors = statistics[block.name].tensors()
        if block.family.name == "kronecker":
            shape = (block.num_groups, -1)
            pairs = zip(
                tensors["outputs"].reshape(*shape, *tensors["outputs"].shape[-2:])[:, 0],
                tensors["inputs"].reshape(*shape, *tensors["inputs"].shape[-2:])[:, 0],
                strict=True,
            )
            part = torch.block_diag(*(torch.kron(s.contiguous(), a.contiguous()) for s, a in pairs))
        else:
            part = tensors["fisher"] if block.family.name == "full" else torch.diag(tensors["fisher"])
        # Where each weight of the block, in the order of its family, lies in the flat vector.
        where = block.vector(torch.arange(structure.size)).flatten()
        dense[where[:, None], where] = part
    order = parameter_order(structure)
    return dense[order][:, order]


def measured_fisher(model: nn.Module, likelihood: Likelihood, x: Tensor, family: Family, **more: object) -> Tensor:
    return dense_fisher(*measure(model, likelihood, x, family, **more))  # type: ignore[arg-type]


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
