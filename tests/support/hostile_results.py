"""Folders of results that nobody should have: each spoils one thing, or holds what no run has written."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from noisygrad_paper.experiments.cells import Cell
from noisygrad_paper.experiments.signed_lines import signed, unsigned
from support import made_results

HUGE = 10**400
Spoil = Callable[[Path], None]

CELLS: dict[str, list[Cell]] = {
    "regression": [
        made_results.cell("boston", method, k, {"rmse": 3.0 + 0.1 * k, "log_likelihood": -2.5, "elbo": -900.0 - k})
        for method in ("NNG-MVG", "NNG-FFG")
        for k in range(2)
    ],
    "classification": [
        made_results.trained(method, k, 85.0, 0.02) for method in ("K-FAC", "noisy-K-FAC") for k in range(2)
    ],
    "convergence": [
        made_results.cell(
            "boston",
            method,
            k,
            {"iterations": [10, 20, 30], "elbo": [-900.0, -800.0, -700.0 - k], "lr": 0.01},
            experiment="convergence",
        )
        for method in ("BBB", "NNG-MVG")
        for k in range(2)
    ],
    "convergence-tuning": [
        made_results.cell(
            "boston",
            f"BBB/lr={lr}",
            17,
            {"elbo": -700.0, "diverged": 0},
            experiment="convergence-tuning",
            config={"lr": lr},
        )
        for lr in (0.01, 0.1)
    ],
    "hmc-correlation": [
        made_results.cell(
            "boston",
            method,
            k,
            {"variance_0": [0.1, 0.2 + k, 0.4], "mean_0": [1.0, 2.0, 3.0]}
            | ({"rhat": 1.01} if method == "HMC" else {}),
            experiment="hmc-correlation",
        )
        for method in ("HMC", "NNG-MVG", "NNG-FFG")
        for k in range(2)
    ],
    "active-learning": [
        made_results.cell(
            "boston",
            method,
            k,
            {
                "rmse_active": 3.0,
                "rmse_random": 3.2,
                "rmse_active_by_round": [4.0, 3.5, 3.0],
                "rmse_random_by_round": [4.0, 3.6, 3.2],
            },
            experiment="active-learning",
        )
        for method in ("NNG-MVG", "PBP")
        for k in range(2)
    ],
    "exploration": [
        made_results.cell(
            "MountainCar",
            method,
            k,
            {
                "returns": [0.0, 0.1 * k, 0.3],
                "area": 0.1,
                "model_error": [0.5, 0.4],
                "persistence_error": [1.0, 1.0],
                **{f"seconds_{part}": 1.0 for part in ("rollout", "bonus", "policy", "model")},
            },
            experiment="exploration",
        )
        for method in ("TRPO", "TRPO+BBB", "TRPO+NNG-MVG")
        for k in range(2)
    ],
}
"""A few finished cells of each experiment."""


def write(folder: Path, experiment: str, lines: list[str | bytes]) -> None:
    encoded = [line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass") for line in lines]
    (folder / f"{experiment}.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))


def changed(experiment: str, *path: str, to: Any, every: bool = False) -> Spoil:
    """One value of the first cell, or of every cell, is another."""

    def spoil(folder: Path) -> None:
        lines: list[str | bytes] = []
        for number, cell in enumerate(CELLS[experiment]):
            values = json.loads(unsigned(cell.to_line()))
            if every or number == 0:
                inner = values
                for name in path[:-1]:
                    inner = inner[name]
                inner[path[-1]] = to
            lines.append(signed(json.dumps(values)))  # so that what is read is what is meant
        write(folder, experiment, lines)

    return spoil


def raw(experiment: str, *lines: str | bytes) -> Spoil:
    return lambda folder: write(folder, experiment, list(lines))


def repeated(experiment: str) -> Spoil:
    return lambda folder: write(folder, experiment, [cell.to_line() for cell in CELLS[experiment]] * 3)


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def arrays(**given: np.ndarray) -> Spoil:
    return lambda folder: np.savez(folder / "precision-matrices.npz", **given)


def archive(content: bytes) -> Spoil:
    return lambda folder: (folder / "precision-matrices.npz").write_bytes(content) and None


def description(content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        np.savez(folder / "precision-matrices.npz", **{"NNG-FFG": np.eye(3)})
        (folder / "precision-matrices.json").write_bytes(content)

    return spoil


def folder_in_place_of(name: str) -> Spoil:
    return lambda folder: (folder / name).mkdir()


def link(name: str, target: str) -> Spoil:
    return lambda folder: os.symlink(target, folder / name)


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


LINE = CELLS["regression"][0].to_line()
NAMES = {
    "empty": "",
    "numeric": 5,
    "null": None,
    "list": [],
    "object": {},
    "true": True,
    "very long": "x" * 100_000,
    "long": "x" * 150,
    "surrogate": "\ud800",
    "zero byte": "\x00",
    "line end": "a\nb",
    "markup": "<script>",
    "mathematics": "$\\frac{",
    "two dollars": "$x$ $",
    "slashes": "//",
    "hidden": "_hidden",
}
NUMBERS = {
    "NaN": math.nan,
    "infinite": math.inf,
    "near the largest": 1e308,
    "integer of 401 digits": HUGE,
    "denormal": 1e-320,
    "text": "3.0",
    "null": None,
    "true": True,
    "empty list": [],
    "list of null": [None],
    "list of lists": [[1.0]],
    "list of the largest": [1e308] * 3,
    "object": {"a": 1},
}

FOLDERS: dict[str, Spoil] = {
    **{f"method {kind}": changed("regression", "method", to=name) for kind, name in NAMES.items()},
    **{f"data {kind}": changed("convergence", "data", to=name, every=True) for kind, name in NAMES.items()},
    **{f"rmse {kind}": changed("regression", "metrics", "rmse", to=to, every=True) for kind, to in NUMBERS.items()},
    **{f"elbo {kind}": changed("convergence", "metrics", "elbo", to=to) for kind, to in NUMBERS.items()},
    **{f"seconds {kind}": changed("active-learning", "seconds", to=to) for kind, to in NUMBERS.items()},
    **{f"replicate {kind}": changed("exploration", "replicate", to=to) for kind, to in NUMBERS.items()},
    **{f"variances {kind}": changed("hmc-correlation", "metrics", "variance_0", to=to) for kind, to in NUMBERS.items()},
    **{f"step size {kind}": changed("convergence-tuning", "config", "lr", to=to) for kind, to in NUMBERS.items()},
    **{f"bins {kind}": changed("classification", "metrics", "bin_share", to=to) for kind, to in NUMBERS.items()},
    **{f"curve {kind}": changed("classification", "metrics", "train_loss", to=to) for kind, to in NUMBERS.items()},
    "no metrics": changed("regression", "metrics", to={}),
    "metrics a list": changed("regression", "metrics", to=[1.0]),
    "metrics with a bad name": changed("regression", "metrics", to={"\ud800": 1.0}),
    "config null": changed("regression", "config", to=None),
    "config without the step size": changed("convergence-tuning", "config", to={}),
    "config of 30 levels": changed("regression", "config", to=nested(30)),
    "config of 900 levels": changed("regression", "config", to=nested(900)),
    "config with NaN": changed("regression", "config", "epochs", to=math.nan),
    "config with 401 digits": changed("regression", "config", "epochs", to=HUGE),
    "config with a surrogate": changed("regression", "config", "epochs", to="\ud800"),
    "versions null": changed("regression", "versions", to=None),
    "versions numeric": changed("regression", "versions", to={"torch": 2}),
    "versions long": changed("regression", "versions", to={"torch": "2" * 10_000}),
    "device a list": changed("regression", "device", to=["cuda"]),
    "experiment of another": changed("regression", "experiment", to="convergence"),
    "error and metrics": changed("regression", "error", to="diverged"),
    "error numeric": changed("regression", "error", to=3),
    "unknown field": changed("regression", "more", to=1),
    "nothing but failures": raw(
        "convergence",
        made_results.failed("boston", "BBB", 0, "it \n burst").to_line().replace("regression", "convergence"),
    ),
    "duplicate cells": repeated("regression"),
    "duplicate cells, classification": repeated("classification"),
    "a name twice in a line": raw("regression", signed(unsigned(LINE)[:-1] + ', "method": "PBP"}')),
    "empty object": raw("regression", "{}"),
    "a list": raw("regression", "[]"),
    "a number": raw("regression", "1e999"),
    "null": raw("regression", "null"),
    "a number of 5000 digits": raw("regression", "1" * 5000),
    "100 000 brackets": raw("regression", "[" * 100_000),
    "100 000 objects": raw("regression", '{"a":' * 100_000),
    "no JSON": raw("regression", "boston NNG-MVG 3.0"),
    "no UTF-8": raw("regression", b'{"data": "\xff\xfe"}'),
    "zero bytes": raw("regression", b"\x00" * 1000),
    "UTF-16": raw("regression", LINE.encode("utf-16")),
    "byte order mark": raw("regression", b"\xef\xbb\xbf" + LINE.encode()),
    "carriage returns": raw("regression", LINE + "\r"),
    "blank lines": raw("regression", "", "   ", LINE, ""),
    "empty file": raw("regression"),
    "cut off": lambda folder: (folder / "regression.jsonl").write_text(LINE[:50]) and None,
    "a folder for the cells": folder_in_place_of("regression.jsonl"),
    "a folder for the matrices": folder_in_place_of("precision-matrices.npz"),
    "a link to itself": link("regression.jsonl", "regression.jsonl"),
    "a link to nothing": link("regression.jsonl", "nowhere"),
    "a link to the folder": link("regression.jsonl", "."),
    "a link to a device": link("regression.jsonl", os.devnull),
    "a link to the cells of another": lambda folder: (
        changed("convergence", "seconds", to=1.0)(folder),
        os.symlink("convergence.jsonl", folder / "regression.jsonl"),
    )[-1],
    "matrices: empty file": archive(b""),
    "matrices: no archive": archive(b"PK\x03\x04 and no more"),
    "matrices: text in an archive": archive(zipped("NNG-FFG.npy", b"text")),
    "matrices: a lone array": archive(b"\x93NUMPY\x01\x00"),
    "matrices: none": arrays(),
    "matrices: others": arrays(other=np.eye(3)),
    "matrices: a number": arrays(**{"NNG-FFG": np.float64(3.0)}),
    "matrices: a vector": arrays(**{"NNG-FFG": np.ones(3)}),
    "matrices: of size 0": arrays(**{"NNG-FFG": np.ones((0, 0))}),
    "matrices: text": arrays(**{"NNG-FFG": np.full((3, 3), "a")}),
    "matrices: objects": arrays(**{"NNG-FFG": np.full((3, 3), None)}),
    "matrices: complex": arrays(**{"NNG-FFG": np.eye(3) * 1j}),
    "matrices: NaN": arrays(**{"NNG-FFG": np.full((3, 3), np.nan)}),
    "matrices: zero": arrays(**{"NNG-FFG": np.zeros((3, 3))}),
    "matrices: near the largest": arrays(**{"NNG-FFG": np.full((3, 3), 1e308)}),
    "matrices: two sizes": arrays(**{"NNG-FFG": np.eye(3), "NNG-MVG": np.eye(4)}),
    "boundaries NaN": arrays(**{"NNG-FFG": np.eye(3), "boundaries": np.full(2, np.nan)}),
    "boundaries a matrix": arrays(**{"NNG-FFG": np.eye(3), "boundaries": np.eye(2, dtype=int)}),
    "boundaries outside": arrays(**{"NNG-FFG": np.eye(3), "boundaries": np.array([-5, 90])}),
    "description: empty": description(b""),
    "description: a list": description(b"[]"),
    "description: no UTF-8": description(b"\xff\xfe"),
    "description: 100 000 brackets": description(b"[" * 100_000),
    "description: 900 levels": description(json.dumps(nested(900)).encode()),
    "description: NaN": description(b'{"a": NaN}'),
    "description: a surrogate": description(b'{"a": "\\ud800"}'),
}
"""What is wrong, and a function that puts it into an empty folder."""
