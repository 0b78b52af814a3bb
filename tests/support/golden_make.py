"""Writes `golden_numbers.npz`: what all runs of `golden_runs.py` gave when the file was made.

`python -m support.golden_make`, run in tests/, makes the file anew: only where results are meant to change, and with
a commit that says why.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch

from support.golden_runs import RUNS, Arrays, record

NUMBERS = Path(__file__).resolve().parents[1] / "golden" / "golden_numbers.npz"
LAYOUT = "layout"
NUDGE = 1e-14
STABLE = 1e-10
"""So little may a nudge of the first weights move any array, relative to its largest number."""


def save(runs: dict[str, Arrays], path: Path) -> None:
    """One vector for each run, and where its arrays lie in it: an entry for each array would take twice the room."""
    layout = {run: {name: array.shape for name, array in found.items()} for run, found in runs.items()}
    vectors = {run: np.concatenate([array.ravel() for array in found.values()]) for run, found in runs.items()}
    np.savez_compressed(path, **{LAYOUT: np.array(json.dumps(layout))}, **vectors)


def load(path: Path = NUMBERS) -> dict[str, Arrays]:
    runs = {}
    with np.load(path, allow_pickle=False) as stored:
        for run, shapes in json.loads(str(stored[LAYOUT])).items():
            ends = list(itertools.accumulate(int(np.prod(shape, dtype=int)) for shape in shapes.values()))
            vector = stored[run]
            assert vector.dtype == np.float64, run
            assert vector.size == ends[-1], run
            parts = np.split(vector, ends[:-1])
            runs[run] = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return runs


def moved(found: Arrays, nudged: Arrays) -> float:
    """By how much the array moved that moved most, relative to its largest number."""
    return max(float(np.abs(nudged[name] - a).max() / max(np.abs(a).max(), 1e-3)) for name, a in found.items())


def main() -> None:
    torch.set_num_threads(1)
    runs = {name: record(name) for name in RUNS}
    assert all(np.isfinite(array).all() for found in runs.values() for array in found.values())
    movements = {name: moved(found, record(name, nudge=NUDGE)) for name, found in runs.items()}
    worst = max(movements, key=movements.__getitem__)
    assert movements[worst] < STABLE, f"{worst} is not stable: {movements[worst]:.1e}"
    save(runs, NUMBERS)
    print(f"{len(runs)} runs, {NUMBERS.stat().st_size / 1000:.0f} kB; a nudge moves {worst} by {movements[worst]:.1e}")


if __name__ == "__main__":
    main()
