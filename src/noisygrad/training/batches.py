"""Batches of an epoch, from tensors in memory or from a loader.

An epoch's order comes from a generator of its own, made from the seed and the epoch's number: a run that is taken up
again sees the batches it would have seen, and replica i those of a lone training with its seed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from noisygrad.kernels.random import epoch_generator
from noisygrad.posterior.inputs import Inputs, moved, moved_inputs

Batch = tuple[Inputs, Tensor, *tuple[Tensor | None, ...]]
"""(x, y), perhaps with weights of examples and a mask of what counts after them, as in `draw.nll`."""
Data = tuple[Tensor, Tensor] | list[Tensor] | Iterable[Any]
"""A pair of tensors (x, y), or anything that yields batches (a DataLoader), with several inputs in place of x."""

_GATHERED_BYTES = 64 << 20
"""How much of a shuffled epoch is copied at a time: one large copy is cheaper than one for each batch."""


class TensorBatches:
    """Batches of two tensors; x and y are `[N, ...]`, or `[*replicas, N, ...]` where replicas are trained at once.

    With replicas each has its own order, and what was shared by all comes out as `[*replicas, batch, ...]`.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch_size: int | None,
        replicas: Sequence[int] = (),
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._lead = len(replicas)
        self._replicas = torch.Size(replicas)
        self.num_data = _examples(x, y, self._replicas)
        self.batch_size = self.num_data if batch_size is None else min(batch_size, self.num_data)
        self._shuffle, self.generator = shuffle, None
        self.settings = {"batch_size": self.batch_size, "num_data": self.num_data}
        self.settings |= {"shuffle": shuffle, "drop_last": drop_last}
        self._x = _in_rows(x, self._replicas, self.num_data, least_dims=self._lead + 2)
        self._y = _in_rows(y, self._replicas, self.num_data, least_dims=self._lead + 1)
        self.device = x.device
        self._length = (math.floor if drop_last else math.ceil)(self.num_data / self.batch_size)

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self._length

    def epoch(self, seeds: Sequence[int], epoch: int) -> Iterator[tuple[Batch, int]]:
        """Each batch of an epoch with its number of examples; one seed per replica."""
        if not self._shuffle and self._x[1] == self._y[1] == 0:
            yield from self._slices(self._x[0], self._y[0], 0, self._length)
            return
        order = self._order(seeds, epoch)
        row_bytes = sum(t[0].element_size() * math.prod(t[0].shape[t[1] + 1 :]) for t in (self._x, self._y))
        chunk = max(1, _GATHERED_BYTES // max(1, row_bytes * self.batch_size * order.shape[0]))
        for first in range(0, self._length, chunk):
            last = min(first + chunk, self._length)
            index = order[:, first * self.batch_size : last * self.batch_size]
            yield from self._slices(self._gathered(self._x, index), self._gathered(self._y, index), first, last)

    def _slices(self, x: Tensor, y: Tensor, first: int, last: int) -> Iterator[tuple[Batch, int]]:
        size = self.batch_size
        counts = [min(size, self.num_data - i * size) for i in range(first, last)]
        rows = sum(counts)
        x, y = x.narrow(self._lead, 0, rows), y.narrow(self._lead, 0, rows)
        yield from zip(zip(x.split(size, self._lead), y.split(size, self._lead), strict=True), counts, strict=True)

    def _order(self, seeds: Sequence[int], epoch: int) -> Tensor:
        """`[replicas in a row, N]`; drawn on the CPU, so that every device sees the same batches."""
        if not self._shuffle:
            return torch.arange(self.num_data, device=self.device).expand(len(seeds), -1)
        rows = [torch.randperm(self.num_data, generator=epoch_generator(seed, epoch)) for seed in seeds]
        return torch.stack(rows).to(self.device)

    def _gathered(self, tensor: tuple[Tensor, int], index: Tensor) -> Tensor:
        """Rows of each replica in its own order, `[*replicas, rows, ...]`."""
        values, lead = tensor
        if self._lead == 0:
            return values.index_select(0, index[0])
        if lead == 0:
            found = values[index]
        else:
            flat = values.reshape(-1, *values.shape[lead:])
            found = flat[torch.arange(len(flat), device=self.device).unsqueeze(-1), index]
        return found.reshape(*self._replicas, *found.shape[1:])


class LoaderBatches:
    """Batches of a DataLoader, or of any other iterable of batches, moved to the device."""

    def __init__(self, loader: Iterable[Any], device: torch.device, lead: int) -> None:
        self._loader, self._lead, self.device = loader, lead, device
        self.settings: dict[str, Any] = {}
        try:
            self.num_data: float = len(loader.dataset)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            self.num_data = math.inf
        self.generator = getattr(loader, "generator", None)
        if hasattr(loader, "__next__"):
            raise ValueError(
                f"data is a {type(loader).__name__}, which can be gone through only once; give a DataLoader, a list of "
                "(x, y) batches, or a pair of tensors"
            )

    def __len__(self) -> int:
        """How many batches an epoch has; 0 where the loader does not say."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return 0

    def epoch(self, seeds: Sequence[int], epoch: int) -> Iterator[tuple[Batch, int]]:
        """Each batch of an epoch with its number of examples; the order is the loader's own affair."""
        for holder in (getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
            if holder is not None and hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
        for batch in self._loader:
            if not isinstance(batch, tuple | list) or not 2 <= len(batch) <= 4 or not isinstance(batch[1], Tensor):
                raise _unsuitable(batch)
            try:
                x, y = moved_inputs(batch[0], self.device), moved(batch[1], self.device)
                counted = tuple(None if part is None else moved(part, self.device) for part in batch[2:])
            except TypeError:
                raise _unsuitable(batch) from None
            yield (x, y, *counted), y.shape[self._lead]


def _examples(x: Tensor, y: Tensor, replicas: torch.Size) -> int:
    """N, from whichever layout x has; raises where y has another."""
    lead = len(replicas)
    shared = lead > 0 and not (x.dim() >= lead + 2 and x.shape[:lead] == replicas)
    if x.dim() < 1 or y.dim() < 1 or (shared and x.dim() != 2):
        expected = f"[N, features] or [{', '.join(map(str, replicas))}, N, ...]" if lead else "[N, ...]"
        raise ValueError(f"x must be {expected} and y have one row per example; got {_shapes(x, y)}")
    count = x.shape[0] if shared else x.shape[lead]
    fits = y.shape[0] == count or (lead > 0 and y.dim() > lead and y.shape[: lead + 1] == (*replicas, count))
    if not fits:
        raise ValueError(f"x has {count} examples{' per replica' if lead else ''}, y has not; got {_shapes(x, y)}")
    if count == 0:
        raise ValueError(f"the data are empty; got {_shapes(x, y)}")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}; move them to the model's device")
    return count


def _in_rows(tensor: Tensor, replicas: torch.Size, count: int, *, least_dims: int) -> tuple[Tensor, int]:
    """The tensor with the dimension of its examples: after the replicas, or 0 where they share it."""
    lead = len(replicas)
    own = lead > 0 and tensor.dim() >= least_dims and tensor.shape[: lead + 1] == (*replicas, count)
    return tensor, lead if own else 0


def _shapes(x: Tensor, y: Tensor) -> str:
    return f"x {list(x.shape)}, y {list(y.shape)}"


def _unsuitable(batch: Any) -> ValueError:
    parts = f" of {', '.join(type(item).__name__ for item in batch)}" if isinstance(batch, tuple | list) else ""
    return ValueError(
        "data must yield pairs of tensors (x, y), where x may be several in a tuple or a dictionary and weights of "
        f"examples and a mask may follow; it yielded a {type(batch).__name__}{parts}. Let the loader collate them so"
    )
