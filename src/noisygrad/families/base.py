"""The skeleton that every covariance family fills in.

A family describes the Fisher F̄ of one block of n weights. Three records, all dataclasses of tensors:

- `Statistics`: the moments whose moving average defines F̄; updated in place, so a CUDA graph can capture it.
- `Prior`: the prior's precision, in the structure that the family can add to F̄.
- `Precision`: P = F̄ + Γ + γ_ex I, factorised. Γ is the prior's precision in units of the Fisher, (λ/N) times it.

All vectors are `[..., n]` with any leading (replica, group) dimensions `...`; a layer's weights are its matrix
[W | b], out × (in+1), flattened row by row, so that a Kronecker block is outputs ⊗ inputs in `torch.kron`'s order.
Results per block (`logdet`, `quad`, `trace`) have shape `[...]`. The posterior's covariance is (λ/N) P⁻¹; the factor
λ/N is applied by the caller. See `docs/conventions.md`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

DampingMode = Literal["factored", "exact"]
"""How a Kronecker block adds the prior: into each factor (eq. 11 of the paper) or exactly, in the eigenbasis."""


def constant_rows(value: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of one number throughout, which is in memory once for each row."""
    return like.new_full((*shape[:-1], 1), value).expand(*shape)


def has_constant_rows(tensor: Tensor) -> bool:
    """Whether each row is known to be of one number throughout."""
    return tensor.stride(-1) == 0


