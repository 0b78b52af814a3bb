"""Noisy natural gradient for replicas of a perceptron: its own forward and backward, and `noisygrad.algorithm`.

The same algorithm as `NoisyAdam`, `NoisyKFAC` and their kin, for perceptrons only and with weight samples as one more
dimension, so that a step is one function of tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.algorithm.covariance import Covariance
from noisygrad.algorithm.start import Safeguard
from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.curvature.passes import MatrixPass
from noisygrad.families import FAMILIES, family_named
from noisygrad.families.base import DampingMode, FactoredCovariance, Precision
from noisygrad.families.kl import kl_divergence
from noisygrad.families.units import Slot, Unit
from noisygrad.kernels.products import second_moment
from noisygrad.likelihoods import Gaussian
from noisygrad.optim.options import fraction, not_negative, positive
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.faults import one_of, whole_number
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.replicas.variational import VariationalLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisySettings:
    """The hyper-parameters, with the paper's symbols and the values of its regression experiments."""

    family: str = "kronecker"
    lr: float = 0.01  # α̃
    fisher_decay: float = 0.999  # 1 − β̃
    kl_weight: float = 1.0  # λ
    prior_variance: float = 1.0  # η
    damping: float = 0.0  # γ_ex
    kl_clip: float | None = None  # c for each output: lr = min(lr, √(c / gᵀv))
    momentum: float = 0.9
    mc_samples: int = 10
    factor_every: int = 1  # T_inv
    damping_mode: DampingMode = "factored"
    safeguard: Safeguard = "brief"
    """How the identity fades that steadies the first draws and steps (`docs/conventions.md`): at once, or only at the
    rate β̃, as in the released code: a long start with small steps, without which large sets can diverge."""
    noise: bool = True
    """Whether weights are drawn; without, it is a point estimate by K-FAC or natural Adam."""

    def __post_init__(self) -> None:
        for name in ("lr", "kl_weight", "prior_variance"):
            positive(name, getattr(self, name))
        if self.kl_clip is not None:
            positive("kl_clip", self.kl_clip)
        for name in ("mc_samples", "factor_every"):
            whole_number(name, getattr(self, name))
        for name in ("momentum", "fisher_decay"):
            fraction(name, getattr(self, name))
        not_negative("damping", self.damping)
        one_of("family", self.family, FAMILIES)
        one_of("damping_mode", self.damping_mode, family_named(self.family).damping_modes)
        one_of("safeguard", self.safeguard, get_args(Safeguard))

    def learner(
        self, network: Perceptrons, likelihood: Gaussian, *, num_data: int, generators: Sequence[torch.Generator]
    ) -> NoisyLearner:
        """Perceptrons that are trained with these settings, one replica for each generator."""
        return NoisyLearner(network, likelihood, self, num_data=num_data, generators=generators)


