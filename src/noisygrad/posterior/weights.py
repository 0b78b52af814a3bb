"""One flat vector of weights and its views in the shapes of the parameters.

A copy between the model and the flat vector is one `foreach` call over views, in either direction, on a GPU perhaps
with a gather (`parameters.Staging`); nothing of the model is replaced, so optimiser, DDP and compiled code keep the
parameters that they know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from noisygrad.posterior.parameters import ParameterViews
from noisygrad.posterior.structure import Structure


class FlatWeights:
    """A vector `[*replicas, n]` in the order of the blocks, seen as the model's parameters."""

    def __init__(self, structure: Structure, flat: Tensor) -> None:
        self.flat = flat
        self._structure = structure
        self._lead = len(structure.replicas)
        self._slots = []
        self._views: list[Tensor] = []
        shapes = structure.shapes
        start = 0
        for unit in structure.units:
            for slot, view in unit.views(flat[..., start : start + unit.size], shapes):
                self._slots.append(slot)
                self._views.append(view)
            start += unit.size

    @cached_property
    def _parameters(self) -> ParameterViews:
        """Made where they are first needed: they keep the parameters' memory alive."""
        return self._structure.parameter_views(self._slots)

    @classmethod
    def zeros(cls, structure: Structure, dtype: torch.dtype, device: torch.device) -> FlatWeights:
        """A new vector of zeros."""
        return cls(structure, torch.zeros(*structure.replicas, structure.size, dtype=dtype, device=device))

    def find_parameters(self) -> None:
        """Notice parameters that were moved in memory since: `structure.generation` then counts."""
        self._parameters.current()

    def read_parameters_(self) -> None:
        """Parameters → flat."""
        self._read_(self._parameters.current(), self._places())

    def write_parameters_(self) -> None:
        """Flat → parameters, in place."""
        staging = self._parameters.staging(self.flat, self._views)
        views = self._views if staging is None else staging.filled_from(self.flat)
        torch._foreach_copy_(self._parameters.known, views)
        torch.clear_autocast_cache()  # else a region of autocast goes on with narrow copies of other weights

    def read_gradients_(self) -> None:
        """Gradients of the parameters → flat; a parameter without one counts as zero."""
        gradients = [self._structure.parameters[slot.parameter].grad for slot in self._slots]
        places = self._places()
        if any(
            gradient is None or gradient.is_sparse or slot.rows
            for gradient, slot in zip(gradients, self._slots, strict=True)
        ):
            gradients, places = self._usual_gradients(gradients, places)
        self._read_(gradients, places)  # type: ignore[arg-type]

    def _places(self) -> list[Tensor]:
        """Where parameters and their gradients are copied to: here, or where they are gathered from."""
        staging = self._parameters.staging(self.flat, self._views)
        return self._views if staging is None else staging.views

    def _read_(self, tensors: list[Tensor], places: list[Tensor]) -> None:
        if places:
            torch._foreach_copy_(places, tensors)
        if (staging := self._parameters.staging(self.flat, self._views)) is not None:
            staging.copy_to_(self.flat)

    def _usual_gradients(
        self, gradients: Sequence[Tensor | None], places: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Gradients and places where some are missing or belong to a part of a parameter."""
        kept: list[tuple[Tensor, Tensor]] = []
        for slot, place, gradient in zip(self._slots, places, gradients, strict=True):
            if gradient is None:
                place.zero_()
            elif gradient.is_sparse:
                raise ValueError(f"parameter {slot.parameter!r} has a sparse gradient, which is not supported")
            else:
                kept.append((slot.of(gradient, self._lead), place))
        return [gradient for gradient, _ in kept], [place for _, place in kept]

    def as_dict(self, *, like_parameters: bool = True) -> dict[str, Tensor]:
        """A copy as parameter name → tensor, in the parameters' dtype unless `like_parameters` is off."""
        tensors = {
            name: torch.empty_like(p, dtype=p.dtype if like_parameters else self.flat.dtype, requires_grad=False)
            for name, p in self._structure.parameters.items()
        }
        for slot, view in zip(self._slots, self._views, strict=True):
            slot.of(tensors[slot.parameter], self._lead).copy_(view)
        return tensors

    @torch.no_grad()
    def load_dict_(self, tensors: dict[str, Tensor]) -> None:
        """Parameter name → tensor into the flat vector."""
        for slot, view in zip(self._slots, self._views, strict=True):
            view.copy_(slot.of(tensors[slot.parameter], self._lead))

    @torch.no_grad()
    def fill_centres_(self) -> None:
        """The centre of each parameter's prior: 0, or 1 for the scale of a norm layer."""
        for slot, view in zip(self._slots, self._views, strict=True):
            view.fill_(slot.centre)

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """The flat vector after a round trip through the parameters' own types."""
        rounded = torch.empty_like(self.flat)
        FlatWeights(self._structure, rounded).load_dict_(self.as_dict())
        return rounded


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again outside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
