"""Information gain: how far one natural-gradient step on one example moves the posterior, KL(q' ‖ q) in nats.

Take q itself as the prior and one example with log-likelihood gradient g and Fisher F. Natural-gradient steps of size α
move the mean by αΣg and the precision by αF, and to second order in α

    KL(q' ‖ q) = ½ α² gᵀΣg + ¼ α² tr(FΣFΣ).

The layers are independent under q, so each has a sum of its own. For a layer with Σ = Σ₂ ⊗ Σ₁ (outputs ⊗ inputs) and a
Fisher of rank-one pieces both terms need only inner products of inputs under Σ₁ and of output gradients under Σ₂, for
which no matrix of the size of Σ is made. g and F are means over draws of the weights.

The paper (supplement, its equation for the intrinsic reward) moves Σ₁ and Σ₂ by themselves and leaves out how their
steps interact: `covariance="blockwise"`, here with the gradients ∇Σ₁ = −½ tr(SΣ₂) A and ∇Σ₂ = −½ tr(AΣ₁) S.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from noisygrad.exploration.sensitivity import Sensitivity, sensitivities
from noisygrad.families.base import FactoredCovariance, Precision
from noisygrad.families.units import by_unit
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.posterior import Posterior

CovarianceTerm = Literal["exact", "blockwise"]
_CHUNK = 1024
"""Examples at a time: a few megabytes of inner products."""


def kronecker_gain(layer: Sensitivity, outputs: Tensor, inputs: Tensor, covariance: CovarianceTerm = "exact") -> Tensor:
    """½ gᵀΣg + ¼ tr(FΣFΣ) of a layer with Σ = `outputs` `outputs`ᵀ ⊗ `inputs` `inputs`ᵀ: KL / α², `[B]`."""
    a, g, r = layer.inputs @ inputs, layer.gradients @ outputs, layer.roots @ outputs
    p = a @ a.mT  # [B, K, K]: aₖᵀ Σ₁ aₗ
    mean = (p * (g @ g.mT)).mean((-2, -1))
    s = _pairs(r)  # [B, K, K]: tr(Sₖ Σ₂ Sₗ Σ₂)
    if covariance == "exact":
        return _second_order(mean, (p.square() * s).mean((-2, -1)))
    trace_s = r.square().sum((-2, -1))  # [B, K]: tr(Sₖ Σ₂)
    trace_a = a.square().sum(-1)  # [B, K]: tr(Aₖ Σ₁)
    of_inputs = (_outer(trace_s) * p.square()).mean((-2, -1)) / outputs.shape[0]
    of_outputs = (_outer(trace_a) * s).mean((-2, -1)) / inputs.shape[0]
    return _second_order(mean, of_inputs + of_outputs)


def _second_order(mean: Tensor, covariance: Tensor) -> Tensor:
    return torch.add(mean / 2, covariance, alpha=0.25)


def _pairs(roots: Tensor) -> Tensor:
    """Of `[B, K, C, n]`: the sum over columns of squared inner products, for each pair of draws, `[B, K, K]`."""
    draws, columns = roots.shape[1:3]
    rows = roots.flatten(1, 2)
    squares: Tensor = (rows @ rows.mT).square()
    # One dimension after the other: a sum over both at once reads memory in strides and takes three times as long.
    by_draw: Tensor = squares.unflatten(-1, (draws, columns)).sum(-1)
    both: Tensor = by_draw.unflatten(1, (draws, columns)).sum(2)
    return both


def _outer(values: Tensor) -> Tensor:
    """v vᵀ of the last dimension."""
    return values[..., :, None] * values[..., None, :]


def diagonal_gain(layer: Sensitivity, variances: Tensor) -> Tensor:
    """½ Σⱼ vⱼ gⱼ² + ¼ Σⱼ (vⱼ Fⱼⱼ)² of a layer with independent weights, variances `[out, in]`: KL / α², `[B]`."""
    draws = layer.inputs.shape[1]
    g = torch.einsum("bko,bki->boi", layer.gradients, layer.inputs) / draws
    f = torch.einsum("bko,bki->boi", layer.roots.square().sum(2), layer.inputs.square()) / draws
    return _second_order((variances * g.square()).sum((-2, -1)), (variances * f).square().sum((-2, -1)))


def spectral_gain(layer: Sensitivity, outputs: Tensor, inputs: Tensor, spectrum: Tensor) -> Tensor:
    """As `kronecker_gain`, for Σ = (U ⊗ V) diag(1/R) (U ⊗ V)ᵀ: what exact damping gives, which is no product."""
    a, g, r = layer.inputs @ inputs, layer.gradients @ outputs, layer.roots @ outputs
    scale, draws = spectrum.rsqrt(), a.shape[1]
    mean = (torch.einsum("bko,bki->boi", g, a) / draws * scale).square().sum((-2, -1))
    r = r.expand(*a.shape[:2], -1, -1)
    # A few examples at a time, so that their rows of weights stay in the processor's cache.
    parts = zip(a.split(_CHUNK // 16), r.split(_CHUNK // 16), strict=True)
    squares = [_squared_products(*part, scale) for part in parts]
    return _second_order(mean, torch.cat(squares) / draws**2)


def _squared_products(inputs: Tensor, roots: Tensor, scale: Tensor) -> Tensor:
    rows = (roots[..., :, None] * inputs[:, :, None, None, :] * scale).flatten(-2).flatten(1, 2)
    return (rows @ rows.mT).square().sum((-2, -1))


def layer_gain(layer: Sensitivity, covariance: FactoredCovariance | Tensor, term: CovarianceTerm) -> Tensor:
    """½ gᵀΣg + ¼ tr(FΣFΣ) of a layer, given Σ by its factors or as variances `[out, in]`: KL / α², `[B]`."""
    product = isinstance(covariance, FactoredCovariance) and covariance.spectrum is None
    if term == "blockwise" and not product:
        raise ValueError(
            "the blockwise gain is of a Kronecker posterior with factored damping: use covariance='exact' with this one"
        )
    if isinstance(covariance, Tensor):
        return diagonal_gain(layer, covariance)
    if covariance.spectrum is None:
        return kronecker_gain(layer, covariance.left, covariance.right, term)
    return spectral_gain(layer, covariance.left, covariance.right, covariance.spectrum)


@torch.no_grad()
def information_gain(
    posterior: Posterior,
    inputs: Tensor,
    targets: Tensor,
    *,
    num_samples: int = 10,
    step_size: float = 0.01,
    covariance: CovarianceTerm = "exact",
    generator: torch.Generator | None = None,
) -> Tensor:
    """What each example by itself would teach, `[examples]`, in nats.

    Args:
        posterior: Of a network of Linear layers, whose blocks are diagonal or Kronecker products, perhaps
            with a spectrum of their own.
        inputs: `[examples, features]`.
        targets: As the likelihood wants them.
        num_samples: Draws of the weights that gradient and Fisher are averaged over; 0 takes them at the mean.
        step_size: α, of the natural-gradient step.
        covariance: "exact", or "blockwise" as in the paper (of a Kronecker posterior with factored damping only).
        generator: Source of the draws.

    Raises:
        ValueError: The posterior or the network is of another kind, or a setting is out of range.
    """
    if num_samples < 0 or not step_size > 0:
        raise ValueError(f"num_samples must be at least 0 and step_size positive, got {num_samples} and {step_size}")
    if covariance not in {"exact", "blockwise"}:
        raise ValueError(f"covariance must be 'exact' or 'blockwise', got {covariance!r}")
    blocks = posterior.noisy_blocks()
    weights = [posterior.sample(generator) for _ in range(num_samples)] or [posterior.mean]
    gains = []
    for x, y in zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True):
        layers = sensitivities(posterior, x, y, weights)
        scale = posterior.kl_weight / posterior.num_data
        parts = [gain for block, precision in blocks for gain in _of_block(block, precision, scale, layers, covariance)]
        gains.append(torch.stack(parts).sum(0))
    return step_size**2 * torch.cat(gains)


def _of_block(
    block: Block, precision: Precision, scale: float, layers: Mapping[str, Sensitivity], covariance: CovarianceTerm
) -> Iterator[Tensor]:
    """The gain of each layer of a block whose Σ is scale · P⁻¹."""
    found = precision.layer_covariance()
    if isinstance(found, FactoredCovariance):
        (unit,) = block.units
        yield layer_gain(layers[unit.name], dataclasses.replace(found, left=scale**0.5 * found.left), covariance)
        return
    for unit, part in by_unit(block.units, found):
        variances = scale * unit.matrix(part).unflatten(-1, (unit.outputs, unit.inputs))
        yield layer_gain(layers[unit.name], variances, covariance)
