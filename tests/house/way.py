"""The files of the library that one step of `NoisyKFAC` goes through: `python tests/house/way.py` prints them.

A network of two layers on a CPU, in the steady state: what a first step prepares, later ones need not enter again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import noisygrad as ng

HOME = Path(ng.__file__).parent
EVERY = 4
"""Steps between statistics and between refreshes."""


def way(work: Callable[[], object]) -> list[str]:
    """The files under the library of which a function is called while the work is done, in order of the first call."""
    found: dict[str, None] = {}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and HOME in path.parents:
            found.setdefault(path.relative_to(HOME).as_posix())

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(found)


def ways() -> dict[str, list[str]]:
    """The files of a plain step, and of one with statistics and refresh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=60, stats_every=EVERY, factor_every=EVERY, seed=0)
    x, y = torch.randn(6, 3), torch.randn(6, 2)

    def step() -> None:
        optimizer.step(lambda: (model(x), y))

    for _ in range(8 * EVERY):
        step()
    found = sorted((way(step) for _ in range(EVERY)), key=len)  # one of them has statistics and a refresh
    return {"plain": found[0], "statistics and refresh": found[-1]}


def main() -> None:
    """Print how many there are, and which."""
    for kind, files in ways().items():
        sys.stdout.write(f"{kind}: {len(files)}\n" + "".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
