"""How pieces of a step are run: as they are, or as a CUDA graph once they have settled.

Only work on tensors that stay where they are can be replayed. The optimiser hands its own arithmetic to an `Executor`,
the draw of the weights and the move of the mean, without touching the user's model; a whole step is
`noisygrad.training.CapturedStep`. Inside a capture of somebody else's everything runs as it is.
"""

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from noisygrad.kernels.factorisation import capturing

WARM_UPS = 3

Work = Callable[[], object]
Pool = Any  # torch has no public name for it


_SIDES = threading.local()


def _side(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups of a thread on a GPU: cuBLAS keeps 32 MB for each stream that a thread has used."""
    kept: dict[int, torch.cuda.Stream] = _SIDES.__dict__.setdefault("kept", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in kept:
        kept[index] = torch.cuda.Stream(index)
    return kept[index]


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection inside: an old graph that is destroyed while another is recorded spoils the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Executor(ABC):
    """Runs named pieces of work on tensors that stay where they are."""

    deferred: ClassVar[bool]
    """Whether work may be replayed: then the numbers of a step must be tensors, and nothing may wait for a check."""

    @abstractmethod
    def run(self, name: str, key: Hashable, work: Work) -> None:
        """Do `work`, whose tensors and numbers must be the same whenever `key` is equal."""


class DirectExecutor(Executor):
    """Runs everything as it is: on a CPU."""

    deferred: ClassVar[bool] = False

    def run(self, name: str, key: Hashable, work: Work) -> None:
        """Run it at once."""
        del name, key
        work()


class Replay:
    """A piece of work that is recorded once it has run a few times, and replayed from then on.

    `work` is a function of tensors that stay where they are, draws from `generators`, and calls autograd if it
    `differentiates`. `pool` finds the memory of another graph that it may use: the two hold nothing for each other.
    """

    def __init__(
        self,
        work: Work,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        pool: Callable[[], Pool | None] = lambda: None,
        *,
        differentiates: bool = True,
    ) -> None:
        self._work = work
        self._device = device
        self._generators = tuple(generators)
        self._pool = pool
        self._differentiates = differentiates
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Do the work once."""
        if self._graph is None:
            # Streams and recordings are those of the current GPU, which need not be the one that the tensors are on.
            with torch.cuda.device(self._device):
                if self._runs < WARM_UPS:
                    self._runs += 1
                    self._warm_up()
                    return
                self._graph = self._recorded()
        self._graph.replay()  # which knows its GPU

    @property
    def pool(self) -> Pool | None:
        """Its memory, for others to share, once it is recorded."""
        return None if self._graph is None else self._graph.pool()

    def _warm_up(self) -> None:
        if not self._differentiates:
            self._work()
            return
        # Beside the usual stream, as torch asks: what autograd keeps for a leaf remembers where it was made.
        side, usual = _side(self._device), torch.cuda.current_stream()
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            self._work()
        usual.wait_stream(side)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Other threads may be training on the same GPU.
        recording = torch.cuda.graph(graph, pool=self._pool(), capture_error_mode="thread_local")
        with _without_collection(), recording:
            self._work()
        return graph


class GraphCache(Executor):
    """Runs pieces of work by name, as CUDA graphs once they have settled; arguments as of `Replay`."""

    deferred: ClassVar[bool] = True

    def __init__(
        self, device: torch.device, generators: Iterable[torch.Generator] = (), *, differentiates: bool = True
    ) -> None:
        self._device = device
        self._generators = tuple(generators)
        self._differentiates = differentiates
        self._entries: dict[str, tuple[Hashable, Replay]] = {}

    def run(self, name: str, key: Hashable, work: Work) -> None:
        """Do `work`, whose tensors and numbers must be the same whenever `key` is equal."""
        if capturing():
            work()
            return
        known = self._entries.get(name)
        if known is None or known[0] != key:
            replay = Replay(work, self._device, self._generators, self._pool, differentiates=self._differentiates)
            known = self._entries[name] = (key, replay)
        known[1]()
        torch.clear_autocast_cache()  # a replay may have changed weights that a region of autocast has copies of

    def _pool(self) -> Pool | None:
        """The memory of any that is recorded: all of them may use it, one after the other."""
        return next((pool for _, replay in self._entries.values() if (pool := replay.pool) is not None), None)


def executor_for(
    device: torch.device, generators: Iterable[torch.Generator] = (), *, differentiates: bool = True
) -> Executor:
    """What runs pieces of work on a device: as CUDA graphs on a GPU, as they are elsewhere."""
    if device.type == "cuda":
        return GraphCache(device, generators, differentiates=differentiates)
    return DirectExecutor()


class DeviceScalars:
    """Learning rates, trust region, decay, loss and mask as tensors on the device, for a replayed step to read."""

    def __init__(self, like: Tensor, groups: int) -> None:
        self._like = like
        self.groups: list[dict[str, Any]] = [{"lr": like.new_zeros(())} for _ in range(groups)]
        self.clip: Tensor | None = None
        self.rate = like.new_zeros(())
        """1 − `fisher_decay`."""
        self.loss = like.new_zeros(())
        self.parts = like.new_ones(())
        """What the trust region is multiplied by."""
        self.weight = like.new_zeros(())
        """What the gradient is divided by."""
        self.mask = like.new_zeros(())
        self._known: dict[str, float] = {}

    def set(self, groups: Sequence[Mapping[str, Any]], clip: float | None, rate: float) -> None:
        """Bring the tensors up to date; only what has changed is sent, so a capture after it records nothing of it."""
        for index, (mine, group) in enumerate(zip(self.groups, groups, strict=True)):
            mine["momentum"] = group["momentum"]
            if isinstance(group["lr"], Tensor):
                mine["lr"].copy_(group["lr"])
            else:
                self._send(f"lr {index}", mine["lr"], group["lr"])
        if clip is None:
            self.clip = None
            self._known.pop("clip", None)
        else:
            self.clip = self._like.new_zeros(()) if self.clip is None else self.clip
            self._send("clip", self.clip, clip)
        self._send("rate", self.rate, rate)

    @property
    def scaled_clip(self) -> Tensor | None:
        """The trust region of a step."""
        return None if self.clip is None else self.clip * self.parts

    def _send(self, name: str, tensor: Tensor, value: float) -> None:
        if self._known.get(name) != value:
            self._known[name] = value
            tensor.fill_(value)

    def key(self) -> tuple[Any, ...]:
        """Whatever a replayed step has as plain numbers."""
        return (self.clip is None, id(self.clip), *(group["momentum"] for group in self.groups))
