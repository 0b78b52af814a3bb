"""Downloading: every file is whole and checked before it gets its name in the cache.

A download lies in the cache's folder `downloads` until it is unpacked, and is then removed. A file that a person has
put there by hand is used instead of downloading.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import tarfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray

from noisygrad.archive import clear_unfinished, write_atomically
from noisygrad_paper.data.catalogue import DataSet, data_directory, data_set
from noisygrad_paper.data.files import (
    DamagedDataError,
    MissingDataError,
    check_arrays,
    check_images,
    check_size,
    fetch_command,
    read_arrays,
    refused,
)

Report = Callable[[str, int, int | None], None]
"""Called while a file is downloaded: its name, the bytes so far, and the bytes in all where they are known."""

YEAR_MEMBER = "YearPredictionMSD.txt"
"""The one file in the archive of the year set."""
_BLOCK = 1 << 18
_SECONDS_OF_SILENCE = 60
_DAMAGES = (
    *(DamagedDataError, zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError),
    RuntimeError,  # an archive with a password
)
"""What reading raises where a download is not what it should be."""


class FetchError(OSError):
    """A download failed; the message has the address, and where to put the file by hand."""


def fetch(
    name: str, data_dir: str | Path | None = None, *, force: bool = False, report: Report | None = None
) -> list[Path]:
    """Download a data set into the cache, and return the files written: none if all are there and right.

    `force` downloads also what is there and right; `report` is called now and then while a file comes in.

    Raises `FetchError` where the network or the disk failed, and nothing in the cache has changed; `DamagedDataError`
    where what came is not the data: it is kept aside as `<file>.rejected` and not used.
    """
    entry = data_set(name)
    entry = data_set(entry.fetched_with)
    directory = data_directory(data_dir)
    if not entry.files or (not force and _present(entry, directory)):
        return []
    downloads = directory / "downloads"
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        for relative in entry.files:
            (directory / relative).parent.mkdir(exist_ok=True)
        written = _fetch(entry, directory, report or (lambda name, done, total: None))
    except OSError as error:
        if isinstance(error, FetchError):
            raise
        raise FetchError(f"cannot write the {entry.name} data to {directory}: {error.strerror or error}") from error
    with contextlib.suppress(OSError):  # it is not empty
        downloads.rmdir()
    return written


def _present(entry: DataSet, directory: Path) -> bool:
    """Whether all files are there and right; wrong ones are set aside on the way."""
    try:
        check_images(entry, directory) if entry.kind == "images" else read_arrays(entry, directory)
    except (MissingDataError, DamagedDataError):
        return False
    return True


def _fetch(entry: DataSet, directory: Path, report: Report) -> list[Path]:
    """All that is downloaded is unpacked and checked before the first file is written."""
    unpack = {"cifar10": _cifar10_batches, "mnist": _mnist_file}.get(entry.name, _table)
    contents: dict[str, bytes] = {}
    downloads: list[Path] = []
    for address, name in _addresses(entry):
        download = _obtain(address, directory / "downloads" / name, entry, report)
        downloads.append(download)
        try:
            check_size(download.stat().st_size, "it")
            contents |= unpack(entry, download)
        except _DAMAGES as error:
            raise refused(entry, directory, download, str(error)) from error
    for relative, content in contents.items():
        write_atomically(directory / relative, content)
    for download in downloads:
        download.unlink()
    return [directory / relative for relative in contents]


def _addresses(entry: DataSet) -> list[tuple[str, str]]:
    """What is downloaded, with the names that it has until it is unpacked."""
    if entry.name == "mnist":
        names = [PurePosixPath(relative).name for relative in entry.files]
        return [(f"{entry.address}/{name}", name) for name in names]
    suffix = next((suffix for suffix in (".zip", ".tar.gz") if entry.address.endswith(suffix)), ".txt")
    return [(entry.address, f"{entry.name}{suffix}")]


def _table(entry: DataSet, download: Path) -> dict[str, bytes]:
    if download.suffix == ".txt":
        with download.open("rb") as text:
            return _packed(entry, text)
    with zipfile.ZipFile(download) as archive:
        _refuse_escapes(archive.namelist())
        if YEAR_MEMBER not in archive.namelist():
            raise DamagedDataError(f"there is no {YEAR_MEMBER} in it")
        check_size(archive.getinfo(YEAR_MEMBER).file_size, f"{YEAR_MEMBER} in it")
        with archive.open(YEAR_MEMBER) as text:
            found = hashlib.file_digest(text, "sha256").hexdigest()  # type: ignore[arg-type]
        if entry.address_checksum not in (None, found):
            raise DamagedDataError(f"the checksum of the text in it is {found}, expected {entry.address_checksum}")
        with archive.open(YEAR_MEMBER) as text:
            return _packed(entry, text)


def _packed(entry: DataSet, text: IO[bytes]) -> dict[str, bytes]:
    """A table of text becomes an npz file."""
    (relative,) = entry.files
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **parse_table(entry, text))  # type: ignore[arg-type]
    return {relative: buffer.getvalue()}


def _cifar10_batches(entry: DataSet, download: Path) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    with tarfile.open(download, "r:gz") as archive:
        total = 0
        for member in archive:  # one after the other: to get behind a member is to unpack it
            total += member.size
            check_size(total, f"what it holds up to {member.name!r}")
            _refuse_escapes([member.name])
            if not (member.isfile() or member.isdir()):
                raise DamagedDataError(f"it holds {member.name!r}, which is neither a file nor a folder")
            if member.name in entry.files and (file := archive.extractfile(member)) is not None:
                contents[member.name] = file.read()
    for relative, wanted in entry.files.items():
        if relative not in contents:
            raise DamagedDataError(f"there is no {relative} in it")
        if (found := hashlib.sha256(contents[relative]).hexdigest()) != wanted:
            raise DamagedDataError(f"the checksum of {relative} in it is {found}, expected {wanted}")
    return contents


def _mnist_file(entry: DataSet, download: Path) -> dict[str, bytes]:
    relative, content = f"mnist/{download.name}", download.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != entry.files[relative]:
        raise DamagedDataError(f"its checksum is {found}, expected {entry.files[relative]}")
    return {relative: content}


def _obtain(address: str, destination: Path, entry: DataSet, report: Report) -> Path:
    """The file at `destination`: as it lies there, else downloaded whole."""
    if destination.is_file():
        return destination
    clear_unfinished(destination)
    try:
        content = _downloaded(address, partial(report, destination.name))
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, DamagedDataError) as error:
        reason = getattr(error, "reason", None) or error
        command = fetch_command(entry, destination.parent.parent)
        raise FetchError(
            f"could not download {address}: {reason}. Try again, or get the file some other way, put it at "
            f"{destination} and run `{command}` again"
        ) from error
    write_atomically(destination, content)
    return destination


def _downloaded(address: str, report: Callable[[int, int | None], None]) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "noisygrad"})
    with urllib.request.urlopen(request, timeout=_SECONDS_OF_SILENCE) as response:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() and len(length) < 20 else None
        done, blocks = 0, list[bytes]()
        check_size(total or 0, "what is there")
        report(done, total)
        # read(n) ends without a word where a connection breaks off: the length must be checked.
        while block := response.read(_BLOCK):
            blocks.append(block)
            done += len(block)
            check_size(done, "what comes")
            report(done, total)
    if total is not None and done != total:
        raise ConnectionError(f"the connection closed after {done} of {total} bytes")
    return b"".join(blocks)


def _refuse_escapes(names: list[str]) -> None:
    """An archive that tries to write outside its folder is not the official one, whatever else it holds."""
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in name:
            raise DamagedDataError(f"it holds {name!r}, a path that leads out of its folder")


def parse_table(entry: DataSet, lines: Iterable[bytes]) -> dict[str, NDArray[np.float64]]:
    """The checked arrays of a table, from the lines of its official text.

    The nine sets with standard splits are numbers between blanks: the features, then the target, then for naval the
    turbine's decay. Year has commas, and its target comes first.

    Raises `DamagedDataError` where the text is not that of the data set.
    """
    year = entry.name == "year"
    try:
        with warnings.catch_warnings():
            # An empty text is an error below; numpy only warns.
            warnings.simplefilter("ignore", UserWarning)
            numbers = np.loadtxt(lines, delimiter="," if year else None, comments=None, ndmin=2, encoding="utf-8")
    except ValueError as error:
        raise DamagedDataError(f"it is not a table of numbers ({error})") from error
    extra = 1 + (entry.name == "naval")
    if numbers.shape[1] != entry.features + extra:
        raise DamagedDataError(f"it has {numbers.shape[1]} columns, expected {entry.features + extra}")
    if year:
        arrays = {"x": numbers[:, 1:], "y": numbers[:, 0]}
    else:
        arrays = {"x": numbers[:, : entry.features], "y": numbers[:, entry.features]}
    if entry.name == "naval":
        arrays["turbine_decay"] = numbers[:, entry.features + 1]
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    check_arrays(entry, arrays)
    return arrays
