"""How the outputs of a network depend on each layer's weights, for many examples and several draws of the weights."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from noisygrad.curvature.capture import Capture
from noisygrad.families.units import Unit
from noisygrad.posterior.posterior import Posterior


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Of one Linear layer, for B examples and K draws of the weights.

    Its gradient of an example's log-likelihood is `gradients` ⊗ `inputs`, and the example's Fisher is the sum over C
    columns of the squares of `roots` ⊗ `inputs`; both are to be averaged over draws.
    """

    inputs: Tensor
    """`[B, K, in]`, with the constant 1 of the bias."""
    gradients: Tensor
    """`[B, K, out]`: of the log-likelihood, with respect to the layer's output."""
    roots: Tensor
    """`[B, K, C, out]`: the same of the columns of a square root of the output's Fisher.

    Where they are the same for all examples and draws, as of the last layer, B and K may be 1.
    """


def sensitivities(
    posterior: Posterior, inputs: Tensor, targets: Tensor, weights: Sequence[Mapping[str, Tensor]]
) -> dict[str, Sensitivity]:
    """The sensitivity of every layer, by its name in the structure, at each of the given settings of the weights.

    Raises ValueError where the network is not made of Linear layers on rows alone.
    """
    _check(posterior, inputs)
    found = [_at(posterior, inputs, targets, setting) for setting in weights]
    names = [unit.name for unit in posterior.structure.units]
    return {
        name: Sensitivity(*(torch.stack(parts, 1) for parts in zip(*(f[name] for f in found), strict=True)))
        for name in names
    }


def _at(
    posterior: Posterior, inputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    likelihood = posterior.likelihood
    with torch.enable_grad(), Capture(posterior.structure.layers) as capture:
        setting = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        output = functional_call(posterior.model, setting, (inputs,))
        likelihood.check(output, targets)
        records = {record.unit.name: record for record in capture.take()}
        edges = [record.edge for record in records.values()]
        log_likelihood = likelihood.log_prob(output, targets).sum()
        gradients = torch.autograd.grad(log_likelihood, edges, retain_graph=True)
        columns = likelihood.output_fisher_factor(output.detach()).to(output.dtype)
        roots = [torch.autograd.grad(output, edges, column, retain_graph=True) for column in columns]
    return {
        name: (_with_constant(record.checked_inputs(), record.unit), gradient, torch.stack(root, 1))
        for (name, record), gradient, *root in zip(records.items(), gradients, *roots, strict=True)
    }


def _with_constant(inputs: Tensor, unit: Unit) -> Tensor:
    rows = inputs[:, : unit.inputs - unit.constant]
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if unit.constant else rows


def _check(posterior: Posterior, inputs: Tensor) -> None:
    if inputs.dim() != 2:
        raise ValueError(f"the inputs must be rows, [examples, features]; got a tensor of shape {tuple(inputs.shape)}")
    if posterior.structure.replicas:
        raise ValueError("replicated networks are not supported here: take one replica")
    units = posterior.structure.units
    if wrong := [f"{unit.name} ({unit.layer})" for unit in units if unit.kind != "matrix" or not unit.chainable]:
        raise ValueError(f"only networks of Linear layers are supported here; this one has {', '.join(wrong)}")
