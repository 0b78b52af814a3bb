"""Files that are whole or not there: atomic writes, and archives of tensors with a header.

An archive is one safetensors file: tensors by name, and a JSON header in its metadata under the archive's kind. Nothing
in it is ever unpickled.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader, and a run killed at any moment, sees the old one or the whole new one."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; a result is an ordinary file.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_archive(path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a header with a `format` number as one archive of that kind."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(own, metadata={f"noisygrad_{kind}": json.dumps(header)}))


def read_archive(
    path: str | Path, kind: str, newest: int, error: type[ValueError] = ValueError
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of an archive of that kind.

    Raises FileNotFoundError, or `error` for a file that is truncated, of another kind, or of a format above `newest`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(f"noisygrad_{kind}")
            if text is None:
                raise error(f"{path} is a safetensors file, but not a noisygrad {kind}")
            try:
                header = json.loads(text)
            except ValueError:
                header = None
            if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] < 1:
                raise error(f"{path} has no format number in its header: it was not written by noisygrad")
            if header["format"] > newest:
                raise error(
                    f"{path} has format {header['format']}, this noisygrad reads up to {newest}: upgrade noisygrad"
                )
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as reason:
        raise error(f"{path} is truncated or not a safetensors file ({reason})") from reason


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """An entry in which two mappings differ, in words."""
    name = min(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return f"{name!r} is {theirs.get(name, 'absent')} in the file and {ours.get(name, 'absent')} here"