def matrix_of(function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The matrix `[..., n, n]` of a linear function of vectors shaped like `like`, from each unit vector."""
    size = like.shape[-1]
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    columns = function(eye.reshape(size, *(1,) * (like.dim() - 1), size).expand(size, *like.shape))
    return columns.movedim(0, -1)


class TensorMap(Protocol):
    """A function from tensor to tensor."""

    def __call__(self, tensor: Tensor, /) -> Tensor:
        """Apply it."""


@dataclasses.dataclass
class TensorRecord:
    """A dataclass whose fields are tensors, optional tensors or tuples of tensors; other fields are settings."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a dotted name (`inputs`, `cross.0`), in a fixed order."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                found[field.name] = value
            elif isinstance(value, tuple):
                found |= {f"{field.name}.{i}": item for i, item in enumerate(value) if isinstance(item, Tensor)}
        return found

    def settings(self) -> dict[str, Any]:
        """The fields that are not tensors."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: v for name, v in values.items() if v is not None and not isinstance(v, Tensor | tuple)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Self:
        """The record whose `tensors()` and `settings()` these are."""
        values: dict[str, Any] = dict(settings)
        for field in dataclasses.fields(cls):
            if field.name in tensors:
                values[field.name] = tensors[field.name]
            elif field.name not in settings:
                numbered = [name for name in tensors if name.startswith(f"{field.name}.")]
                values[field.name] = tuple(tensors[f"{field.name}.{index}"] for index in range(len(numbered)))
        return cls(**values)

    @torch.no_grad()
    def copy_(self, other: Self) -> Self:
        """Overwrite the tensors in place with those of a record of the same shapes."""
        theirs = other.tensors()
        for name, tensor in self.tensors().items():
            tensor.copy_(theirs[name])
        return self

    def map(self, function: TensorMap) -> Self:
        """A record with `function` applied to every tensor."""
        changes: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changes[field.name] = function(value)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(function(item) if isinstance(item, Tensor) else item for item in value)
        return dataclasses.replace(self, **changes)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """A record with other tensors, by the names that `tensors()` gives them."""
        names = iter(self.tensors())
        return self.map(lambda _: tensors[next(names)])

    def clone(self) -> Self:
        """A deep copy, detached from any graph."""
        return self.map(lambda tensor: tensor.detach().clone())

    def unpacked(self) -> TensorRecord:
        """The same with every matrix as one tensor (`packed`): what is shown and saved."""
        return self

    def load_unpacked_(self, unpacked: TensorRecord) -> None:
        """Overwrite the tensors in place with those of an `unpacked()` record."""
        assert isinstance(unpacked, type(self))
        self.copy_(unpacked)


@dataclasses.dataclass
class Prior(TensorRecord, ABC):
    """A prior's precision in the structure of one family."""

    @property
    def is_diagonal(self) -> bool:
        """Whether weights are independent under it; a family with both kinds has a field `diagonal`."""
        return bool(self.settings().get("diagonal", True))

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same prior with its precision multiplied by `factor`."""

    def quad(self, vector: Tensor) -> Tensor:
        """vᵀ Γ v, shape `[...]`."""
        return (vector * self.times(vector)).sum(-1)

    @abstractmethod
    def times(self, vector: Tensor) -> Tensor:
        """Γ v, shape `[..., n]`."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |Γ|, shape `[...]`; −inf where the prior is improper."""


@dataclasses.dataclass
class Statistics(TensorRecord, ABC):
    """The moments of one block, as a moving average or as measured on one batch."""

    def averages(self) -> dict[str, Tensor]:
        """The tensors that are moving averages, by name: all, unless a family says otherwise."""
        return self.tensors()

    def map_averages(self, function: TensorMap) -> Self:
        """A record with `function` applied to the moving averages, and all else as it is."""
        return self.with_tensors(self.tensors() | {name: function(t) for name, t in self.averages().items()})

    @torch.no_grad()
    def update_(self, measured: Self, decay: Tensor | float) -> Self:
        """In place: decay · self + (1 − decay) · measured, for every moment with the same weight."""
        new = measured.averages()
        for name, tensor in self.averages().items():
            tensor.mul_(decay).add_(new[name] * (1.0 - decay))
        return self

    @torch.no_grad()
    def sum_losses_(self, own: Tensor | float, other: Self, weight: Tensor | float) -> None:
        """In place: own · F + weight · F_other, for two losses of the same examples.

        So moments of inputs are those of either: whichever saw the layer. All others are linear in F.
        """
        theirs = other.averages()
        for name, tensor in self.averages().items():
            if "inputs" in name:
                tensor.copy_(torch.where(theirs[name] == 0, tensor, theirs[name]))
            else:
                tensor.mul_(own).add_(theirs[name] * weight)

    @torch.no_grad()
    def keep_inputs_(self, current: Self, takes_part: Tensor) -> Self:
        """In place: moments of inputs as in `current` where `takes_part`, `[..., 1, 1]`, is False: nothing counted."""
        kept = current.averages()
        for name, tensor in self.averages().items():
            if "inputs" in name:
                tensor.copy_(torch.where(takes_part, tensor, kept[name]))
        return self

    def basis_tensors(self) -> dict[str, Tensor]:
        """The tensors that `refresh_basis_` changes, by name: none, unless a family says otherwise."""
        return {}

    def refresh_basis_(self, prior: Any) -> None:
        """In place, before a factorisation: what is no average, and follows from the averages, is rebuilt."""

    @torch.no_grad()
    def add_floor_(self, floor: Tensor | float) -> None:
        """In place: F + floor · I, or F + floor · I ⊗ A/a of a Kronecker product, a being the mean of A's diagonal.

        So the floor of S ⊗ A does not depend on how the Fisher is divided between S and A. Moments of other names need
        an `add_floor_` of their own: TypeError.
        """
        found = self.tensors()
        if not any(name.startswith(("fisher", "outputs")) for name in found):
            raise TypeError(
                f"{type(self).__qualname__} has {', '.join(found)}, of which none is called fisher or outputs: define "
                "add_floor_ for fisher_floor"
            )
        for name, tensor in found.items():
            if name.startswith("fisher"):
                tensor.diagonal(dim1=-2, dim2=-1).add_(floor)
            elif name.startswith("outputs"):
                scale = found[name.replace("outputs", "inputs")].diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
                tensor.diagonal(dim1=-2, dim2=-1).add_(floor / scale.clamp(min=torch.finfo(scale.dtype).tiny))

    def with_identity(self, share: Tensor | float) -> Self:
        """(1 − share) F + share · I, moment by moment, as new tensors; others have their own way."""
        found = {name: tensor * (1.0 - share) for name, tensor in self.averages().items()}
        for name, tensor in found.items():
            if name.startswith(("fisher", "inputs", "outputs")):
                tensor.diagonal(dim1=-2, dim2=-1).add_(share)
        return self.with_tensors(self.tensors() | found)

    @abstractmethod
    def determined(self, precision: Any) -> Tensor:
        """tr(F P⁻¹), `[...]`, for a P of the same family: how many weights the data determine.

        Draws from N(μ, (λ/N) P⁻¹) cost λ/2N times as much, in nats for each example, to second order.
        """

    def unpacked(self) -> Statistics:
        """The same with every matrix as one tensor."""
        return self

    @abstractmethod
    def factorise(self, prior: Any, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = F̄ + Γ + damping · I for a prior Γ of the same family; raises `FactorisationError`, never returns NaN."""

    def factorise_pair(self, prior: Any, damping: float, mode: DampingMode = "factored") -> tuple[Precision, Precision]:
        """(`factorise(prior)`, `factorise(prior, damping)`), without terms that only `quad` and `to_dense` need."""
        return self.factorise(prior, 0.0, mode).drop_terms(), self.factorise(prior, damping, mode).drop_terms()


@dataclasses.dataclass
class Solver(TensorRecord, ABC):
    """What a step of the mean needs of a block."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """P⁻¹ v."""


@dataclasses.dataclass
class Sampler(TensorRecord, ABC):
    """What a draw of the weights needs of a block."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """R z with R Rᵀ = P⁻¹, for standard normal z (or unit vectors, which spell out R)."""

    def perturb(self, mean: Tensor, noise: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Mean + scale · R z, into `out` where it is given."""
        return torch.add(mean, self.sample(noise), alpha=scale, out=out)


@dataclasses.dataclass
class SolverSampler(Solver, Sampler):
    """What a step and a draw need, in one."""


@dataclasses.dataclass
class FactoredCovariance(TensorRecord):
    """(L ⊗ R) diag(1/spectrum) (L ⊗ R)ᵀ of one layer's matrix, outputs ⊗ inputs; without a spectrum, of ones."""

    left: Tensor
    right: Tensor
    spectrum: Tensor | None


@dataclasses.dataclass
class Precision(SolverSampler):
    """P = F̄ + Γ + γ_ex I of one block, factorised: each method is one identity."""

    def drop_terms(self) -> Self:
        """The same without what only `quad`, `to_dense` and `as_prior` need: what an optimiser keeps between steps."""
        return self

    def with_inverses(self) -> Self:
        """The same, prepared for many calls of `solve`."""
        return self

    def solver(self) -> Solver:
        """What many calls of `solve` need, and no more."""
        return self

    def sampler(self) -> Sampler:
        """What many calls of `sample` need, and no more."""
        return self.drop_terms()

    @abstractmethod
    def quad(self, vector: Tensor) -> Tensor:
        """vᵀ P v, shape `[...]`."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |P|, shape `[...]`."""

    @abstractmethod
    def trace(self, prior: Prior) -> Tensor:
        """tr(Γ P⁻¹) for a prior Γ of the same family, shape `[...]`."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """P as a matrix, `[..., n, n]`."""

    def covariance(self, like: Tensor) -> Tensor:
        """P⁻¹ as a matrix `[..., n, n]`, for vectors shaped like `like`: R Rᵀ, what `sample` draws from."""
        root = matrix_of(self.sample, like)
        return root @ root.mT

    def layer_covariance(self) -> FactoredCovariance | Tensor:
        """P⁻¹ in a form that needs no dense matrix: its factors for one layer, or variances `[..., n]`.

        Raises:
            ValueError: This family has no such form.
        """
        raise ValueError(
            "this posterior is not supported here: its covariance must be diagonal or a Kronecker product per layer"
        )

    @abstractmethod
    def as_prior(self) -> Prior:
        """P as the prior of a later fit."""
