"""PBP_MV: probabilistic backpropagation with matrix-variate Gaussian weights, after Sun, Chen and Carin (2017).

A layer's weights are W = P C Qᵀ with independent Gaussians C and orthogonal P and Q, each a product of Householder
reflections I − 2 u uᵀ. In the network that is PBP's chain with a rotation before and after every linear map. C is
learned by PBP's own updates. The unit vectors u follow the gradient of log Z, by Adam. A rotation of an isotropic prior
is the same prior, so PBP's refinement of the prior's factors acts on C unchanged.

Of a rotated variance only the diagonal is kept, as everywhere in PBP.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from noisygrad_paper.baselines.pbp import PBP, Constant, Linear, Map, Rectifier

_DECAY_MEAN, _DECAY_SQUARE, _EPSILON = 0.9, 0.999, 1e-8  # Adam's β₁, β₂, ε


def reflect(vectors: Tensor, normal: Tensor) -> Tensor:
    """Each row of `vectors` `[..., m, k]` reflected by I − 2 u uᵀ, for a unit `normal` u `[..., k]`."""
    row = normal[..., None, :]
    return vectors - (2.0 * vectors * row).sum(-1, keepdim=True) * row


class Rotation(Map):
    """z = T a for the orthogonal T = H₁ H₂ … of unit `normals`, each `[R, k]`; the variance is (T∘T) v.

    No matrix is built. T = I − Σᵢ aᵢ uᵢᵀ with aᵢ = 2 H₁ … Hᵢ₋₁ uᵢ, so with d the diagonal of that sum T∘T is
    diag(1 − 2d) + Σᵢⱼ (aᵢ∘aⱼ)(uᵢ∘uⱼ)ᵀ.
    """

    def __init__(self, normals: Sequence[Tensor]) -> None:
        self.normals = normals
        right = [normal[:, None, :] for normal in normals]
        left = list(right)
        self.kept = torch.ones_like(right[0])
        for index in range(len(normals)):
            for other in reversed(normals[:index]):
                left[index] = reflect(left[index], other)
            self.kept = self.kept - 4.0 * left[index] * right[index]
        pairs = [(i, j) for i in range(len(normals)) for j in range(i + 1)]
        # Twice each pair of two, and the factor 2 of each a.
        self.left_pairs = [(4.0 if i == j else 8.0) * left[i] * left[j] for i, j in pairs]
        self.right_pairs = [right[i] * right[j] for i, j in pairs]

    def forward(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.input_mean, self.input_variance = mean, variance
        spread = None if variance is None else self._spread(variance, self.right_pairs, self.left_pairs)
        return self._apply(mean), spread

    def input_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        spread = None if variance is None else self._spread(variance, self.left_pairs, self.right_pairs)
        return self._apply_transposed(mean), spread

    def parameter_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, ...]:
        """By the normals, along the unit sphere.

        With T = A H B around one reflection and G the derivative by T, that by its normal u is
        −2 (Aᵀ G Bᵀ u + B Gᵀ A u), less its part along u; G = ∂m aᵀ + 2 T∘(∂v vᵀ).
        """
        gradients = []
        for index, normal in enumerate(self.normals):
            before, after = self.normals[:index], self.normals[index + 1 :]
            left = right = normal[:, None, :]
            for other in reversed(before):
                left = reflect(left, other)
            for other in after:
                right = reflect(right, other)
            pulled = (mean * left).sum(-1, keepdim=True) * self.input_mean
            pushed = (self.input_mean * right).sum(-1, keepdim=True) * mean
            if variance is not None and self.input_variance is not None:
                pulled = pulled + 2.0 * self.input_variance * self._apply_transposed(variance * left)
                pushed = pushed + 2.0 * variance * self._apply(self.input_variance * right)
            for other in reversed(after):
                pulled = reflect(pulled, other)
            for other in before:
                pushed = reflect(pushed, other)
            gradient = -2.0 * (pulled + pushed).sum(1)
            gradients.append(gradient - (gradient * normal).sum(-1, keepdim=True) * normal)
        return tuple(gradients)

    def _apply(self, vectors: Tensor) -> Tensor:
        for normal in reversed(self.normals):
            vectors = reflect(vectors, normal)
        return vectors

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        for normal in self.normals:
            vectors = reflect(vectors, normal)
        return vectors

    def _spread(self, variance: Tensor, read: Sequence[Tensor], write: Sequence[Tensor]) -> Tensor:
        """T∘T times each row, or its transpose with the pairs exchanged."""
        spread = variance * self.kept
        for inner, outer in zip(read, write, strict=True):
            spread = spread + (variance * inner).sum(-1, keepdim=True) * outer
        return spread


class PBPMV(PBP):
    """R networks by PBP_MV; as `PBP`, whose means and variances are now those of C.

    One orthogonal matrix is made of `reflections`. `rotation_lr` is Adam's step size for their normals, times `anneal`,
    which should fall to 0: the normals have no posterior, and what they still jitter at the end is error.

    Attributes:
        normals: For each rotation, in the order of the network, its unit vectors `[R, k]`.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int = 1,
        *,
        replicas: int,
        generators: Sequence[torch.Generator],
        reflections: int = 2,
        rotation_lr: float = 1e-3,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if reflections < 1 or not rotation_lr > 0.0:
            raise ValueError(
                f"reflections must be at least 1 and rotation_lr positive; got {reflections} and {rotation_lr}: "
                "for no rotations use PBP"
            )
        super().__init__(inputs, hidden, outputs, replicas=replicas, generators=generators, device=device, dtype=dtype)
        self.rotation_lr = rotation_lr
        # A rotation of one output would be a sign.
        sizes = [size for fan_out, fan_in in self.shapes for size in (fan_in, fan_out) if size > 1]
        self.normals = [[self._normal(generators, size) for _ in range(reflections)] for size in sizes]
        self.averages = [torch.zeros_like(normal) for normal in itertools.chain(*self.normals)]
        self.squares = [torch.zeros_like(average) for average in self.averages]
        self.steps = torch.zeros(replicas, dtype=dtype, device=self.device)

    def _normal(self, generators: Sequence[torch.Generator], size: int) -> Tensor:
        draws = []
        for generator in generators:
            draw = torch.randn(size, dtype=self.dtype, device=generator.device, generator=generator)
            draws.append((draw / torch.linalg.vector_norm(draw)).to(self.device))
        return torch.stack(draws)

    def _maps(self) -> list[Map]:
        rotations = iter([Rotation(normals) for normals in self.normals])
        maps: list[Map] = []
        for mean, variance in zip(self.means, self.variances, strict=True):
            maps += [Constant(), next(rotations), Linear(mean, variance)]
            if mean.shape[1] > 1:
                maps.append(next(rotations))
            maps.append(Rectifier())
        return maps[:-1]

    def _update_(self, maps: Sequence[Map], gradients: Sequence[tuple[Tensor, ...]]) -> None:
        """C as in PBP; the normals by Adam, uphill, and back to the sphere."""
        super()._update_(maps, gradients)
        self.steps.add_(1.0)
        rotations = [parts for entry, parts in zip(maps, gradients, strict=True) if isinstance(entry, Rotation)]
        by_normals = itertools.chain(*rotations)
        correction = (1.0 - _DECAY_SQUARE**self.steps).sqrt() / (1.0 - _DECAY_MEAN**self.steps)
        rate = (self.rotation_lr * self.anneal * correction)[:, None]
        state = zip(itertools.chain(*self.normals), self.averages, self.squares, by_normals, strict=True)
        for normal, average, square, gradient in state:
            average.lerp_(gradient, 1.0 - _DECAY_MEAN)
            square.lerp_(gradient.square(), 1.0 - _DECAY_SQUARE)
            moved = normal + rate * average / (square.sqrt() + _EPSILON)
            normal.copy_(moved * moved.square().sum(-1, keepdim=True).rsqrt())

    def tensors(self) -> dict[str, Tensor]:
        """PBP's state, the normals and Adam's averages."""
        state = super().tensors() | {"rotation_steps": self.steps}
        normals = list(itertools.chain(*self.normals))
        for name, parts in (("normal", normals), ("average", self.averages), ("square", self.squares)):
            state |= {f"{name}.{index}": part for index, part in enumerate(parts)}
        return state
