"""What a GPU does with the pieces of a step, on a CPU: it runs them, then records their operations, then replays those.

A replay runs no Python of the library's: a number that was read when the piece was recorded stays what it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from noisygrad.kernels.factorisation import unchecked
from noisygrad.optim import execution
from noisygrad.optim.execution import WARM_UPS, Executor, Work


class Recording(TorchDispatchMode):
    """The operations that are run inside, with their tensors.

    Of a whole step `host_reads` are allowed: a CPU looks at batches and statistics that a GPU does not look at.
    """

    def __init__(self, *, host_reads: bool = False) -> None:
        super().__init__()
        self._host_reads = host_reads
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            if self._host_reads:
                return function(*args, **(kwargs or {}))
            raise AssertionError("a number is read on the host, which a graph cannot do")
        made = function(*args, **(kwargs or {}))
        self._operations.append((function, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        """The same operations on the same tensors: what a Python function would do otherwise now, it does not do."""
        for function, args, kwargs, made in self._operations:
            given = {_place(tensor) for tensor in _tensors((args, kwargs))}
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                if _place(old) not in given:  # neither a view nor in place
                    old.copy_(new)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ReplayExecutor(Executor):
    """Runs a piece as it is at first, then records it, then replays the recording: as `GraphCache` on a GPU."""

    deferred: ClassVar[bool] = True
    recording: ClassVar[bool] = False
    """Whether one of them records: what another one is given then is part of that."""

    def __init__(self, *, host_reads: bool = False) -> None:
        self._host_reads = host_reads
        self.names: list[str] = []
        """What was run, in order."""
        self.keys: set[Hashable] = set()
        self.replays = 0
        """How often a recording took the place of the work."""
        self._entries: dict[str, tuple[Hashable, list[Recording], list[None]]] = {}

    def run(self, name: str, key: Hashable, work: Work) -> None:
        if ReplayExecutor.recording:
            work()
            return
        # What a CPU looks at, to save a multiplication by 1, a GPU does not; nor does a compiled step on a CPU.
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            self._run(name, key, work)

    def _run(self, name: str, key: Hashable, work: Work) -> None:
        self.names.append(name)
        self.keys.add(key)
        if name not in self._entries or self._entries[name][0] != key:
            self._entries[name] = (key, [], [])
        _, recordings, runs = self._entries[name]
        if len(runs) < WARM_UPS:
            runs.append(None)
            work()
        elif not recordings:
            # Nothing that is recorded may be checked.
            with (
                Recording(host_reads=self._host_reads) as recording,
                mock.patch.object(ReplayExecutor, "recording", True),
                unchecked(),
            ):
                work()
            recordings.append(recording)
        else:
            self.replays += 1
            recordings[0].replay()


def replayed(monkeypatch: pytest.MonkeyPatch) -> list[ReplayExecutor]:
    """Whatever is made from now on has a `ReplayExecutor`, such as `optimizer.update.executor`; those made."""
    made: list[ReplayExecutor] = []

    def executor_for(device: torch.device, generators: Any = (), *, differentiates: bool = True) -> ReplayExecutor:
        made.append(ReplayExecutor(host_reads=differentiates))
        return made[-1]

    monkeypatch.setattr(execution, "executor_for", executor_for)
    return made
