"""All tasks, by their names."""

from __future__ import annotations

from collections.abc import Mapping

from ..task import Task
from . import deep, fine_tuning, images, scarce, sequences, tables

TASKS: Mapping[str, Task] = {
    task.name: task for group in (images, deep, sequences, tables, fine_tuning, scarce) for task in group.TASKS
}
"""Every task; `half` says which are for tuning and which for reporting."""
