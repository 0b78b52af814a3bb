"""Mean and precision of the prior: one variance for all weights, one for each parameter, or a fitted posterior.

The prior of every weight and bias is N(0, η) with η = `prior_variance`; the scales of norm layers are centred on 1,
where they start. Conventions: `docs/conventions.md`.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from noisygrad.families.base import Prior

PriorVariance = float | Mapping[str, float]
"""η for all, or patterns of parameter names (`"*.bias"`) with an η each; the first that matches counts."""


@dataclass(frozen=True)
class FittedPrior:
    """A fitted posterior as the prior of the next fit: `posterior.as_prior()`.

    `means` are by parameter, `blocks` hold the precision of each block of the same family and the same model.
    """

    family: str
    means: dict[str, Tensor]
    blocks: dict[str, Prior]


def check_prior_variance(prior_variance: PriorVariance) -> None:
    """Raise unless every η is positive (inf, no prior at all, is allowed)."""
    for pattern, value in _patterns(prior_variance):
        if not isinstance(value, Real) or math.isnan(value) or value <= 0:
            raise ValueError(f"prior_variance must be positive, got {value!r} for {pattern!r}")


def is_improper(prior_variance: PriorVariance) -> bool:
    """Whether some weights have no prior at all."""
    return any(math.isinf(value) for _, value in _patterns(prior_variance))


def check_patterns(prior_variance: PriorVariance, names: Iterable[str]) -> None:
    """Raise for a pattern that matches none of the trainable parameters: most likely a slip."""
    names = list(names)
    for pattern, _ in _patterns(prior_variance):
        if pattern != "*" and not fnmatch.filter(names, pattern):
            raise ValueError(f"the pattern {pattern!r} in prior_variance matches no trainable parameter")


def prior_precision(prior_variance: PriorVariance, name: str) -> float:
    """1/η of the named parameter; 0 where η is infinite."""
    for pattern, value in _patterns(prior_variance):
        if fnmatch.fnmatchcase(name, pattern):
            return 1.0 / float(value)
    raise ValueError(f'prior_variance has no pattern for parameter {name!r}; add "*" for all others')


def _patterns(prior_variance: PriorVariance) -> list[tuple[str, float]]:
    return list(prior_variance.items()) if isinstance(prior_variance, Mapping) else [("*", prior_variance)]
