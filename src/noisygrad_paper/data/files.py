"""The cached files: reading them, checking them, and setting aside what is wrong."""

import hashlib
import io
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.data.catalogue import DataSet, data_directory

ARRAYS = ("x", "y", "turbine_decay")
"""What a table's file may hold, in the order of the checksum."""


LARGEST = 2**30
"""Bytes of a download, of a cached file, and of what is read out of an archive: more is refused before it is read."""


class MissingDataError(FileNotFoundError):
    """A data file is not in the cache; the message has the command that fetches it."""


class DamagedDataError(ValueError):
    """A data file is not what it should be: wrong checksum, wrong shape, or not readable at all."""


def checksum_of(arrays: Mapping[str, NDArray[np.float64]]) -> str:
    """SHA-256 of the numbers of a table, whatever file they came from."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        if name in arrays:
            digest.update(np.ascontiguousarray(arrays[name], dtype="<f8").tobytes())
    return digest.hexdigest()


def check_arrays(entry: DataSet, arrays: Mapping[str, NDArray[np.float64]]) -> None:
    """Raise `DamagedDataError` unless these are the numbers of the data set."""
    expected = (entry.rows, entry.features - (entry.name == "naval-turbine"))
    if "x" not in arrays or "y" not in arrays:
        raise DamagedDataError(f"it has no arrays x and y, but {', '.join(arrays) or 'none'}")
    x, y = arrays["x"], arrays["y"]
    if x.dtype != np.float64 or y.dtype != np.float64:
        raise DamagedDataError(f"x and y are {x.dtype} and {y.dtype}, expected float64")
    if x.shape != expected or y.shape != expected[:1]:
        raise DamagedDataError(f"x and y are {x.shape} and {y.shape}, expected {expected} and {expected[:1]}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DamagedDataError("it has numbers that are not finite")
    if entry.target_range is not None and not (y.min() >= entry.target_range[0] and y.max() <= entry.target_range[1]):
        low, high = entry.target_range
        raise DamagedDataError(f"the target is in {y.min():g}..{y.max():g}, expected within {low:g}..{high:g}")
    for wanted in entry.files.values():
        if wanted is not None and (found := checksum_of(arrays)) != wanted:
            raise DamagedDataError(f"its checksum is {found}, expected {wanted}")


def read_arrays(entry: DataSet, directory: Path) -> dict[str, NDArray[np.float64]]:
    """The checked arrays of a table.

    Raises `MissingDataError` with the command that fetches it, or `DamagedDataError` after renaming a wrong file.
    """
    (relative,) = entry.files
    content = _read(entry, directory, relative)
    try:
        arrays = unpack_arrays(content)
        check_arrays(entry, arrays)
    except DamagedDataError as error:
        raise refused(entry, directory, directory / relative, str(error)) from error
    return arrays


def check_images(entry: DataSet, directory: Path) -> None:
    """Check every file that is there.

    Raises `DamagedDataError` after renaming a file whose checksum is wrong; else `MissingDataError` if one is missing.
    """
    missing: MissingDataError | None = None
    for relative in entry.files:
        try:
            read_official(entry, directory, relative)
        except MissingDataError as error:
            missing = missing or error
    if missing is not None:
        raise missing


def read_official(entry: DataSet, directory: Path, relative: str) -> bytes:
    """The content of one file of a set of images.

    Raises `MissingDataError` with the command that fetches it, or `DamagedDataError` after renaming a wrong file.
    """
    content = _read(entry, directory, relative)
    wanted = entry.files[relative]
    if wanted is not None and (found := hashlib.sha256(content).hexdigest()) != wanted:
        raise refused(entry, directory, directory / relative, f"its checksum is {found}, expected {wanted}")
    return content


def unpack_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file; raises `DamagedDataError` for anything else, and never unpickles.

    Nothing is read before all sizes together are known to be at most `LARGEST`, and no array is looked into before its
    bytes are known to have the checksum that the archive gives them.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            check_size(sum(member.file_size for member in members), "what is packed in it")
            return {
                member.filename.removesuffix(".npy"): np.lib.format.read_array(
                    io.BytesIO(archive.read(member)), allow_pickle=False
                )
                for member in members
            }
    except DamagedDataError:
        raise
    except Exception as error:  # what zipfile and numpy raise for other files is in no list of theirs
        raise DamagedDataError(f"it cannot be read as an npz file ({type(error).__name__}: {error})") from error


def check_size(size: int, what: str) -> None:
    """Raise `DamagedDataError` for what is too large to be looked at."""
    if size > LARGEST:
        raise DamagedDataError(f"{what} has {size} bytes, and no official file has more than {LARGEST}")


def fetch_command(entry: DataSet, directory: Path) -> str:
    """What to type to get the files of a data set into that folder."""
    where = "" if directory == data_directory() else f" --data-dir {shlex.quote(str(directory))}"
    return f"noisygrad data fetch {entry.fetched_with}{where}"


def refused(entry: DataSet, directory: Path, path: Path, reason: str) -> DamagedDataError:
    """Set a wrong file aside, and return the error that says so."""
    aside = _free_name(path)
    try:
        path.rename(aside)
        done = f"it was renamed to {aside.name} and is not used"
    except OSError as error:
        done = f"it is not used, and could not be renamed to {aside.name} ({error.strerror or error})"
    command = fetch_command(entry, directory)
    return DamagedDataError(f"{path} is not the {entry.name} data: {reason}; {done}. To fetch it again: {command}")


def _free_name(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.rejected")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.rejected-{number}")
    return aside


def _read(entry: DataSet, directory: Path, relative: str) -> bytes:
    path = directory / relative
    if not path.is_file():
        command = fetch_command(entry, directory)
        raise MissingDataError(f"the {entry.name} data is not at {path}. To fetch it: {command}")
    try:
        check_size(path.stat().st_size, "it")
    except DamagedDataError as error:
        raise refused(entry, directory, path, str(error)) from error
    return path.read_bytes()
