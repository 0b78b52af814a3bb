"""Errors that say which layers they are about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import FactorisationError


def format_names(names: Sequence[str]) -> str:
    """The names, or the first six and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@contextmanager
def naming_layers(units: Sequence[Unit]) -> Iterator[None]:
    """A FactorisationError inside names the layers at fault, or all of these where it may be any."""
    try:
        yield
    except FactorisationError as error:
        stops = list(accumulate(unit.size for unit in units))
        names = [
            unit.name
            for unit, stop in zip(units, stops, strict=True)
            if not error.weights or any(stop - unit.size <= place < stop for place in error.weights)
        ]
        raise FactorisationError(f"layer {format_names(names)}: {error}", error.condition, error.weights) from error
