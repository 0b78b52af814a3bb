"""What a covariance family says about itself: how blocks are formed, measured, kept and shown, and what they cost.

A family is one module that registers an object of a `Family` class under a name. No other package asks which family it
has: it asks the family. The tensor algebra of a family is in its records (`families.base`).
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor

from noisygrad.families.base import DampingMode, Precision, Prior, Statistics
from noisygrad.families.units import Span, Unit

Layout = Literal["matrix", "memory", "rows"]
"""How a block's vector lies: as matrices [W | b] row by row; as the parameters lie in memory, in any order; or
parameter after parameter, each row by row."""
Reads = Literal["rows", "squares", "moments", "basis"]
"""What `measure` reads of a pass: per-example gradients, sums of their squares, second moments of both sides, or these
and the sums of squares in the current basis (`left`, `right` of the statistics)."""
Record = TypeVar("Record", bound=Statistics)
PrecisionOf = Callable[[str], float]
"""From the name of a parameter to the precision 1/η of its prior."""


@dataclass(frozen=True)
class Part:
    """A block to be: its name, its family and its layers, with a note on some of them for the table of coverage."""

    name: str
    family: Family
    units: tuple[Unit, ...]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A part of a block that is independent of the rest, with its P and Γ: what a summary shows in one line."""

    name: str | None
    """None for the block's own."""
    units: tuple[Unit, ...]
    start: int
    """Where its weights begin in the block's vector."""
    statistics: Statistics
    precision: Precision
    prior: Prior


