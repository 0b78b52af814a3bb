"""Bayes by Backprop (Blundell et al. 2015): a factorised Gaussian posterior, fitted by Adam on sampled gradients.

The same prior, network, noise and weight samples as the noisy natural-gradient methods: only the fit differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisygrad.families.base import FactoredCovariance
from noisygrad.likelihoods import Gaussian
from noisygrad.optim.options import positive
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.baselines.adam import Adam


@dataclass(frozen=True, kw_only=True)
class BBBSettings:
    """The hyper-parameters."""

    lr: float = 0.01
    kl_weight: float = 1.0  # λ
    prior_variance: float = 1.0  # η
    mc_samples: int = 10
    initial_std: float = 0.05

    def __post_init__(self) -> None:
        for name in ("lr", "kl_weight", "prior_variance", "mc_samples", "initial_std"):
            positive(name, getattr(self, name))

    def learner(
        self, network: Perceptrons, likelihood: Gaussian, *, num_data: int, generators: Sequence[torch.Generator]
    ) -> BBB:
        """Perceptrons that are trained with these settings, one replica for each generator."""
        return BBB(network, likelihood, self, num_data=num_data, generators=generators)


class BBB(VariationalLearner):
    """Perceptrons with posterior N(μ, σ²) for each weight; arguments as of `VariationalLearner`."""

    def __init__(
        self,
        network: Perceptrons,
        likelihood: Gaussian,
        settings: BBBSettings,
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
            mc_samples=settings.mc_samples,
            generators=generators,
            device=device,
            dtype=dtype,
        )
        self.settings = settings
        start = torch.full_like(self.mean, math.log(settings.initial_std))
        self._parameters = torch.stack([self.mean, start])
        self.mean, self.log_std = self._parameters.unbind(0)
        self._adam = Adam(self._parameters, settings.lr)

    def weights(self, noise: Tensor) -> Tensor:
        """μ + σ ε."""
        return torch.addcmul(self.mean.unsqueeze(1), self.log_std.exp().unsqueeze(1), noise)

    @torch.no_grad()
    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """One step of Adam on −ELBO/N, its gradient through the draw w = μ + σ ε."""
        weights = self.weights(noise["weights"])
        inputs, outputs = self.network.forward(weights, x)
        errors = outputs - y.unsqueeze(1)
        gradients = self.network.backward(weights, inputs, self.precision() * errors)
        layers = [
            torch.cat([g.mT @ a, g.sum(-2).unsqueeze(-1)], dim=-1).flatten(2)
            for g, a in zip(gradients, inputs, strict=True)
        ]
        of_loss = torch.cat(layers, dim=-1) / x.shape[1]
        std = self.log_std.exp()
        ratio, variance = self.kl_weight / self.num_data, self.settings.prior_variance
        of_mean = of_loss.mean(1) + ratio / variance * self.mean
        of_log_std = (of_loss * noise["weights"]).mean(1) * std + ratio * (std.square() / variance - 1.0)
        self._adam.step_(torch.stack([of_mean, of_log_std]), self.anneal)
        self.update_noise_(errors)

    def kl(self) -> Tensor:
        """Σ ½ [σ²/η + μ²/η − 1 − log(σ²/η)] in nats, `[R]`."""
        variance = self.settings.prior_variance
        ratio = (2.0 * self.log_std).exp() / variance
        return 0.5 * (ratio + self.mean.square() / variance - 1.0 - ratio.log()).sum(-1)

    def layer_covariances(self, replica: int) -> list[FactoredCovariance | Tensor]:
        """σ² of each layer."""
        return list(self.network.matrices((2.0 * self.log_std[replica]).exp()))

    def tensors(self) -> dict[str, Tensor]:
        """Mean, width, noise, and the moments of Adam."""
        moments = {f"adam.{name}": tensor.movedim(0, 1) for name, tensor in self._adam.tensors().items()}
        return {**super().tensors(), "log_std": self.log_std, **moments}
