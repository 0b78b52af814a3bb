"""The file of results: one line of JSON for each finished training, in the order in which they finished."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, str, int]


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line in one write, so that a program killed at any moment leaves whole lines or a torn last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """All whole lines by task, method and seed; of several with the same key, the last."""
    return {(r["task"], r["method"], r["seed"]): r for r in _lines(path)}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn: that training is run again
        if isinstance(record, dict) and {"task", "method", "seed"} <= set(record):
            yield {key: _number(value) for key, value in record.items()}


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
