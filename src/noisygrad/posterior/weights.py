"""One flat vector of weights and its views in the shapes of the parameters.

A copy between the model and the flat vector is one `foreach` call over views, in either direction; nothing of the model
is replaced, so optimiser, DDP and compiled code keep the parameters that they know. A GPU copies a list of tensors to
another in one launch only where the two agree in their strides, else in one launch for each tensor. Where they do not
agree, as with replicas, there is a staging copy in between, one gather away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from noisygrad.posterior.structure import Structure

DEVICES = {"cuda"}
"""Where the number of launches counts; a CPU copies tensor by tensor in any case."""


class ModelParts:
    """The modules and parameters of a model, to see whether any was replaced, added, removed, frozen or unfrozen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.accept()

    def accept(self) -> None:
        """Take the model as it is now."""
        self._owners = [held for module in self._model.modules() for held in (module._modules, module._parameters)]
        self._count = sum(map(len, self._owners))
        self._parts = [(held, name, part) for held in self._owners for name, part in held.items()]
        parameters = list(self._model.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def changed(self) -> bool:
        """Whether any was."""
        for held, name, part in self._parts:  # in every step: `all` of a generator takes twice as long
            if held.get(name) is not part:
                return True
        for parameter in self._trained:
            if not parameter.requires_grad:
                return True
        for parameter in self._frozen:
            if parameter.requires_grad:
                return True
        return sum(map(len, self._owners)) != self._count


class ParameterViews:
    """Detached views of the (parts of) parameters in the order of the flat vector.

    One object for all flat vectors of an optimiser, which notice together when a parameter has moved in memory.
    """

    def __init__(self, structure: Structure) -> None:
        parameters = structure.parameters
        self._parts = [(slot, parameters[slot.parameter]) for unit in structure.units for slot in unit.slots]
        self._lead = len(structure.replicas)
        self._storages: list[int] = []
        self._staging: dict[tuple[torch.dtype, torch.device], Staging | None] = {}
        self.generation = 0
        """Counts how often parameters were found in another place of memory."""
        self.known: list[Tensor] = []
        self.current()

    def current(self) -> list[Tensor]:
        """The views, rebuilt if a parameter's storage was replaced (`model.to`, `p.data = …`) since."""
        storages = [parameter.data_ptr() for _, parameter in self._parts]
        if storages != self._storages:
            self._storages = storages
            self.generation += 1
            self._staging.clear()
            self.known = [slot.of(parameter.detach(), self._lead) for slot, parameter in self._parts]
        return self.known

    def staging(self, flat: Tensor, views: Sequence[Tensor]) -> Staging | None:
        """What lies between the parameters and a flat vector; None where they are rather copied directly.

        One for all flat vectors of a type, since what is in it does not outlast a copy. It stays as long as the
        parameters do: recorded graphs know its memory.
        """
        if flat.device.type not in DEVICES:
            return None
        key = (flat.dtype, flat.device)
        if key not in self._staging:
            alike = all(own.stride() == view.stride() for own, view in zip(self.known, views, strict=True))
            self._staging[key] = None if alike or not flat.is_contiguous() else Staging(self.known, flat, views)
        return self._staging[key]

    def __getstate__(self) -> dict[str, object]:
        """Without the staging, which is rebuilt where it is needed."""
        return {**vars(self), "_staging": {}}


class Staging:
    """The numbers of a flat vector parameter after parameter, each in its own order of memory: one gather away.

    `parameters` are those that are to be copied, with their strides; `views` is the flat vector in their shapes.
    """

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor, views: Sequence[Tensor]) -> None:
        self._numbers = torch.empty_like(flat).view(-1)
        places = torch.arange(flat.numel(), dtype=torch.int32)
        gather = torch.empty_like(places)
        self.views: list[Tensor] = []
        start = 0
        for parameter, view in zip(parameters, views, strict=True):
            # The strides of a dense tensor are kept by `empty_like`; others have none to keep.
            strides = torch.empty_like(parameter, device="meta").stride()
            self.views.append(self._numbers.as_strided(parameter.shape, strides, start))
            offset = view.storage_offset() - flat.storage_offset()
            gather.as_strided(view.shape, view.stride(), offset).copy_(
                places.as_strided(parameter.shape, strides, start)
            )
            start += parameter.numel()
        self._gather = gather.to(flat.device)
        self._scatter = torch.empty_like(places).index_copy_(0, gather.long(), places).to(flat.device)

    def copy_to_(self, flat: Tensor) -> None:
        """What is here into a flat vector."""
        torch.index_select(self._numbers, 0, self._gather, out=flat.view(-1))

    def filled_from(self, flat: Tensor) -> list[Tensor]:
        """The views, which now hold the numbers of a flat vector."""
        torch.index_select(flat.view(-1), 0, self._scatter, out=self._numbers)
        return self.views


