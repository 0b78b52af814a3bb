"""One training in the several processes that `torchrun` has started: they meet, share results, and end together."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from noisygrad.distributed import Processes, all_gather_object, processes

Found = TypeVar("Found")
_PATIENCE = timedelta(minutes=10)
"""How long a process waits for a message of another, which may have failed."""


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Inside, the processes that `torchrun` has started work together; without it there is this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield processes()
        return
    if device.startswith("cuda"):
        _take_own_gpu(device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    interrupted = True
    try:
        yield processes()
        interrupted = False
    except Exception:
        interrupted = False
        raise
    finally:
        # A process that leaves while others have the group still open is now and then aborted at its end.
        if not interrupted:
            with suppress(RuntimeError):  # another has died
                dist.barrier()
        gc.collect()  # models made for several processes hold on to the group
        dist.destroy_process_group()


def _take_own_gpu(device: str, number: int) -> None:
    if device != "cuda":
        raise ValueError(f"under torchrun each process has a GPU of its own: give the device cuda, not {device}")
    if number >= (there := torch.cuda.device_count()):
        raise ValueError(
            f"this is process {number + 1} on a machine with {there} usable GPU{'s' * (there != 1)}: start as many "
            "processes (--nproc-per-node)"
        )
    torch.cuda.set_device(number)


def in_all_processes(work: Callable[[], Found]) -> Found:
    """What `work` gives in this process; raises if it failed in any, so that all of them go on with the same.

    That brings processes together again which failed at the same point. Where one fails while others wait for its part
    of a message, all of them end when that message times out.
    """
    failure: Exception | None = None
    found: list[Found] = []
    try:
        found.append(work())
    except Exception as error:
        failure = error
    told = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise RuntimeError(f"it failed in process {rank}: {text}")
    return found[0]


def of_first_process(find: Callable[[], Found]) -> Found:
    """What the first process finds, in all of them."""
    if processes().size == 1:
        return find()
    box = [find() if processes().rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over the processes, in all of them."""
    if processes().size == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / processes().size
