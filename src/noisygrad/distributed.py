"""Several processes that train one model: the only place that knows `torch.distributed`.

The Fisher's statistics are summed over the ranks, and gradients are averaged where no wrapper (DistributedDataParallel,
`replicate`) has done so. The factorisation of the blocks is shared out, and the results are sent to all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Found = TypeVar("Found")
Group: TypeAlias = "dist.ProcessGroup | Literal['alone'] | None"
DRIFT = 1e-4
"""How far weights of two ranks may be apart, relative to their size: by the rounding of different processors."""


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
    """The processes that train one model together; a single one, where there are no others.

    Those of `group`; without one those of the DistributedDataParallel that the model is wrapped in, or else all there
    are. "alone" is this process by itself.
    """

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        self.active, self.rank, self.size = False, 0, 1
        self._settled = isinstance(group, str)
        if isinstance(group, str) or not dist.is_available() or not dist.is_initialized():
            return
        for candidate in (model, getattr(model, "_orig_mod", None)):
            if group is None and isinstance(candidate, nn.parallel.DistributedDataParallel):
                group = candidate.process_group
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.active = self.size > 1
        self._settled = True
        found = self._gather([(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()])
        if any(shapes != found[0] for shapes in found):
            raise ValueError(
                "the processes of this group have different models: give the optimiser the process_group of those that "
                'train this one, or process_group="alone" for a training of this process by itself'
            )

    @classmethod
    def alone(cls) -> Ranks:
        """One process by itself."""
        return cls(nn.Identity(), "alone")

    def check_current(self) -> None:
        """Raise if there are other processes now, of which an optimiser knows nothing."""
        if not self._settled and processes().size > 1:
            raise RuntimeError(
                "this optimiser was made before the process group, so it does not know the other processes: make it "
                "after torch.distributed.init_process_group (or what calls that, such as Accelerator()). For a "
                'training of this process by itself say process_group="alone"'
            )

    def _gather(self, value: Found) -> list[Found]:
        box: list[Found | None] = [None] * self.size
        dist.all_gather_object(box, value, group=self._group)
        return box  # type: ignore[return-value]

    def all_gather(self, numbers: Tensor) -> Tensor:
        """The numbers of every rank, one row each."""
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(rows, numbers, group=self._group)
        return torch.stack(rows)

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


class GradientReduction:
    """Whether a wrapper has reduced the gradients when a step sees them: a few numbers of them tell, rank by rank.

    They are compared in the first step and wherever factors are refreshed. As long as it is not known, or a batch does
    not tell, gradients are averaged; of equal ones that is the same.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._done: bool | None = None

    def is_done(self, gradient: Sequence[Tensor], mean: Sequence[Tensor], loss: Tensor | None, look: bool) -> bool:
        """Whether the gradients are the same on all ranks; raises on all of them if their weights are not.

        `gradient` and `mean` layer by layer; `loss` is this rank's own. Where there is something to compare, this
        waits for the device.
        """
        if look or self._done is None:
            own = torch.zeros((), dtype=torch.float64, device=gradient[0].device)
            own = own if loss is None else own + loss
            numbers = torch.stack([own, *_numbers(gradient), *_numbers(mean)])
            losses, gradients, means = (
                self._ranks.all_gather(numbers).cpu().split([1, 2 * len(gradient), 2 * len(mean)], 1)
            )
            sums, sizes = means[:, ::2], means[:, 1::2]
            if bool((torch.stack([sums, sizes]) - torch.stack([sums, sizes])[:, :1]).abs().gt(DRIFT * sizes[:1]).any()):
                raise RuntimeError(
                    "the ranks have different weights: they must start from the same (wrap the model in "
                    "DistributedDataParallel, or seed every process alike), make the same steps with the same settings "
                    'and load the same states. For trainings of their own say process_group="alone"'
                )
            equal = bool((gradients == gradients[:1]).all())
            told = bool(gradients.isfinite().all() and gradients.any() and (losses != losses[:1]).any())
            self._done = (True if told else None) if equal else False
        return bool(self._done)


def _numbers(parts: Sequence[Tensor]) -> list[Tensor]:
    """The sum and the size of each part."""
    kinds = torch.sum, torch.linalg.vector_norm
    return [kind(part, dtype=torch.float64) for part in parts for kind in kinds]
