"""Running statistics of norm layers, which a batch changes before anyone can refuse it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Those of a model, as they were before the draws of a step: a batch that is refused leaves no bad numbers there.

    On a GPU, where a bad batch is noticed only later, none are kept: what has gone bad is then named.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        modules = model.modules() if device.type == "cpu" else ()
        self._norms = [
            m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None
        ]
        self._kept: list[tuple[nn.Module, list[Tensor]]] = []
        self._sound = {name for name, buffer in model.named_buffers() if _is_finite(buffer)}
        """Buffers that may well hold an infinity, such as a mask, are none of ours."""

    def keep(self) -> None:
        """Before the first draw of a step."""
        if self._norms:
            self._kept = [(m, [b.clone() for b in m.buffers(recurse=False)]) for m in self._norms if m.training]

    def forget(self) -> None:
        """After a step: there is nothing to take back."""
        if self._kept:
            self._kept = []

    def restore(self) -> None:
        """Give norm layers with bad numbers what was kept."""
        for module, kept in self._kept:
            now = list(module.buffers(recurse=False))
            if not all(map(_is_finite, now)):
                for buffer, old in zip(now, kept, strict=True):
                    buffer.copy_(old)

    def nonfinite_buffers(self) -> list[str]:
        """The names of the buffers that have gone bad; waits for a GPU."""
        return [name for name, buffer in self._model.named_buffers() if name in self._sound and not _is_finite(buffer)]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
