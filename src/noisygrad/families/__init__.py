"""The covariance families: tensor algebra, batched over leading dimensions, and what each family says about itself.

Each family is one module with the same skeleton in the same order: `Prior`, `Statistics` (the moving average of the
Fisher), `Precision` (what sampling, stepping and the KL need), and a `Family`, which registers itself (`family`).
"""

from noisygrad.families import dense, diagonal, eigen, kronecker, tridiagonal
from noisygrad.families.family import FAMILIES, Family, family_named, register_family

__all__ = [
    "FAMILIES",
    "Family",
    "dense",
    "diagonal",
    "eigen",
    "family_named",
    "kronecker",
    "register_family",
    "tridiagonal",
]
