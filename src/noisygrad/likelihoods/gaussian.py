"""Gaussian likelihood with noise that is fixed, learned under a Gamma posterior, or learned as a point.

The precision τ has q(τ) = Gamma(α, β), prior Gamma(a₀, b₀). For D outputs that share τ the optimum of the ELBO is
α = a₀ + N·D/(2λ), β = b₀ + N/(2λ)·Σ_d E(y − f)²; both move towards it together, since α alone would overshoot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, diagonal_columns, widened
from noisygrad.likelihoods.counted import Counted
from noisygrad.predictions import RegressionPrediction

_SMALLEST_VARIANCE = 1e-10
_LOG_2PI = math.log(2 * math.pi)


def _is_positive(value: object) -> bool:
    number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return number and 0 < float(value) < math.inf  # type: ignore[arg-type]


class Gaussian(Likelihood):
    """y = f + noise, outputs independent given f; target and output have the same shape.

    `noise_variance`: a float fixes σ²; None learns it. `noise_prior`: (shape a₀, rate b₀) of the Gamma prior of the
    precision, or None to learn σ² as a point. `per_output`: one noise per element of the event rather than one for
    all. `noise_decay`: the largest decay of the moving averages; at the k-th update it is
    min(1 − 1/(k+1), noise_decay).
    """

    noise_shape: Tensor  # α, `[*replicas, K]`
    noise_rate: Tensor  # β
    noise_point: Tensor  # σ², fixed or learned as a point
    noise_updates: Tensor
    half_precision: Tensor  # ½ E[τ], derived: kept so that the loss need not compute it
    half_log_normaliser: Tensor  # ½ (log 2π − E[log τ]), derived

    def __init__(
        self,
        noise_variance: float | None = None,
        noise_prior: Sequence[float] | None = (6.0, 6.0),
        per_output: bool = False,
        noise_decay: float = 0.99,
    ) -> None:
        super().__init__()
        if noise_variance is not None and not _is_positive(noise_variance):
            raise ValueError(f"noise_variance must be positive and finite, or None to learn it; got {noise_variance!r}")
        if noise_prior is not None and not (
            hasattr(noise_prior, "__len__") and len(noise_prior) == 2 and all(map(_is_positive, noise_prior))
        ):
            raise ValueError(f"noise_prior must be (shape, rate), both positive, or None; got {noise_prior!r}.")
        if not (noise_decay == 0 or _is_positive(noise_decay)) or noise_decay > 1:
            raise ValueError(f"noise_decay must lie in [0, 1]; got {noise_decay!r}.")
        self.fixed_variance = None if noise_variance is None else float(noise_variance)
        self.noise_prior = None if noise_prior is None else (float(noise_prior[0]), float(noise_prior[1]))
        self.per_output = bool(per_output)
        self.noise_decay = float(noise_decay)
        self._bound = False
        if self._has_posterior and self.noise_prior is not None:
            self.register_buffer("noise_shape", torch.full((1,), self.noise_prior[0]))
            self.register_buffer("noise_rate", torch.full((1,), self.noise_prior[1]))
        else:
            start = 1.0 if self.fixed_variance is None else self.fixed_variance
            self.register_buffer("noise_point", torch.full((1,), start), persistent=self.fixed_variance is None)
        if self.fixed_variance is None:
            self.register_buffer("noise_updates", torch.zeros(1))
        self.register_buffer("half_precision", torch.empty(1), persistent=False)
        self.register_buffer("half_log_normaliser", torch.empty(1), persistent=False)
        self._refresh()

    @property
    def _has_posterior(self) -> bool:
        return self.fixed_variance is None and self.noise_prior is not None

    @property
    def noise_variance(self) -> Tensor:
        """The noise variance now, `[*replicas, K]`: σ², or E[1/τ] = β/(α − 1) (infinite while α ≤ 1)."""
        if not self._has_posterior:
            return self.noise_point.clone()
        shape = self.noise_shape
        return torch.where(shape > 1, self.noise_rate / (shape - 1), torch.inf)

    def bind(self, replicas: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> None:
        """Set replicas, device and type; the noise becomes `[*replicas, K]`, with the same value in each replica."""
        leading = self.half_precision.shape[:-1]
        if leading and leading != torch.Size(replicas):
            raise ValueError(
                f"this Gaussian holds the noise of replicas {list(leading)}; it cannot serve {list(replicas)}: "
                "make a new one."
            )
        super().bind(replicas, device, dtype)
        self._bound = True
        # From the float itself, not from its float32 copy: 0.1 fixed in float64 is 0.1.
        self._resize(torch.Size([*replicas, self.half_precision.shape[-1]]), self._device, self._dtype)
        if self.fixed_variance is not None:
            self.noise_point.fill_(self.fixed_variance)
        elif self.noise_prior is not None and not bool(self.noise_updates.any()):
            self.noise_shape.fill_(self.noise_prior[0])
            self.noise_rate.fill_(self.noise_prior[1])
        self._refresh()

    def _resize(self, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            wide = buffer.to(device=device, dtype=dtype)
            leading = (1,) * (len(shape) - wide.ndim)
            setattr(self, name, wide.reshape(*leading, *wide.shape).expand(shape).clone())

    @torch.no_grad()
    def _refresh(self) -> None:
        """Recompute, in place, the two functions of the noise that the loss uses."""
        if self._has_posterior:
            precision = self.noise_shape / self.noise_rate
            log_precision = torch.digamma(self.noise_shape) - self.noise_rate.log()
        else:
            precision = self.noise_point.reciprocal()
            log_precision = precision.log()
        torch.mul(precision, 0.5, out=self.half_precision)
        torch.sub(0.5 * _LOG_2PI, log_precision, alpha=0.5, out=self.half_log_normaliser)

    def _expand(self, output: Tensor) -> int:
        """Give each output its own noise, once their number is known; returns how many outputs share one."""
        event_size = math.prod(output.shape[len(self.replicas) + 1 :])
        held = self.half_precision.shape[-1]
        if not self.per_output:
            return event_size
        if held != event_size:
            if held != 1:
                raise ValueError(f"the noise of {held} outputs was learned, but the output now has {event_size}.")
            buffer = self.half_precision
            self._resize(torch.Size([*buffer.shape[:-1], event_size]), buffer.device, buffer.dtype)
        return 1

    def _over_event(self, noise: Tensor, output: Tensor) -> Tensor:
        """`noise` `[*replicas, K]` in a shape that broadcasts to one `output` `[*replicas, batch, *event]`."""
        event = output.shape[len(self.replicas) + 1 :]
        shape = event if noise.shape[-1] > 1 else (1,) * len(event)
        return noise.reshape(*self.replicas, 1, *shape)

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        advice = super()._shape_advice(given, expected)
        if 2 * given.numel() == expected.numel():
            advice += " HeteroscedasticGaussian takes a mean and a log-variance for each target."
        return advice

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """E_q(τ)[log p], `[*replicas, batch]`: ½[ψ(α) − log β − (α/β)(y − f)² − log 2π] summed over outputs."""
        return self.sum_event(self.terms(output, target))

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """`log_prob` of each output by itself."""
        self._expand(output)
        squared = (widened(output) - target).square()
        scale, normaliser = (self._over_event(part, output) for part in (self.half_precision, self.half_log_normaliser))
        return -(scale * squared + normaliser)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output: E[τ] (y − f)."""
        self._expand(output)
        return (target - widened(output.detach())) * self._over_event(2 * self.half_precision, output)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the batch of minus `log_prob`, summed over replicas."""
        sharing = self._expand(output)
        normaliser, precision = self.half_log_normaliser, self.half_precision
        if precision.dim() == precision.numel() == 1:  # fewer operations for autograd
            wide = widened(output)
            error = F.mse_loss(wide, target.to(wide.dtype))  # of one dtype: torch 2.11 has no backward of a mixture
            loss = torch.addcmul(normaliser.squeeze(), precision.squeeze(), error)
        else:
            loss = torch.addcmul(normaliser, precision, self._mean_square(output, target)).sum()
        return loss if sharing == 1 else loss * sharing

    def _mean_square(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over the batch and the outputs that share a noise, `[*replicas, K]`."""
        batch_dim = len(self.replicas)
        squared = (widened(output) - target).square()
        if self.half_precision.shape[-1] == 1:
            return squared.flatten(batch_dim).mean(-1, keepdim=True)
        return squared.mean(batch_dim).flatten(batch_dim)

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """f + ε/√E[τ], `[*replicas, batch, *event]`."""
        self._expand(output)
        location = widened(output.detach())
        noise = self._noise_like(location, Tensor.normal_, generators)
        return location + noise * self._over_event((2 * self.half_precision).rsqrt(), output)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """One column per output, √E[τ] on it: the Fisher is E[τ]·I."""
        self._expand(output)
        root = self._over_event((2 * self.half_precision).sqrt(), output)
        values = root.to(widened(output).dtype).expand(output.shape)
        return diagonal_columns(values, self.event_dims(output))

    def predictive(self, outputs: Tensor) -> RegressionPrediction:
        """A mixture of Student-t with 2α degrees of freedom and scale² β/α, or of Gaussians where σ² is a point."""
        self._expand(outputs[0])
        scale = self._over_event((2 * self.half_precision).rsqrt(), outputs[0])
        degrees = self._over_event(2 * self.noise_shape, outputs[0]) if self._has_posterior else None
        return RegressionPrediction(outputs, scale, degrees, self.event_dims(outputs[0]))

    def observe(self, output: Tensor, target: Tensor, counted: Counted | None = None) -> Tensor | None:
        """Σ (y − f)² over the outputs that share a noise, and how many these are: means over examples.

        `[2, *replicas, K]`. Where not all counts, both are of what does, with its weights.
        """
        if self.fixed_variance is not None:
            return None
        sharing = self._expand(output)
        output, target = output.detach(), target.detach()
        if counted is None:
            error = self._mean_square(output, target) * sharing
            return torch.stack([error, torch.full_like(error, sharing)])
        weight = counted.relative()
        squared = (widened(output) - target).square()
        weight = weight.reshape(*weight.shape, *[1] * (squared.dim() - weight.dim())).expand_as(squared)
        batch_dim = len(self.replicas)
        means = torch.stack([weight * squared, weight.to(squared.dtype)]).mean(batch_dim + 1)
        means = means.reshape(2, *self.replicas, -1)  # where each example has one output there is no event
        return means if self.half_precision.shape[-1] > 1 else means.sum(-1, keepdim=True)

    @torch.no_grad()
    def update_noise_(self, statistic: Tensor, num_data: float | Tensor, kl_weight: float | Tensor) -> None:
        """One step of the noise towards its optimum; where a statistic is not finite, its noise is unchanged.

        `num_data` (N) and `kl_weight` (λ > 0) are numbers, or tensors `[*replicas]`.
        """
        if self.fixed_variance is not None:
            raise ValueError("update_noise_ needs a learned noise.")
        if not isinstance(kl_weight, Tensor) and not kl_weight > 0:
            raise ValueError(f"kl_weight must be positive to learn the noise; got {kl_weight}.")
        error, outputs = statistic.to(self.half_precision.dtype)
        # Of an output that no example has there is nothing to learn.
        finite = error.isfinite() & (outputs > 0)
        error = (error / outputs).nan_to_num(0.0, 0.0, 0.0)
        self.noise_updates.add_(finite)
        rate = (self.noise_updates + 1).reciprocal_().clamp_min_(1 - self.noise_decay).mul_(finite)  # ρ_k
        if self.noise_prior is None:
            self.noise_point.lerp_(error, rate).clamp_min_(_SMALLEST_VARIANCE)
        else:
            ratio = num_data / kl_weight
            counts = (ratio.unsqueeze(-1) if isinstance(ratio, Tensor) else ratio) * (0.5 * outputs)
            self.noise_shape.addcmul_(rate, counts + self.noise_prior[0] - self.noise_shape)
            self.noise_rate.lerp_(counts * error + self.noise_prior[1], rate)
        self._refresh()

    def kl(self) -> Tensor:
        """KL(q(τ) ‖ p(τ)) in nats, summed over the K precisions, `[*replicas]`."""
        if not self._has_posterior or self.noise_prior is None:
            return super().kl()
        # In float64: the terms are of size α log α and cancel.
        shape, rate = self.noise_shape.double(), self.noise_rate.double()
        prior_shape, prior_rate = self.noise_prior
        kl = (
            (shape - prior_shape) * torch.digamma(shape)
            - torch.lgamma(shape)
            + math.lgamma(prior_shape)
            + prior_shape * (rate / prior_rate).log()
            + shape * (prior_rate / rate - 1)
        )
        return kl.sum(-1).to(self.noise_shape.dtype)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as values that JSON can hold."""
        return {
            "noise_variance": self.fixed_variance,
            "noise_prior": None if self.noise_prior is None else list(self.noise_prior),
            "per_output": self.per_output,
            "noise_decay": self.noise_decay,
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "noise_updates")
        if saved is not None and self.fixed_variance is None:
            if not self._bound:
                # A new likelihood takes the replicas, the outputs and the type of the one that was saved.
                self.replicas = saved.shape[:-1]
                self._resize(saved.shape, self.half_precision.device, saved.dtype)
            elif saved.shape[:-1] == self.replicas and self.per_output and self.half_precision.shape[-1] == 1:
                self._resize(saved.shape, self.half_precision.device, self.half_precision.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._refresh()
