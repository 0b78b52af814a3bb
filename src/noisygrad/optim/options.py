"""The hyper-parameters of a noisy natural-gradient optimiser, checked when made. Symbols: `docs/conventions.md`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from torch import nn

from noisygrad.curvature.fisher import FisherKind
from noisygrad.families.base import DampingMode
from noisygrad.likelihoods import Likelihood
from noisygrad.posterior.blocks import Family
from noisygrad.priors import FittedPrior, PriorVariance, check_prior_variance, is_improper

MomentumMode = Literal["average", "heavy_ball"]
FisherPass = Literal["same", "fresh"]
FisherStart = Literal["forgotten", "fading"]
Schedule = float | Callable[[int], float]
"""A number, or a function from the step (1, 2, …) to one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What holds for all param groups of an optimiser."""

    num_data: int
    """N"""
    kl_weight: float
    """λ"""
    fisher_decay: Schedule
    """1 − β̃"""
    fisher_start: FisherStart
    fisher_floor: float
    """Added to the diagonal of the Fisher that is measured"""
    stats_every: int
    """T_stats"""
    factor_every: int
    """T_inv"""
    stats_batch: int | None = None
    """Statistics from at most so many examples of a batch."""
    kl_clip: Schedule | None
    """c, the trust region"""
    mc_samples: int
    momentum_mode: MomentumMode
    fisher: FisherKind
    fisher_pass: FisherPass
    damping_mode: DampingMode

    def __post_init__(self) -> None:
        if not isinstance(self.num_data, Integral) or isinstance(self.num_data, bool) or self.num_data <= 0:
            raise ValueError(
                f"num_data must be a positive integer, the size of the training set; got {self.num_data!r}"
            )
        positive("kl_weight", self.kl_weight)
        for name in ("stats_every", "factor_every", "mc_samples", "stats_batch"):
            value = getattr(self, name)
            if name == "stats_batch" and value is None:
                continue
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, kind in (
            ("momentum_mode", MomentumMode),
            ("fisher", FisherKind),
            ("fisher_pass", FisherPass),
            ("fisher_start", FisherStart),
            ("damping_mode", DampingMode),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}")
        if not isinstance(self.fisher_floor, Real) or not 0 <= float(self.fisher_floor) < math.inf:
            raise ValueError(f"fisher_floor must be at least 0, got {self.fisher_floor!r}")
        self.decay_at(1)
        self.clip_at(1)
        # Plain numbers, whatever they were given as: they go into files.
        object.__setattr__(self, "num_data", int(self.num_data))
        object.__setattr__(self, "kl_weight", float(self.kl_weight))

    def decay_at(self, step: int) -> float:
        """1 − β̃ at a step."""
        decay = self.fisher_decay(step) if callable(self.fisher_decay) else self.fisher_decay
        return fraction("fisher_decay", decay)

    def clip_at(self, step: int) -> float | None:
        """c at a step, or None without a trust region."""
        if self.kl_clip is None:
            return None
        return positive("kl_clip", self.kl_clip(step) if callable(self.kl_clip) else self.kl_clip)

    def stats_due(self, step: int) -> bool:
        """Whether this step takes statistics: every T_stats, and at 1, 2, 4, … below T_inv."""
        return step % self.stats_every == 0 or self._early(step)

    def factors_due(self, step: int) -> bool:
        """Whether this step refreshes the factors: every T_inv, and at 1, 2, 4, … below it."""
        return step % self.factor_every == 0 or self._early(step)

    def _early(self, step: int) -> bool:
        return step < self.factor_every and step & (step - 1) == 0


def positive(name: str, value: float) -> float:
    """`value` if it is a positive finite number, else a ValueError that names it."""
    if not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return value


def fraction(name: str, value: float) -> float:
    """`value` if it lies in [0, 1), else a ValueError that names it."""
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    return value


def check_arguments(
    model: object,
    likelihood: object,
    prior_variance: PriorVariance | None,
    prior: object,
    damping_mode: DampingMode,
    family: Family,
) -> PriorVariance:
    """The prior variance, 1 where none is said; raise for slips that would surface far from where they were made."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument must be the model itself, an nn.Module; got {type(model).__name__}")
    if not isinstance(likelihood, Likelihood):
        given = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
        raise TypeError(f"likelihood must be an instance of one of noisygrad's, such as ng.Gaussian(); got {given}")
    if prior is not None and prior_variance is not None:
        raise ValueError("give either prior or prior_variance: a fitted posterior has its own variances")
    prior_variance = 1.0 if prior_variance is None else prior_variance
    check_prior_variance(prior_variance)
    if prior is not None and not isinstance(prior, FittedPrior):
        raise TypeError(f"prior must come from posterior.as_prior(); got {type(prior).__name__}")
    if damping_mode == "exact" and family != "kronecker":
        raise ValueError(
            'damping_mode="exact" is for the Kronecker blocks of NoisyKFAC; a diagonal and a full matrix are always '
            "damped exactly, and a chain of layers (NoisyBlockTridiagonal) cannot be"
        )
    if damping_mode == "exact" and prior is None and is_improper(prior_variance):
        raise ValueError('damping_mode="exact" needs a finite prior_variance: the eigenbasis is relative to the prior')
    return prior_variance