class NoisyLearner(VariationalLearner):
    """Perceptrons trained by noisy natural gradient; arguments as of `VariationalLearner`.

    Attributes:
        covariance: The Fisher and its factors.
        rejected: How often a factorisation was not finite, so that a replica kept the one it had, `[R]`.
        clipped: How many steps were shortened by the trust region, `[R]`.
        steps: How many there were.
    """

    def __init__(
        self,
        network: Perceptrons,
        likelihood: Gaussian,
        settings: NoisySettings,
        *,
        num_data: int,
        generators: Sequence[torch.Generator],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            network,
            likelihood,
            num_data=num_data,
            kl_weight=settings.kl_weight,
            mc_samples=settings.mc_samples if settings.noise else 1,
            generators=generators,
            device=device,
            dtype=dtype,
        )
        self.settings = settings
        self.refresh_every = settings.factor_every
        units = settings.kl_weight / num_data
        # γ_in = λ/(Nη): the prior's precision in units of the Fisher.
        gamma = units / settings.prior_variance
        self._scale = math.sqrt(units)
        blocks = blocks_of(network, settings.family, self.replicas, noise=settings.noise)
        self._units = [unit for block in blocks for unit in block.units]
        # Whole tensors: the first compiled steps are compared with eager ones, and all that they see is written back.
        self._priors = {
            block.name: block.prior(lambda name: gamma, self.mean).map(lambda tensor: tensor.contiguous())
            for block in blocks
        }
        self.covariance = Covariance(
            blocks,
            self._priors,
            damping_mode=settings.damping_mode,
            safeguard=settings.safeguard,
            lean=False,
            repeated=settings.factor_every > 1,
        )
        self._dampings = {0: settings.damping}
        self.covariance.refresh_(self._dampings)
        self.refresh_traceable = self.covariance.traceable
        self._algorithm = NoisyNaturalGradient(self.mean, self.covariance, scale=self._scale)
        self._whole = slice(0, network.num_weights)
        self._gradient = torch.zeros_like(self.mean)
        self.rejected = torch.zeros(self.replicas, dtype=dtype, device=self.device)
        self.clipped = torch.zeros(self.replicas, dtype=dtype, device=self.device)
        self.steps = torch.zeros(1, dtype=dtype, device=self.device)

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Noise of the weights, and of the targets that the Fisher's gradients are taken for."""
        targets = (self.mc_samples, batch_size, self.network.sizes[-1])
        return {**super().noise_shapes(batch_size), "targets": targets}

    def weights(self, noise: Tensor) -> Tensor:
        """μ + √(λ/N) P^(−½) ε."""
        if not self.settings.noise:
            return self.mean.unsqueeze(1).expand_as(noise)
        return self._algorithm.draw(noise.transpose(0, 1)).transpose(0, 1)

    @torch.no_grad()
    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """Draw, differentiate, and average gradient and Fisher over batch and samples; the mean moves in `move_`."""
        weights = self.weights(noise["weights"])
        inputs, outputs = self.network.forward(weights, x)
        errors = outputs - y.unsqueeze(1)
        precision = self.precision()
        # One gradient for the data's targets, one for targets f + ε/√τ drawn from the model, whose error is −ε/√τ.
        at_output = (precision * errors, -precision.sqrt() * noise["targets"])
        of_loss, of_model = (
            [part.flatten(1, 2).unsqueeze(-2) for part in self.network.backward(weights, inputs, at)]
            for at in at_output
        )
        # With the constant 1 of the bias, so that one product makes both columns of [W | b].
        rows = [F.pad(part, (0, 1), value=1.0).flatten(1, 2).unsqueeze(-2) for part in inputs]
        layers = [second_moment(g, a, False, False).flatten(1) for g, a in zip(of_loss, rows, strict=True)]
        self._gradient.copy_(torch.cat(layers, dim=-1))
        self._algorithm.add_prior_(self._gradient, weights.mean(1))
        passes = {
            unit.name: MatrixPass(a, g, constant=False) for unit, a, g in zip(self._units, rows, of_model, strict=True)
        }
        current = self.covariance.statistics
        measured = {b.name: b.family.measure(b.units, passes, current[b.name]) for b in self.covariance.blocks}
        self._algorithm.measure_(measured, (1.0 - self.settings.fisher_decay) * self.anneal)
        self.steps.add_(1.0)
        self.update_noise_(errors)

    @torch.no_grad()
    def refresh_(self) -> None:
        """Factorise anew; a replica whose factors come out not finite keeps those it had."""
        self.rejected.add_(self.covariance.refresh_where_finite_(self._dampings))

    @torch.no_grad()
    def move_(self) -> None:
        """μ ← μ − α̃ P⁻¹ m̂, with the bias-corrected momentum m̂."""
        group = {"lr": self.settings.lr * self.anneal, "momentum": self.settings.momentum}
        clip = None if self.settings.kl_clip is None else self.settings.kl_clip * self.network.sizes[-1]
        factor = self._algorithm.move_(self._gradient, [(group, self._whole)], clip=clip)
        if factor is not None:
            self.clipped.add_((factor < 1.0).squeeze(-1).to(self.dtype))

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, `[R]`, of the posterior that draws are made from."""
        scale = self.num_data / self.kl_weight
        parts = [
            kl_divergence(precision, self._priors[block.name], block.vector(self.mean), scale)
            for block, precision in self._drawn_from()
        ]
        return torch.stack(parts).sum(0)

    def _drawn_from(self) -> Iterator[tuple[Block, Precision]]:
        for block in self.covariance.blocks:
            precision = self.covariance.factors[block.name].sampler
            assert isinstance(precision, Precision)
            yield block, precision

    def layer_covariances(self, replica: int) -> list[FactoredCovariance | Tensor]:
        """λ/N times P⁻¹ of each layer."""
        if not self.settings.noise:
            raise ValueError("a point estimate (noise=False) has no covariance: train with noise=True")
        found: list[FactoredCovariance | Tensor] = []
        for _, precision in self._drawn_from():
            covariance = precision.layer_covariance()
            if isinstance(covariance, Tensor):
                found += self.network.matrices(self._scale**2 * covariance[replica])
            else:
                own = covariance.map(lambda tensor: tensor[replica])
                found.append(dataclasses.replace(own, left=self._scale * own.left))
        return found

    def diagnostics(self) -> dict[str, Tensor]:
        """The KL of the weights, of a posterior that is used; factorisations refused; the share of steps clipped."""
        found = super().diagnostics() if self.settings.noise else {}
        return {**found, "rejected": self.rejected, "clipped": self.clipped / self.steps.clamp_min(1.0)}

    def precisions(self) -> list[Precision]:
        """P of every block with all its terms, as dense matrices need them; Γ included, without γ_ex."""
        statistics, mode = self.covariance.statistics, self.settings.damping_mode
        return [
            statistics[block.name].factorise(self._priors[block.name], 0.0, mode) for block in self.covariance.blocks
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Mean, noise, momentum and moments."""
        updates = self.covariance.fisher.updates.expand(self.replicas)
        found = {**super().tensors(), "momentum": self._algorithm.momentum.average, "updates": updates}
        for index, statistics in enumerate(self.covariance.statistics.values()):
            found |= {f"statistics.{index}.{name}": tensor for name, tensor in statistics.tensors().items()}
        return found


def blocks_of(network: Perceptrons, family: str, replicas: int, *, noise: bool = True) -> list[Block]:
    """The blocks of a perceptron's layers, each the matrix [W | b], in one param group."""
    units = [
        Unit(
            name=f"layer {index}",
            kind="matrix",
            outputs=outputs,
            inputs=inputs,
            slots=(Slot(f"layer {index}", 0, inputs),),
            layer="Linear",
            chainable=True,
            replicas=(replicas,),
        )
        for index, (outputs, inputs) in enumerate(network.shapes)
    ]
    blocks: list[Block] = []
    start = 0
    for part in family_named(family).partition(units, units):
        blocks.append(Block(part.name, part.family, part.units, start, 0, noise))
        start += blocks[-1].size
    return blocks
