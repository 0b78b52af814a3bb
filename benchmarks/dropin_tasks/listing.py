"""The tasks as a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .store import Store, UnavailableError
from .tasks import TASKS


def listing(names: Sequence[str], store: Store) -> str:
    """Half, kind, rows, weights, batch and steps of each task; a note where its data are missing."""
    lines = [f"{'task':28}{'half':8}{'kind':24}{'rows':>6}{'weights':>9}{'batch':>7}{'steps':>7}  about"]
    for name in names:
        task = TASKS[name]
        try:
            data = task.data(store)
        except UnavailableError as why:
            lines.append(f"{name:28}{task.half:8}{task.kind:24}{'-':>6}{'-':>9}{task.batch:7}{task.steps:7}  ({why})")
            continue
        torch.manual_seed(0)
        weights = sum(p.numel() for p in task.network(data, 1.0).parameters() if p.requires_grad)
        row = f"{len(data.train):6}{weights:9}{min(task.batch, len(data.train)):7}{task.steps:7}"
        lines.append(f"{name:28}{task.half:8}{task.kind:24}{row}  {task.about}")
    return "\n".join(lines)