class Family(ABC):
    """One covariance structure."""

    name: ClassVar[str]
    layout: ClassVar[Layout] = "matrix"
    reads: ClassVar[Reads] = "rows"
    damping_modes: ClassVar[tuple[DampingMode, ...]] = ("factored",)
    """What `damping_mode` may be."""
    stacking: ClassVar[Mapping[str, tuple[int, ...]] | None] = None
    """If a GPU may put blocks of equal shape together (one layer each, whose vectors are one matrix): by the name of a
    factor's tensor the dimensions that count inputs, which it may pad. None if it may not."""
    proper_prior: ClassVar[bool] = False
    """Whether the prior of every weight must have a finite variance."""
    traceable_modes: ClassVar[tuple[DampingMode, ...]] = ("factored", "exact")
    """In which modes a factorisation can be compiled and captured: a Cholesky can, an `eigh` cannot."""
    factors_wait: ClassVar[bool] = True
    """Whether a factorisation reads numbers on the host, so that a CUDA graph cannot hold it."""

    @abstractmethod
    def partition(self, units: Sequence[Unit], every_unit: Sequence[Unit]) -> Iterator[Part]:
        """All `units` of one param group in blocks; `every_unit` are those of the whole model, in its order."""

    @abstractmethod
    def identity(self, prior: Prior) -> Statistics:
        """The statistics at the start, F̄ = I, of the size, type and device of the block's prior."""

    @abstractmethod
    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: Statistics) -> Statistics:
        """The statistics of one pass, a `curvature.passes.Pass` by name of the unit, for an average now `current`.

        A layer that took no part is not in `passes`: it has no gradient, and says nothing of its inputs.
        """

    @abstractmethod
    def prior(self, span: Span, precision_of: PrecisionOf, like: Tensor) -> Prior:
        """The prior with these precisions, per parameter; a tensor of the type and on the device of `like`."""

    @abstractmethod
    def cost(self, units: Sequence[Unit]) -> float:
        """The work of a factorisation, up to a constant: by it ranks share the blocks."""

    @abstractmethod
    def pieces(self, units: Sequence[Unit], statistics: Statistics) -> list[tuple[str, Tensor]]:
        """Tensors that are finite if all statistics are, each with the name of the layer that it is about."""

    def unmeasured(self, current: Record) -> Record:
        """What a pass says in which none of the layers took part: 0, but for moments called `inputs`, which stay."""
        averages = current.averages()
        kept = {name: tensor.clone() for name, tensor in averages.items() if name.startswith("inputs")}
        nothing = {name: torch.zeros_like(tensor) for name, tensor in averages.items() if name not in kept}
        return current.with_tensors(current.tensors() | kept | nothing)

    def notes(self, units: Sequence[Unit], statistics: Statistics) -> dict[str, str]:
        """What the statistics say about single layers, for the table of coverage."""
        return {}

    def split(
        self, units: Sequence[Unit], statistics: Statistics, precision: Precision, prior: Prior
    ) -> Iterator[Piece]:
        """The independent pieces of a block."""
        yield Piece(None, tuple(units), 0, statistics, precision, prior)

    def fitted_prior_shapes(self, statistics: Statistics) -> dict[str, torch.Size]:
        """The shapes of the tensors of `Precision.as_prior()`, for a file that is read."""
        return {name: tensor.shape for name, tensor in statistics.tensors().items()}

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        return family_named, (self.name,)  # a copy of a posterior, or of a fitted estimator, has the same family

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<family {self.name}>"


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which they were registered."""


def register_family(family: Family) -> Family:
    """Make a family known by its name, so that optimisers, the replica engine and files find it.

    Raises:
        TypeError: It is not an object of a `Family` class, or the class lacks a part of the contract.
        ValueError: There is a family of that name.
    """
    if inspect.isclass(family):
        missing = sorted(getattr(family, "__abstractmethods__", ()))
        advice = f"it lacks {', '.join(missing)}" if missing else f"register an object of it: {family.__name__}()"
        raise TypeError(f"register_family takes an object, and was given the class {family.__name__}: {advice}")
    if not isinstance(family, Family):
        raise TypeError(f"a family is an object of a subclass of Family, not a {type(family).__name__}")
    if not isinstance(getattr(family, "name", None), str) or not re.fullmatch(r"[\w-]+", family.name):
        raise TypeError(
            f"the family {type(family).__name__} has no name of letters, digits and dashes: give the class "
            '`name = "..."`'
        )
    for part, known in (("layout", get_args(Layout)), ("reads", get_args(Reads))):
        if getattr(family, part) not in known:
            raise TypeError(
                f"the family {family.name!r} has {part} = {getattr(family, part)!r}; it may be {', '.join(known)}"
            )
    for part in ("damping_modes", "traceable_modes"):
        if not isinstance(found := getattr(family, part), tuple) or not set(found) <= set(get_args(DampingMode)):
            raise TypeError(f"the family {family.name!r} has {part} = {found!r}; it must be a tuple of damping modes")
    for method in sorted(Family.__abstractmethods__):
        arguments = list(inspect.signature(getattr(Family, method)).parameters)[1:]
        try:
            inspect.signature(getattr(family, method)).bind(*arguments)
        except TypeError as error:
            raise TypeError(
                f"{method} of the family {family.name!r} must take {', '.join(arguments)}; {error}"
            ) from None
    if family.name in FAMILIES:
        raise ValueError(f"there is a family {family.name!r} already ({type(FAMILIES[family.name]).__name__})")
    FAMILIES[family.name] = family
    return family


def family_named(name: str) -> Family:
    """The family of this name; ValueError, with those that there are, for another."""
    if name not in FAMILIES:
        raise ValueError(
            f"there is no covariance family called {name!r}; there are {', '.join(FAMILIES)}. Register one of your own "
            'before it is used, and name it in the optimiser\'s class: family = "..."'
        )
    return FAMILIES[name]


def column_precisions(unit: Unit, span: Span, precision_of: PrecisionOf, like: Tensor) -> Tensor:
    """The prior's precision of each column of [W | b], `[*batch, inputs]`."""
    values = like.new_zeros(*span.batch, unit.inputs)
    for slot in unit.slots:
        values[..., slot.start : slot.stop] = precision_of(slot.parameter)
    return values


def weight_precisions(span: Span, precision_of: PrecisionOf, like: Tensor) -> Tensor:
    """The prior's precision of each weight, parameter after parameter, `[*batch, n]`."""
    flat = [
        torch.full((unit.rows * (slot.stop - slot.start),), precision_of(slot.parameter), dtype=like.dtype)
        for unit in span.units
        for slot in unit.slots
    ]
    return torch.cat(flat).to(like.device).repeat(*span.batch, 1)
