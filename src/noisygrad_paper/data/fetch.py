"""Downloading: every file is whole and checked before it gets its name in the cache.

A download lies in the cache's folder `downloads` until it is unpacked, and is then removed. A file that a person has
put there by hand is used instead of downloading.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from noisygrad.archive import write_atomically
from noisygrad_paper.data.catalogue import DataSet, data_directory, data_set
from noisygrad_paper.data.files import (
    DamagedDataError,
    MissingDataError,
    check_images,
    fetch_command,
    read_arrays,
    refused,
)
from noisygrad_paper.data.raw import YEAR_MEMBER, parse_table

Report = Callable[[str, int, int | None], None]
"""Called while a file is downloaded: its name, the bytes so far, and the bytes in all where they are known."""

_BLOCK = 1 << 18
_SECONDS_OF_SILENCE = 60
_STALE_SECONDS = 86400


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
        written = _UNPACK.get(entry.name, _fetch_table)(entry, directory, report or (lambda name, done, total: None))
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


def _fetch_table(entry: DataSet, directory: Path, report: Report) -> list[Path]:
    """A table of text becomes an npz file."""
    suffix = ".zip" if entry.address.endswith(".zip") else ".txt"
    download = _obtain(entry.address, directory / "downloads" / f"{entry.name}{suffix}", entry, report)
    try:
        if suffix == ".zip":
            with zipfile.ZipFile(download) as archive:
                _refuse_escapes(archive.namelist())
                if YEAR_MEMBER not in archive.namelist():
                    raise DamagedDataError(f"there is no {YEAR_MEMBER} in it")
                with archive.open(YEAR_MEMBER) as text:
                    _check_text(entry, text)
                with archive.open(YEAR_MEMBER) as text:
                    arrays = parse_table(entry, text)
        else:
            with download.open("rb") as text:
                arrays = parse_table(entry, text)
    except (DamagedDataError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise refused(entry, directory, download, str(error)) from error
    (relative,) = entry.files
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(directory / relative, buffer.getvalue())
    download.unlink()
    return [directory / relative]


def _fetch_cifar10(entry: DataSet, directory: Path, report: Report) -> list[Path]:
    """The batches are taken out of the archive by name, and all checked before the first is written."""
    download = _obtain(entry.address, directory / "downloads" / "cifar10.tar.gz", entry, report)
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(download, "r:gz") as archive:
            members = archive.getmembers()
            _refuse_escapes([member.name for member in members])
            if odd := [member.name for member in members if not (member.isfile() or member.isdir())]:
                raise DamagedDataError(f"it holds {odd[0]!r}, which is neither a file nor a folder")
            for member in members:
                if member.name in entry.files and (file := archive.extractfile(member)) is not None:
                    contents[member.name] = file.read()
        for relative, wanted in entry.files.items():
            if relative not in contents:
                raise DamagedDataError(f"there is no {relative} in it")
            if (found := hashlib.sha256(contents[relative]).hexdigest()) != wanted:
                raise DamagedDataError(f"the checksum of {relative} in it is {found}, expected {wanted}")
    except (DamagedDataError, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise refused(entry, directory, download, str(error)) from error
    for relative, content in contents.items():
        write_atomically(directory / relative, content)
    download.unlink()
    return [directory / relative for relative in contents]


def _fetch_mnist(entry: DataSet, directory: Path, report: Report) -> list[Path]:
    """The four files are kept as they come; all are checked before the first gets its place."""
    downloads: dict[str, Path] = {}
    for relative, wanted in entry.files.items():
        name = PurePosixPath(relative).name
        download = _obtain(f"{entry.address}/{name}", directory / "downloads" / name, entry, report)
        if (found := hashlib.sha256(download.read_bytes()).hexdigest()) != wanted:
            raise refused(entry, directory, download, f"its checksum is {found}, expected {wanted}")
        downloads[relative] = download
    for relative, download in downloads.items():
        download.replace(directory / relative)
    return [directory / relative for relative in downloads]


_UNPACK: dict[str, Callable[[DataSet, Path, Report], list[Path]]] = {"cifar10": _fetch_cifar10, "mnist": _fetch_mnist}


def _obtain(address: str, destination: Path, entry: DataSet, report: Report) -> Path:
    """The file at `destination`: as it lies there, else downloaded whole."""
    if destination.is_file():
        return destination
    # What a killed run left; a younger one may belong to another process that is at work.
    for left in destination.parent.glob(f".{destination.name}.*.part"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            left.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            _download(address, file, lambda done, total: report(destination.name, done, total))
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; a cache may be shared.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(destination)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, _ShortError) as error:
        Path(temporary).unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or error
        command = fetch_command(entry, destination.parent.parent)
        raise FetchError(
            f"could not download {address}: {reason}. Try again, or get the file some other way, put it at "
            f"{destination} and run `{command}` again"
        ) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return destination


class _ShortError(Exception):
    """The connection closed before all was sent."""


def _download(address: str, file: IO[bytes], report: Callable[[int, int | None], None]) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "noisygrad"})
    with urllib.request.urlopen(request, timeout=_SECONDS_OF_SILENCE) as response:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        done = 0
        report(done, total)
        # read(n) ends without a word where a connection breaks off: the length must be checked.
        while block := response.read(_BLOCK):
            file.write(block)
            done += len(block)
            report(done, total)
    if total is not None and done != total:
        raise _ShortError(f"the connection closed after {done} of {total} bytes")


def _refuse_escapes(names: list[str]) -> None:
    """An archive that tries to write outside its folder is not the official one, whatever else it holds."""
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in name:
            raise DamagedDataError(f"it holds {name!r}, a path that leads out of its folder")


def _check_text(entry: DataSet, text: IO[bytes]) -> None:
    if entry.address_checksum is None:
        return
    found = hashlib.file_digest(text, "sha256").hexdigest()  # type: ignore[arg-type]
    if found != entry.address_checksum:
        raise DamagedDataError(f"the checksum of the text in it is {found}, expected {entry.address_checksum}")
