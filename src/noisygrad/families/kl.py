"""The KL divergence and density of any family's Gaussian, from its log-determinant, trace and quadratic form.

The posterior is N(μ, (λ/N) P⁻¹) and the prior N(m, (λ/N) Γ⁻¹), with Γ in units of the Fisher (`families.base`).
"""

import math

from torch import Tensor

from noisygrad.families.base import Precision, Prior


def kl_divergence(precision: Precision, prior: Prior, difference: Tensor, scale: Tensor | float) -> Tensor:
    """KL(q ‖ p) = ½ [ tr(Γ P⁻¹) + (N/λ) (μ−m)ᵀ Γ (μ−m) − n + log |P| − log |Γ| ] in nats, shape `[...]`.

    P is without extra damping and of the same family as Γ; `difference` is μ − m, `[..., n]`; `scale` is N/λ.
    """
    size = difference.shape[-1]
    # The λ/N of both covariances cancels everywhere but in the quadratic form.
    quadratic = scale * prior.quad(difference)
    return 0.5 * (precision.trace(prior) + quadratic - size + precision.logdet() - prior.logdet())


def log_prob(precision: Precision, difference: Tensor, scale: Tensor | float) -> Tensor:
    """log N(difference | 0, (scale · P)⁻¹) in nats, shape `[...]`; `scale` is N/λ."""
    size = difference.shape[-1]
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    normaliser = precision.logdet() + size * (log_scale - math.log(2.0 * math.pi))
    return 0.5 * (normaliser - scale * precision.quad(difference))