class FlatWeights:
    """A vector `[*replicas, n]` in the order of the blocks, seen as the model's parameters."""

    def __init__(self, structure: Structure, flat: Tensor, parameters: ParameterViews | None = None) -> None:
        self.flat = flat
        self._shared = parameters
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
    def parameters(self) -> ParameterViews:
        """Made where they are first needed: they keep the parameters' memory alive."""
        return ParameterViews(self._structure) if self._shared is None else self._shared

    @classmethod
    def zeros(
        cls,
        structure: Structure,
        dtype: torch.dtype,
        device: torch.device,
        parameters: ParameterViews | None = None,
    ) -> FlatWeights:
        """A new vector of zeros."""
        flat = torch.zeros(*structure.replicas, structure.size, dtype=dtype, device=device)
        return cls(structure, flat, parameters)

    def read_parameters_(self) -> None:
        """Parameters → flat."""
        self._read_(self.parameters.current(), self._places())

    def write_parameters_(self) -> None:
        """Flat → parameters, in place."""
        staging = self.parameters.staging(self.flat, self._views)
        views = self._views if staging is None else staging.filled_from(self.flat)
        torch._foreach_copy_(self.parameters.known, views)
        torch.clear_autocast_cache()  # else a region of autocast goes on with narrow copies of other weights

    def read_gradients_(self) -> None:
        """Gradients of the parameters → flat; a parameter without one counts as zero."""
        gradients = [self._structure.parameters[slot.parameter].grad for slot in self._slots]
        places = self._places()
        if any(g is None or g.is_sparse or slot.rows for g, slot in zip(gradients, self._slots, strict=True)):
            kept: list[tuple[Tensor, Tensor]] = []
            for slot, place, gradient in zip(self._slots, places, gradients, strict=True):
                if gradient is None:
                    place.zero_()
                elif gradient.is_sparse:
                    raise ValueError(f"parameter {slot.parameter!r} has a sparse gradient, which is not supported")
                else:
                    kept.append((slot.of(gradient, self._lead), place))
            gradients, places = [gradient for gradient, _ in kept], [place for _, place in kept]
        self._read_(gradients, places)  # type: ignore[arg-type]

    def _places(self) -> list[Tensor]:
        """Where parameters and their gradients are copied to: here, or where they are gathered from."""
        staging = self.parameters.staging(self.flat, self._views)
        return self._views if staging is None else staging.views

    def _read_(self, tensors: list[Tensor], places: list[Tensor]) -> None:
        if places:
            torch._foreach_copy_(places, tensors)
        if (staging := self.parameters.staging(self.flat, self._views)) is not None:
            staging.copy_to_(self.flat)

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


def parameter_order(structure: Structure) -> Tensor:
    """For each entry of `torch.nn.utils.parameters_to_vector`, where it lies in the flat vector (one replica)."""
    where = torch.arange(structure.size).expand(*structure.replicas, -1).contiguous()
    first = (0,) * len(structure.replicas)
    places = FlatWeights(structure, where).as_dict(like_parameters=False)
    return torch.cat([place[first].flatten().cpu() for place in places.values()])
