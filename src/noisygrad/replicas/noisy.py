"""Noisy natural gradient for replicas: Algorithms 1 and 2 of the paper, and their block-tridiagonal and full kin.

The same arithmetic as `NoisyAdam`, `NoisyKFAC`, `NoisyBlockTridiagonal` and `NoisyFull`, on the same families, but for
perceptrons only and with weight samples as one more dimension: a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.families import dense, diagonal, kronecker, tridiagonal
from noisygrad.families.base import DampingMode, FactoredCovariance, Precision, Prior, Statistics, joined
from noisygrad.families.kl import kl_divergence
from noisygrad.kernels.factorisation import FactorisationError, unchecked
from noisygrad.kernels.moments import second_moment
from noisygrad.likelihoods import Gaussian
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.replicas.variational import VariationalLearner

Family = Literal["diagonal", "kronecker", "tridiagonal", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisySettings:
    """The hyper-parameters, with the paper's symbols and the values of its regression experiments."""

    family: Family = "kronecker"
    lr: float = 0.01  # α̃
    fisher_rate: float = 0.001  # β̃ = 1 − fisher_decay
    kl_weight: float = 1.0  # λ
    prior_variance: float = 1.0  # η
    damping: float = 0.0  # γ_ex
    kl_clip: float | None = None  # c: lr = min(lr, √(c / gᵀv))
    momentum: float = 0.9
    mc_samples: int = 10
    factor_every: int = 1  # T_inv
    damping_mode: DampingMode = "factored"
    forget_start: bool = True
    """Whether the identity that the Fisher starts from is forgotten at once (`docs/conventions.md`), or, as in the
    released code, only at the rate β̃: a long start with small steps, without which large sets can diverge."""
    noise: bool = True
    """Whether weights are drawn; without, it is a point estimate by K-FAC or natural Adam."""

    def __post_init__(self) -> None:
        for name in ("lr", "fisher_rate", "kl_weight", "prior_variance", "mc_samples", "factor_every", "kl_clip"):
            value = getattr(self, name)
            if name == "kl_clip" and value is None:
                continue
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite; got {value!r}")
        for name in ("mc_samples", "factor_every"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be an integer; got {getattr(self, name)!r}")
        if self.damping_mode not in ("factored", "exact"):
            raise ValueError(f'damping_mode must be "factored" or "exact"; got {self.damping_mode!r}')
        if self.family not in ("diagonal", "kronecker", "tridiagonal", "full"):
            raise ValueError(f'family must be "diagonal", "kronecker", "tridiagonal" or "full"; got {self.family!r}')
        if not 0 <= self.momentum < 1 or not self.fisher_rate <= 1 or not self.damping >= 0:
            raise ValueError(
                "momentum must lie in [0, 1), fisher_rate in (0, 1] and damping be at least 0; got "
                f"{self.momentum!r}, {self.fisher_rate!r}, {self.damping!r}"
            )

    def learner(
        self, network: Perceptrons, likelihood: Gaussian, *, num_data: int, generators: Sequence[torch.Generator]
    ) -> NoisyLearner:
        """Perceptrons that are trained with these settings, one replica for each generator."""
        return NoisyLearner(network, likelihood, self, num_data=num_data, generators=generators)


class NoisyLearner(VariationalLearner):
    """Perceptrons trained by noisy natural gradient; arguments as of `VariationalLearner`.

    Attributes:
        rejected: How often a factorisation was not finite, so that a replica kept the one it had, `[R]`.
        clipped: How many steps were shortened by the trust region, `[R]`.
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
        exact = settings.family == "kronecker" and settings.damping_mode == "exact"
        self.refresh_traceable = not exact and settings.family != "tridiagonal"
        # γ_in = λ/(Nη): the prior's precision in units of the Fisher.
        self._prior_precision = settings.kl_weight / (num_data * settings.prior_variance)
        self._scale = math.sqrt(settings.kl_weight / num_data)
        self._blocks = _blocks(network, settings.family)
        self.statistics = [self._identity(layers) for layers in self._blocks]
        self._priors = [self._prior(layers) for layers in self._blocks]
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.updates = torch.zeros(self.replicas, **options)
        self.momentum = torch.zeros_like(self.mean)
        # Not a tensor of no dimensions: a compiled function may take one for a number, and lose what it writes there.
        self.momentum_power = torch.ones(self.replicas, 1, **options)
        """momentum^k, for the bias correction."""
        self.rejected = torch.zeros(self.replicas, **options)
        self.clipped = torch.zeros(self.replicas, **options)
        self.samplers = self._factorised(0.0)
        self._steppers = self._factorised(settings.damping) if settings.damping else self.samplers

    def _identity(self, layers: tuple[int, ...]) -> Statistics:
        shapes = [self.network.shapes[layer] for layer in layers]
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        batch = (self.replicas,)
        if self.settings.family == "kronecker":
            return kronecker.Statistics.identity(batch, *shapes[0], **options)
        if self.settings.family == "tridiagonal":
            outputs, inputs = zip(*shapes, strict=True)
            return tridiagonal.Statistics.identity(batch, outputs, inputs, **options)
        if self.settings.family == "diagonal":
            return diagonal.Statistics.identity(batch, self.network.num_weights, **options)
        return dense.Statistics.identity(batch, self.network.num_weights, **options)

    def _prior(self, layers: tuple[int, ...]) -> Prior:
        def constant(size: int) -> Tensor:
            return torch.full((self.replicas, size), self._prior_precision, dtype=self.dtype, device=self.device)

        shapes = [self.network.shapes[layer] for layer in layers]
        if self.settings.family == "kronecker":
            outputs, inputs = shapes[0]
            return kronecker.Prior.from_columns(constant(inputs), outputs)
        if self.settings.family == "tridiagonal":
            return tridiagonal.Prior.from_columns([constant(shape[1]) for shape in shapes], [s[0] for s in shapes])
        if self.settings.family == "diagonal":
            return diagonal.Prior.from_precision(constant(self.network.num_weights))
        return dense.Prior.from_precision(constant(self.network.num_weights))

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Noise of the weights, and of the targets that the Fisher's gradients are taken for."""
        targets = (self.mc_samples, batch_size, self.network.sizes[-1])
        return {**super().noise_shapes(batch_size), "targets": targets}

    def weights(self, noise: Tensor) -> Tensor:
        """μ + √(λ/N) P^(−½) ε."""
        if not self.settings.noise:
            return self.mean.unsqueeze(1).expand_as(noise)
        spread = [
            sampler.sample(part.transpose(0, 1)).transpose(0, 1)
            for sampler, part in zip(self.samplers, self._split(noise), strict=True)
        ]
        return torch.add(self.mean.unsqueeze(1), joined(spread), alpha=self._scale)

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
        gradient = torch.cat(layers, dim=-1).add_(weights.mean(1), alpha=self._prior_precision)
        self.momentum.lerp_(gradient, 1.0 - self.settings.momentum)
        self.momentum_power.mul_(self.settings.momentum)
        self.updates.add_(1.0)
        rate = (self.settings.fisher_rate * self.anneal).expand_as(self.updates)
        if self.settings.forget_start:
            rate = (1.0 / (self.updates + 1.0)).maximum(rate)
        for layer_numbers, statistics in zip(self._blocks, self.statistics, strict=True):
            measured = self._measure([rows[i] for i in layer_numbers], [of_model[i] for i in layer_numbers])
            new = measured.tensors()
            for name, tensor in statistics.tensors().items():
                tensor.lerp_(new[name], rate.reshape(-1, *[1] * (tensor.dim() - 1)))
        self.update_noise_(errors)

    def _measure(self, inputs: list[Tensor], gradients: list[Tensor]) -> Statistics:
        if self.settings.family == "kronecker":
            return kronecker.Statistics.measure(inputs[0], gradients[0], False)
        if self.settings.family == "tridiagonal":
            count = len(inputs)
            return tridiagonal.Statistics.measure(inputs, gradients, [False] * count, [True] * (count - 1))
        if self.settings.family == "diagonal":
            # (g aᵀ)² = g² (a²)ᵀ: no gradient of one example is formed.
            squares = [
                second_moment(g.square(), a.square(), False, False).flatten(1)
                for g, a in zip(gradients, inputs, strict=True)
            ]
            return diagonal.Statistics(torch.cat(squares, dim=-1))
        rows = [(g.mT @ a).flatten(-2) for g, a in zip(gradients, inputs, strict=True)]
        return dense.Statistics.measure(torch.cat(rows, dim=-1))

    @torch.no_grad()
    def refresh_(self) -> None:
        """Factorise anew; a replica whose factors come out not finite keeps those it had."""
        kinds = [(self.samplers, 0.0)]
        if self._steppers is not self.samplers:
            kinds.append((self._steppers, self.settings.damping))
        for cached, damping in kinds:
            try:
                new = self._factorised(damping)
            except FactorisationError:
                self._refresh_apart_(cached, damping)
                continue
            # Where a Cholesky factorisation fails, a pivot is not positive, and the log-determinant is not finite.
            finite = torch.stack([precision.logdet() for precision in new]).sum(0).isfinite()
            self.rejected.add_((~finite).to(self.dtype))
            for old, precision in zip(cached, new, strict=True):
                theirs = precision.tensors()
                for name, tensor in old.tensors().items():
                    keep = finite.reshape(-1, *[1] * (tensor.dim() - 1))
                    torch.where(keep, theirs[name], tensor, out=tensor)

    def _refresh_apart_(self, cached: Sequence[Precision], damping: float) -> None:
        """Replica by replica, because one of them cannot be factorised."""
        for replica in range(self.replicas):
            one = slice(replica, replica + 1)
            try:
                new = [
                    statistics.map(lambda t, one=one: t[one]).factorise(
                        prior.map(lambda t, one=one: t[one]), damping, self.settings.damping_mode
                    )
                    for statistics, prior in zip(self.statistics, self._priors, strict=True)
                ]
            except FactorisationError:
                self.rejected[replica] += 1.0
                continue
            for old, precision in zip(cached, new, strict=True):
                theirs = precision.drop_terms().with_inverses().tensors()
                for name, tensor in old.tensors().items():
                    tensor[one].copy_(theirs[name])

    def _factorised(self, damping: float) -> list[Precision]:
        with unchecked(self.refresh_traceable):
            found = [
                statistics.factorise(prior, damping, self.settings.damping_mode).drop_terms()
                for statistics, prior in zip(self.statistics, self._priors, strict=True)
            ]
            return [each.with_inverses() for each in found] if self.settings.factor_every > 1 else found

    @torch.no_grad()
    def move_(self) -> None:
        """μ ← μ − α̃ P⁻¹ m̂, with the bias-corrected momentum m̂."""
        corrected = self.momentum / (1.0 - self.momentum_power)
        parts = [p.solve(v) for p, v in zip(self._steppers, self._split(corrected), strict=True)]
        step = joined(parts)
        rate = (self.settings.lr * self.anneal).expand_as(self.clipped)
        if self.settings.kl_clip is not None:
            # gᵀ v = vᵀ P v, what a step of size 1 would change the predictions by, in nats for each example.
            largest = (self.settings.kl_clip / (corrected * step).sum(-1).clamp_min(1e-30)).sqrt()
            self.clipped.add_((largest < rate).to(self.dtype))
            rate = torch.minimum(rate, largest)
        self.mean.sub_(step * rate.unsqueeze(-1))

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, `[R]`."""
        scale = self.num_data / self.kl_weight
        parts = [
            kl_divergence(precision, prior, mean, scale)
            for precision, prior, mean in zip(self.samplers, self._priors, self._split(self.mean), strict=True)
        ]
        return torch.stack(parts).sum(0)

    def layer_covariances(self, replica: int) -> list[FactoredCovariance | Tensor]:
        """λ/N times P⁻¹ of each layer."""
        if not self.settings.noise:
            raise ValueError("a point estimate (noise=False) has no covariance: train with noise=True")
        found: list[FactoredCovariance | Tensor] = []
        for precision in self.samplers:
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
        return {**found, "rejected": self.rejected, "clipped": self.clipped / self.updates.clamp_min(1.0)}

    def _split(self, flat: Tensor) -> list[Tensor]:
        sizes = [sum(math.prod(self.network.shapes[i]) for i in layers) for layers in self._blocks]
        return list(flat.split(sizes, dim=-1))

    def precisions(self) -> list[Precision]:
        """P of every block with all its terms, as dense matrices need them; Γ included, without γ_ex."""
        return [
            s.factorise(p, 0.0, self.settings.damping_mode) for s, p in zip(self.statistics, self._priors, strict=True)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Mean, noise, momentum and moments."""
        found = {**super().tensors(), "momentum": self.momentum, "updates": self.updates}
        for index, statistics in enumerate(self.statistics):
            found |= {f"statistics.{index}.{name}": tensor for name, tensor in statistics.tensors().items()}
        return found


def _blocks(network: Perceptrons, family: Family) -> list[tuple[int, ...]]:
    """The layers of each block: one each for Kronecker factors, else one block of all."""
    layers = tuple(range(len(network.shapes)))
    return [(layer,) for layer in layers] if family == "kronecker" else [layers]
