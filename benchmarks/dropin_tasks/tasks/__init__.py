"""All tasks, by their names."""

from __future__ import annotations

from collections.abc import Mapping

from ..task import Task
from . import images, sequences, tables

TASKS: Mapping[str, Task] = {task.name: task for task in (*images.TASKS, *sequences.TASKS, *tables.TASKS)}
"""Every task; `half` says which are for tuning and which for reporting."""
