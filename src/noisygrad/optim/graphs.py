"""Replays of the optimiser's own arithmetic: on a GPU, many small kernels become one launch.

Only work on tensors that stay where they are can be replayed: the draw of the weights and the plain step of the mean.
The user's model is not touched. A captured step of the whole training loop is the user's to make; inside one, and on a
CPU, everything here runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from noisygrad.families.factorisation import capturing

WARM_UPS = 3


@dataclass
class _Entry:
    key: Hashable
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Replays:
    """Runs pieces of work by name, as CUDA graphs once they have settled."""

    def __init__(self, device: torch.device) -> None:
        self._enabled = device.type == "cuda"
        self._entries: dict[str, _Entry] = {}

    def run(self, name: str, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, whose tensors and numbers must be the same whenever `key` is equal."""
        if not self._enabled or capturing():
            work()
            return
        entry = self._entries.get(name)
        if entry is None or entry.key != key:
            entry = self._entries[name] = _Entry(key)
        if entry.graph is None:
            if entry.runs < WARM_UPS:
                entry.runs += 1
                work()
                return
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            entry.graph = graph
        entry.graph.replay()
