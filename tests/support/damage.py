"""What becomes of damaged files and of killed writers; the suite runs a part of this, and by hand it is run whole:

PYTHONPATH=src:tests python -m support.damage --mutations 10000 --kills 300
"""

from __future__ import annotations

import argparse
import copy
import io
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.training import CheckpointError, load_checkpoint, save_checkpoint
from noisygrad_paper.data import CsvError, DamagedDataError, read_csv_table
from noisygrad_paper.data.files import unpack_arrays
from noisygrad_paper.experiments.cells import Cell, Results
from support.compare import leaves
from support.fitted_posterior import MODELS, fitted
from support.mutations import mutated, signed
from support.processes import clean_processes

REFUSED = "refused"
GOOD = (REFUSED, "read")
"""What may become of a damaged file; `read` where its kind promises no more than a documented error."""


@dataclass(frozen=True)
class Damageable:
    """A file that is damaged many times: what is in it, and what becomes of a damaged one at a path."""

    content: bytes
    outcome: Callable[[Path, bytes], str]


def damaged(kind: str, count: int, seed: int = 0) -> Counter[str]:
    """How often what became of `count` mutations of a file of that kind."""
    target, found = KINDS[kind](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for how, data in mutated(target.content, count, seed):
            path = Path(folder) / "results.jsonl"
            path.write_bytes(data)
            outcome = target.outcome(path, data)
            found[outcome if outcome in GOOD else f"{how}: {outcome}"] += 1
    return found


def _same(one: Any, other: Any) -> bool:
    mine, theirs = leaves(one), leaves(other)
    return mine.keys() == theirs.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(mine.values(), theirs.values(), strict=True)
    )


def _outcome(load: Callable[[], object], documented: type[Exception], state: Callable[[], Any]) -> str:
    """`refused` only with that error, and with nothing changed."""
    before = copy.deepcopy(state())
    try:
        load()
    except documented:
        return REFUSED if _same(state(), before) else "changed before it was refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    return "accepted"


def posterior_file(family: str, name: str = "mlp") -> Damageable:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior"
        fitted(family, name, likelihood=ng.Gaussian())[0].save(path)
        content = path.read_bytes()
    model = MODELS[name][0]().double()
    return Damageable(
        content, lambda path, data: _outcome(lambda: ng.load_posterior(path, model), ValueError, model.state_dict)
    )


def trained(steps: int) -> tuple[nn.Module, ng.NoisyKFAC, torch.optim.lr_scheduler.LRScheduler]:
    """A model with running statistics, its optimiser and its schedule."""
    torch.manual_seed(steps)
    make, shape = MODELS["convolutions"]
    model = make().double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=30, seed=steps)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    x, y = torch.randn(6, *shape).double(), torch.randn(6, 2).double()
    for _ in range(steps):
        optimizer.step(lambda: (model(x), y))
        schedule.step()
    return model, optimizer, schedule


def checkpoint_file() -> Damageable:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        model, optimizer, scheduler = trained(3)
        extra = {"history": {"loss": [1.0, 0.5], "seconds": [0.1, 0.2]}, "seeds": [0]}
        save_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
        content = path.read_bytes()
    model, optimizer, scheduler = trained(1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = lambda: {name: part.state_dict() for name, part in parts.items()}  # noqa: E731
    return Damageable(
        content, lambda path, data: _outcome(lambda: load_checkpoint(path, **parts), CheckpointError, state)
    )


def results_file() -> Damageable:
    cells = [
        Cell(
            experiment="results",
            data=data,
            method="NNG-MVG",
            replicate=number,
            config={"epochs": 40, "hidden": [50], "lr": 0.01},
            metrics={"rmse": 0.1 * number + 0.01, "returns": [0.5, 1.25, number]},
            seconds=1.5,
            device="cpu",
            versions={"torch": "2.13.0"},
        )
        for data in ("yacht", "boston")
        for number in range(6)
    ]

    def outcome(path: Path, data: bytes) -> str:
        results = Results(path.parent, "results")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = results.load()
                results.append(cells)
                whole = results.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]
        if any(cell not in cells for cell in found):
            return "other content"
        if not path.read_bytes().startswith(data):
            return "a line was changed or deleted"
        if sorted(cell.key for cell in whole) != sorted(cell.key for cell in cells):
            return "a missing cell was not stored again"
        # A file that lost whole lines is a file of fewer cells.
        lines = [line for line in data.split(b"\n") if line.strip()]
        if len(set(lines)) > len(found) and not told:
            return "a bad line was not named"
        return REFUSED

    return Damageable("".join(f"{cell.to_line()}\n" for cell in cells).encode(), outcome)


