"""A run that can be taken up again: one safetensors file, written atomically, with nothing pickled in it.

States are nested dictionaries and lists of tensors and numbers. Tensors go into the file under the path that leads to
them (`optimizer/tensors/mean`); everything around them is JSON in the header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from noisygrad.archive import difference, read_archive, write_archive

FORMAT = 1
_MARK = "\0"
"""First character of the keys that stand for something JSON does not have; no name of ours begins with it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that belongs to something else."""


class Stateful(Protocol):
    """An optimiser, a scheduler, or anything else with a state."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state up again."""


def save_checkpoint(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the states to one file; a reader, and a run killed at any moment, sees the old file or the whole new one.

    `extra` is a dictionary of yours: tensors, numbers, strings, lists, tuples and dictionaries, nested at will.
    Raises TypeError, naming the place, for anything else in a state.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part is not None}
    state["extra"] = dict(extra or {})
    tensors: dict[str, Tensor] = {}
    header = {"format": FORMAT, "state": {name: _encode(value, name, tensors) for name, value in state.items()}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_archive(path, "checkpoint", header, tensors)


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
) -> dict[str, Any]:
    """Bring back the states of what is given, and return `extra`.

    Raises FileNotFoundError, or CheckpointError (a ValueError) for a file that is truncated, no checkpoint, of a newer
    format or of another model; the model is looked at before anything changes.
    """
    header, tensors = read_archive(path, "checkpoint", FORMAT, CheckpointError)
    state: dict[str, Any] = _decode(header["state"], tensors)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name, part in parts.items():
        if part is not None and name not in state:
            raise CheckpointError(f"{path} holds no state of the {name}: it was saved without `{name}=`")
    if model is not None:
        own, theirs = (
            {name: tuple(t.shape) for name, t in tensors.items() if isinstance(t, Tensor)}
            for tensors in (model.state_dict(), state["model"])
        )
        if own != theirs:
            raise CheckpointError(f"{path} belongs to another model: {difference(theirs, own)}")
    for name in ("optimizer", "scheduler"):
        part = parts[name]
        if part is None:
            continue
        try:
            part.load_state_dict(state[name])
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit the {name} that is to take it up: {error}") from error
    if model is not None:
        model.load_state_dict(state["model"])
    extra: dict[str, Any] = state["extra"]
    return extra


def _encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors` under their place."""
    if isinstance(value, Tensor):
        name = place
        while name in tensors:  # two keys of a dictionary that read alike, such as 1 and "1"
            name += "'"
        tensors[name] = value
        return {_MARK + "tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str | int | float | bool)]:
            raise TypeError(f"a checkpoint's dictionaries have strings or numbers as keys; {place} has {wrong[0]!r}")
        pairs = [[key, _encode(item, f"{place}/{key}", tensors)] for key, item in value.items()]
        if isinstance(value, Counter):
            return {_MARK + "counter": pairs}
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return dict(pairs)
        return {_MARK + "dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_MARK + "tuple": items}
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, lists and dictionaries; {place} is a {type(value).__name__}"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK + "tensor" in value:
        return tensors[value[_MARK + "tensor"]]
    if _MARK + "tuple" in value:
        return tuple(_decode(item, tensors) for item in value[_MARK + "tuple"])
    for kind, make in (("dict", dict), ("counter", Counter)):
        if _MARK + kind in value:
            return make({key: _decode(item, tensors) for key, item in value[_MARK + kind]})
    return {key: _decode(item, tensors) for key, item in value.items()}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Torch's own generators, which dropout and a DataLoader without a generator draw from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Back to a `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
