"""Files that are whole or not there: atomic writes, and archives of tensors with a header and a checksum.

An archive is one safetensors file: tensors by name, and in its metadata a JSON header under the archive's kind and the
SHA-256 of all bytes of the file, its own digits taken as zeros. Nothing in it is ever unpickled. The checksum is there
against damage, not against malice: whoever can write a file can write its checksum too.
"""

import glob
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

_CHECKSUM = "noisygrad_checksum"
_BEFORE = f'"{_CHECKSUM}":"'.encode()
"""What stands before the digits. Text that has it too has its quotation marks escaped."""
_ZEROS = b"0" * 64
_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

if sys.platform == "win32":
    import msvcrt

    def lock(descriptor: int, kind: Literal["shared", "exclusive"], *, wait: bool = True) -> None:
        """Lock an open file until it is closed, or its process ends; OSError where there are no locks."""
        # Windows locks bytes, and for readers too: one far behind the end hinders nobody but other lockers.
        os.lseek(descriptor, 2**40, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def lock(descriptor: int, kind: Literal["shared", "exclusive"], *, wait: bool = True) -> None:
        """Lock an open file until it is closed, or its process ends; OSError where there are no locks."""
        way = fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX
        fcntl.flock(descriptor, way if wait else way | fcntl.LOCK_NB)


def write_atomically(path: str | Path, data: bytes | bytearray) -> None:
    """Write a file so that a reader, and a run killed at any moment, sees the old one or the whole new one.

    What earlier writers of this file left that were killed is removed.
    """
    path = Path(path)
    clear_unfinished(path)
    handle, temporary = _temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes files that only their owner may read; a result is an ordinary file.
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
            if sys.platform == "win32":
                file.close()  # an open file keeps its name there
            Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def clear_unfinished(path: Path) -> None:
    """Remove what writers of this file left that were killed; what one at work writes is locked, and stays."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):  # its writer is at work, or another process removes it
            if sys.platform == "win32":
                left.unlink()  # which Windows refuses while the file is open
            else:
                with left.open("r+b") as file:
                    lock(file.fileno(), "exclusive", wait=False)
                    left.unlink()


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked as long as it is open."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        if sys.platform != "win32":
            with suppress(OSError):  # without locks nobody can take it for abandoned either
                lock(handle, "exclusive", wait=False)
        if Path(name).exists():  # else it was cleared before it was locked
            return handle, name
        os.close(handle)


def write_archive(path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a header with a `format` number as one archive of that kind."""
    metadata = {f"noisygrad_{kind}": json.dumps(header), _CHECKSUM: _ZEROS.decode()}
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    packed = safetensors.torch.save(copies, metadata=metadata)
    del copies  # else all is in memory a third time
    data = bytearray(packed)
    start = data.index(_BEFORE) + len(_BEFORE)
    data[start : start + len(_ZEROS)] = hashlib.sha256(data).hexdigest().encode()
    write_atomically(path, data)


def read_archive(
    path: str | Path, kind: str, newest: int, error: type[ValueError] = ValueError
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of an archive of that kind; its checksum is compared before anything in it is read.

    Raises FileNotFoundError, or `error` for a file that is cut off, damaged, of another kind, or of a format above
    `newest`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    data = Path(path).read_bytes()
    start = data.find(_BEFORE) + len(_BEFORE)
    signed = start >= len(_BEFORE)
    if signed and data[start : start + len(_ZEROS)] != _digest(data, start):
        raise error(f"{path} is truncated or damaged: its bytes do not have the checksum that was written with them")
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        text = (json.loads(data[8 : 8 + size]).get("__metadata__") or {}).get(f"noisygrad_{kind}")
    except (safetensors.SafetensorError, ValueError) as reason:
        raise error(f"{path} is truncated or not a safetensors file ({reason})") from reason
    if text is None:
        raise error(f"{path} is a safetensors file, but not a noisygrad {kind}")
    if not signed:
        raise error(f"{path} has no checksum: it is of an earlier noisygrad, or damaged. Save it again")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] < 1:
        raise error(f"{path} has no format number in its header: it was not written by noisygrad")
    if header["format"] > newest:
        raise error(f"{path} has format {header['format']}, this noisygrad reads up to {newest}: upgrade noisygrad")
    return header, tensors


def _digest(data: bytes, start: int) -> bytes:
    """SHA-256 of the bytes with zeros in place of the 64 at `start`."""
    view, found = memoryview(data), hashlib.sha256()
    for part in (view[:start], _ZEROS, view[start + len(_ZEROS) :]):
        found.update(part)
    return found.hexdigest().encode()


def not_finite(tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinite entries; infinity counts not where a constant of its name has it too.

    A mask of attention, for example, is a buffer with −inf in it.
    """
    for name, tensor in tensors.items():
        eighth = tensor.is_floating_point() and tensor.element_size() == 1  # torch has no isfinite for these
        wrong = ~(tensor.float() if eighth else tensor).isfinite()
        if name in constants:
            wrong &= tensor != constants[name].to(tensor.device)
        if bool(wrong.any()):
            return name
    return None


def converts(theirs: Tensor, ours: Tensor) -> bool:
    """Whether what is in a file may stand in our tensor's place: of its type, or floating like it."""
    return theirs.dtype == ours.dtype or {theirs.dtype, ours.dtype} <= _FLOATING


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """An entry in which two mappings differ, in words."""
    name = min(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return f"{name!r} is {theirs.get(name, 'absent')} in the file and {ours.get(name, 'absent')} here"
