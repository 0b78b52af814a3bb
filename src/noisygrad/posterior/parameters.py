"""The parameters of a model as tensors to copy from and to, and on a GPU as one piece of memory.

A GPU copies a list of tensors to another in one launch only where the two agree in their strides, else in one launch
for each tensor. Parameters with replicas, for example, do not agree with the flat vector's views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from noisygrad.curvature.units import Slot

DEVICES = {"cuda"}
"""Where the number of launches counts; a CPU copies tensor by tensor in any case."""


class ParameterViews:
    """Detached views of the (parts of) parameters in the order of the flat vector."""

    def __init__(self, parts: Sequence[tuple[Slot, nn.Parameter]], lead: int) -> None:
        self._parts = parts
        self._lead = lead
        self._storages: list[int] = []
        self._staging: dict[tuple[torch.dtype, torch.device], Staging | None] = {}
        self.generation = 0
        self.known: list[Tensor] = []
        self.current()

    def current(self) -> list[Tensor]:
        """The views, made anew if a parameter's storage was replaced (`model.to`, `p.data = …`) since."""
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
        """Without the staging, which is made anew where it is needed."""
        return {**vars(self), "_staging": {}}


class Staging:
    """The numbers of a flat vector parameter after parameter, each in its own order of memory: one gather away.

    Args:
        parameters: Those that are to be copied, with the strides that they have.
        flat: The flat vector, or one like it.
        views: Its views in the shapes of the parameters.
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
