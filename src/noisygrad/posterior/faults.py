"""Errors that say what was given, or which layers they are about."""

import warnings
from collections.abc import Collection, Sequence
from itertools import accumulate
from numbers import Integral

from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import FactorisationError


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raise a ValueError that names `value` if it is not among those that are known."""
    if value not in tuple(known):
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def whole_number(name: str, value: int, least: int = 1) -> int:
    """The value, if it is an integer of at least `least`; else a ValueError that names it."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def format_names(names: Sequence[str]) -> str:
    """The names, or the first six and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def named_error(error: FactorisationError, units: Sequence[Unit]) -> FactorisationError:
    """The error with the names of the layers at fault, or of all of these where it may be any."""
    stops = list(accumulate(unit.size for unit in units))
    names = [
        unit.name
        for unit, stop in zip(units, stops, strict=True)
        if not error.weights or any(stop - unit.size <= place < stop for place in error.weights)
    ]
    return FactorisationError(f"layer {format_names(names)}: {error}", error.condition, error.weights)


def warn_repaired(found: Sequence[str], units: Sequence[Unit], told: set[str]) -> None:
    """A warning of repairs in factors of these layers, by their names; of each layer only once."""
    names = format_names([unit.name for unit in units])
    if names not in told:
        told.add(names)
        warnings.warn(f"layer {names}: {found[0]}", RuntimeWarning, stacklevel=3)
