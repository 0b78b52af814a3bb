"""What a model is called with: a tensor, several in a tuple or list, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""`model(x)`, `model(*x)` or `model(**x)`."""


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; only on the way to a GPU is it right not to wait for it. TypeError for anything else."""
    return _tensor(tensor).to(device, non_blocking=device.type == "cuda")


def moved_inputs(x: Inputs, device: torch.device) -> Inputs:
    """The same on a device, as a tensor, a tuple or a dictionary; raises TypeError where they are no tensors."""
    call = Call.of(x).moved(device)
    return call.args[0] if isinstance(x, Tensor) else call.kwargs if isinstance(x, Mapping) else call.args


@dataclass(frozen=True)
class Call:
    """The arguments of one call; a tensor without dimensions belongs to all examples."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]

    @classmethod
    def of(cls, x: Inputs) -> Call:
        """The call that some inputs stand for; raises TypeError where they are no tensors."""
        if isinstance(x, Tensor):
            return cls((x,), {})
        if isinstance(x, Mapping):
            return cls((), {str(name): _tensor(value, f" under {name!r}") for name, value in x.items()})
        if isinstance(x, tuple | list) and any(isinstance(value, Tensor) for value in x):
            return cls(tuple(_tensor(value, f" in place {number}") for number, value in enumerate(x)), {})
        raise _unsuitable(x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The call with every tensor changed."""
        return Call(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})

    def moved(self, device: torch.device) -> Call:
        """The call with its tensors on the device."""
        return self.map(lambda tensor: moved(tensor, device))

    def __call__(self, model: Callable[..., Any]) -> Any:
        """What the model makes of it."""
        return model(*self.args, **self.kwargs)

    def examples(self, dim_of: Callable[[Tensor], int]) -> int:
        """How many there are; `dim_of` says which dimension of a tensor counts them. Raises where tensors disagree."""
        counts = {tensor.shape[dim_of(tensor)] for tensor in (*self.args, *self.kwargs.values()) if tensor.dim()}
        if len(counts) > 1:
            raise ValueError(
                f"the inputs have {', '.join(map(str, sorted(counts)))} examples: several inputs need as many each"
            )
        return counts.pop() if counts else 0

    def chosen(self, rows: slice, dim_of: Callable[[Tensor], int]) -> Call:
        """Some examples of all tensors."""
        return self.map(lambda t: t[(slice(None),) * dim_of(t) + (rows,)] if t.dim() else t)

    def batches(self, size: int, dim_of: Callable[[Tensor], int]) -> Iterator[Call]:
        """So many examples at a time; where there are none, all of none."""
        for first in range(0, max(1, self.examples(dim_of)), size):
            yield self.chosen(slice(first, first + size), dim_of)


def _tensor(value: object, where: str = "") -> Tensor:
    if not isinstance(value, Tensor):
        raise _unsuitable(value, where)
    return value


def _unsuitable(value: object, where: str = "") -> TypeError:
    return TypeError(f"data must be tensors, got {type(value).__name__}{where}: torch.as_tensor makes one")
