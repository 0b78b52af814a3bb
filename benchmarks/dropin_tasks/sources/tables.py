"""Tables: scikit-learn's, the UCI sets of the data folder, and those that statsmodels and river carry as files."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..store import UnavailableError
from ..task import Arrays
from .folder import data_file

if TYPE_CHECKING:
    from ..store import Store

UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")


def scikit_learn(name: str, _: Store) -> Arrays:
    """A set that comes with scikit-learn."""
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return {"x": x, "y": y}


def uci(name: str, _: Store) -> Arrays:
    """One of the UCI sets."""
    with np.load(data_file("uci", f"{name}.npz")) as file:
        order = np.random.RandomState(1).permutation(len(file["x"]))[:8000]
        return {key: file[key][order] for key in file.files}


def package_file(package: str, *place: str) -> bytes:
    """A file of an installed package, uncompressed and without importing it; raises `UnavailableError`."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UnavailableError(f"the data come with a package: pip install {package}")
    path = Path(found.submodule_search_locations[0], *place)
    if not path.exists():
        raise UnavailableError(f"the installed {package} has no {'/'.join(place)}")
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as file:
            return file.read(file.namelist()[0])
    return path.read_bytes()


def columns(raw: bytes, delimiter: str = ",") -> dict[str, list[str]]:
    """The columns of a CSV file by their names."""
    header, *rows = csv.reader(io.StringIO(raw.decode("utf-8")), delimiter=delimiter)
    return {name.strip("'\""): list(values) for name, values in zip(header, zip(*rows, strict=True), strict=True)}


def _numbers(table: Mapping[str, list[str]], *names: str) -> np.ndarray:
    return np.array([[float(value) for value in table[name]] for name in names]).T


def randhie(_: Store) -> Arrays:
    """The RAND health insurance experiment: visits to a doctor (counts) of 20190 people."""
    table = columns(package_file("statsmodels", "datasets", "randhie", "randhie.csv"))
    visits = table.pop("mdvis")
    order = np.random.RandomState(1).permutation(len(visits))[:8000]
    return {"x": _numbers(table, *table)[order], "y": np.array([int(float(v)) for v in visits])[order]}


def affairs(_: Store) -> Arrays:
    """Fair's survey of 601 readers: number of affairs in a year."""
    table = columns(package_file("statsmodels", "datasets", "fair", "fair_pt.csv"))
    names = [name for name in table if name not in {"identifier", "constant", "naffairs"}]
    return {"x": _numbers(table, *names), "y": _numbers(table, "naffairs")[:, 0].astype(np.int64)}


def anes96(_: Store) -> Arrays:
    """The American election study of 1996: 944 voters, and of which party they feel to be, in seven degrees."""
    table = columns(package_file("statsmodels", "datasets", "anes96", "anes96.csv"), "\t")
    names = [name for name in table if name not in {"PID", "vote"}]
    return {"x": _numbers(table, *names), "y": _numbers(table, "PID")[:, 0].astype(np.int64)}


def segments(_: Store) -> Arrays:
    """2310 segments of outdoor images, seven classes."""
    table = columns(package_file("river", "datasets", "segment.csv.zip"))
    labels = table.pop("category")
    return {"x": _numbers(table, *table), "y": np.unique(labels, return_inverse=True)[1]}


def shuttle(_: Store) -> Arrays:
    """Readings of the Space Shuttle, 7 % of them anomalous: 8000 of them."""
    table = columns(package_file("river", "datasets", "shuttle.csv.gz"))
    labels = _numbers(table, "anomaly")[:, 0].astype(np.int64)
    order = np.random.RandomState(1).permutation(len(labels))[:8000]
    names = [name for name in table if name != "anomaly"]
    return {"x": _numbers(table, *names)[order], "y": labels[order]}


def yeast(_: Store) -> Arrays:
    """2417 genes with fourteen yes-or-no functions each."""
    table = columns(package_file("river", "datasets", "yeast.csv.gz"))
    functions = [name for name in table if name.startswith("Class")]
    numbers = [name for name in table if not name.startswith("Class")]
    return {"x": _numbers(table, *numbers), "y": _numbers(table, *functions)}


SOURCES: Mapping[str, Callable[[Store], Arrays]] = {
    **{f"uci-{name}": partial(uci, name) for name in UCI},
    **{f"sklearn-{name}": partial(scikit_learn, name) for name in ("diabetes",)},
    "randhie": randhie,
    "affairs": affairs,
    "anes96": anes96,
    "segments": segments,
    "shuttle": shuttle,
    "yeast": yeast,
}