def csv_file() -> Damageable:
    rows = "".join(f'{i},"{i * i}",{-i / 7!r}\n' for i in range(40))

    def outcome(path: Path, data: bytes) -> str:
        try:
            table = read_csv_table(path, "price")
        except CsvError:
            return REFUSED
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]
        return "read" if np.isfinite(table.x).all() else "not finite"

    return Damageable(f"width,price,height\n{rows}".encode(), outcome)


def npz_file(save: Callable[..., None]) -> Damageable:
    buffer = io.BytesIO()
    save(buffer, x=np.linspace(0.0, 1.0, 180).reshape(30, 6), y=np.arange(30.0))

    def outcome(path: Path, data: bytes) -> str:
        try:
            unpack_arrays(data)
        except DamagedDataError:
            return REFUSED
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]
        return "read"

    return Damageable(buffer.getvalue(), outcome)


def signed_again(target: Damageable) -> Damageable:
    """Damaged files with a right checksum may be read, or refused with the documented error and nothing changed."""

    def outcome(path: Path, data: bytes) -> str:
        path.write_bytes(signed(data))
        found = target.outcome(path, data)
        return "read" if found == "accepted" else found

    return Damageable(target.content, outcome)


def posterior_with_norm() -> Damageable:
    return posterior_file("kronecker", "convolutions")


KINDS: dict[str, Callable[[], Damageable]] = {
    "posterior": posterior_with_norm,
    "posterior, signed again": lambda: signed_again(posterior_with_norm()),
    "checkpoint": checkpoint_file,
    "checkpoint, signed again": lambda: signed_again(checkpoint_file()),
    "results": results_file,
    "csv": csv_file,
    "npz": lambda: npz_file(np.savez),
    "compressed npz": lambda: npz_file(np.savez_compressed),
}
"""Every kind of file that is read back."""


def _saver(kind: str) -> tuple[Callable[[Path], None], Callable[[Path], object]]:
    """What saves a file of about a megabyte, and what reads it."""
    model = nn.Linear(300, 300)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
    if kind == "posterior":
        return optimizer.posterior().save, lambda path: ng.load_posterior(path, model)
    parts = {"model": model, "optimizer": optimizer}
    return lambda path: save_checkpoint(path, **parts), lambda path: load_checkpoint(path, **parts)


def _save_for_ever(kind: str, path: Path, begun: Any) -> None:
    save, _ = _saver(kind)
    while True:
        save(path)
        begun.set()


def killed_saves(count: int, seed: int = 0) -> Counter[str]:
    """What `count` processes left that were killed at random moments while they saved the same file, half of each kind.

    After each, the file must be whole, and the next save must leave nothing but it.
    """
    found, chance, context = Counter[str](), random.Random(seed), clean_processes()
    for number in range(count):
        kind = ("posterior", "checkpoint")[number % 2]
        save, load = _saver(kind)
        with tempfile.TemporaryDirectory() as folder:
            path, begun = Path(folder) / "kept", context.Event()
            process = context.Process(target=_save_for_ever, args=(kind, path, begun))
            process.start()
            begun.wait()
            time.sleep(chance.uniform(0.0, 0.05))
            process.kill()
            process.join()
            load(path)
            found["kills"] += 1
            found["kills that left a part"] += len(list(Path(folder).iterdir())) > 1
            save(path)
            load(path)
            found["parts after the next save"] += len(list(Path(folder).iterdir())) - 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000, help="of each file")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for kind in KINDS:
        outcomes = damaged(kind, given.mutations, given.seed)
        good = {outcome: outcomes.pop(outcome) for outcome in GOOD if outcome in outcomes}
        print(f"{kind}: {good}, and {outcomes.total()} that must not be {outcomes.most_common(9) or ''}", flush=True)
    print(dict(killed_saves(given.kills, given.seed)))
