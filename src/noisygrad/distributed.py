"""Several processes that train one model: the only place that knows `torch.distributed`.

Gradients are averaged by DistributedDataParallel as ever. Here the Fisher's statistics are summed over the ranks, the
factorisation of the blocks is shared out among them, and the results are sent to all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Found = TypeVar("Found")


@dataclass(frozen=True)
class Processes:
    """Which of the processes of a run this is."""

    rank: int
    size: int


def processes() -> Processes:
    """Where this process is among those of the default process group; the only one, where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return Processes(0, 1)
    return Processes(dist.get_rank(), dist.get_world_size())


def all_gather_object(value: Found) -> list[Found]:
    """What each process has, in the order of their ranks, in all of them."""
    if processes().size == 1:
        return [value]
    box: list[Found | None] = [None] * processes().size
    dist.all_gather_object(box, value)
    return box  # type: ignore[return-value]


def sharded_parameters(model: nn.Module) -> list[str]:
    """The names of parameters of which each process holds a part only."""
    # Not imported for this: where nobody has imported them, there are none.
    tensors = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    wrappers = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    within = {p for module in model.modules() if isinstance(module, wrappers) for p in module.parameters()}
    return [name for name, p in model.named_parameters() if isinstance(p, tensors) or p in within]


class Ranks:
    """The processes that hold a copy of one DistributedDataParallel model; of one process, where there is none."""

    def __init__(self, model: nn.Module) -> None:
        for candidate in (model, getattr(model, "_orig_mod", None)):
            if isinstance(candidate, nn.parallel.DistributedDataParallel):
                self._group = candidate.process_group
                self.active = True
                self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
                return
        self.active, self.rank, self.size = False, 0, 1

    @classmethod
    def alone(cls) -> Ranks:
        """One process by itself."""
        return cls(nn.Identity())

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """In place, the sum over the ranks of each tensor, in one message for each dtype."""
        if not self.active:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for several in by_dtype.values():
            message = torch.cat([tensor.reshape(-1) for tensor in several])
            dist.all_reduce(message, group=self._group)
            for tensor, part in zip(several, message.split([t.numel() for t in several]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def same_for_all(self, value: int) -> int:
        """The value of rank 0."""
        if not self.active:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def share_out(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each job, so that the dearest rank has as little as possible: largest job first."""
        load = [0.0] * self.size
        owner = [0] * len(costs)
        for job in sorted(range(len(costs)), key=lambda index: -costs[index]):
            owner[job] = min(range(self.size), key=load.__getitem__)
            load[owner[job]] += costs[job]
        return owner

    def run_on_all(self, work: Callable[[], None], device: torch.device) -> None:
        """Run `work` on each rank and raise on all if one of them failed, so that none waits for ever."""
        if not self.active:
            work()
            return
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        failed = torch.tensor([float(failure is not None)], device=device)
        dist.all_reduce(failed, group=self._group)
        if failure is not None:
            raise failure
        if float(failed):
            raise RuntimeError("another rank failed in this step; its own error says why")

    def broadcast(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite each tensor with that of the rank `source`."""
        if self.active:
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole, group=self._group, group_src=source)
                if whole is not tensor:  # a view into something larger
                    tensor.copy_(whole)
