"""A run that can be taken up again: one safetensors file, written atomically, with nothing pickled in it.

States are nested dictionaries and lists of tensors and numbers. Tensors go into the file under the path that leads to
them (`optimizer/tensors/mean`); everything around them is JSON in the header.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from noisygrad.archive import converts, difference, not_finite, read_archive, write_archive

FORMAT = 1
_MARK = "\0"
"""First character of the keys that stand for something JSON does not have; no name of ours begins with it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, that belongs to something else, or that would be worth nothing."""


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
    Raises TypeError, naming the place, for anything else in a state, and CheckpointError where the model or the
    optimiser has NaN or infinite numbers (infinite ones in a buffer, such as a mask, are none of these); a file that is
    there stays as it is.
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part is not None}
    for name in state.keys() & {"model", "optimizer"}:
        if bad := _not_finite(state[name], name, model):
            raise CheckpointError(f"{bad!r} has NaN or infinite entries: nothing is written to {path}")
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

    Raises FileNotFoundError, or CheckpointError (a ValueError) for a file that is truncated, damaged, no checkpoint, of
    a newer format or of something else, or that has NaN or infinite numbers where the model or the optimiser must have
    none. Whatever is raised, nothing has changed then.
    """
    header, tensors = read_archive(path, "checkpoint", FORMAT, CheckpointError)
    try:
        state: dict[str, Any] = dict(_decode(header["state"], tensors))
        extra: dict[str, Any] = dict(state["extra"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header does not tell what it holds ({error})") from error
    parts = {"scheduler": scheduler, "optimizer": optimizer, "model": model}
    given = {name: part for name, part in parts.items() if part is not None}
    for name in given:
        if name not in state:
            raise CheckpointError(f"{path} holds no state of the {name}: it was saved without `{name}=`")
        if not isinstance(state[name], dict):
            raise CheckpointError(f"{path} is damaged: its state of the {name} is a {type(state[name]).__name__}")
    if model is not None:
        _check_model(path, state["model"], model.state_dict())
    for name in given:
        if name != "scheduler" and (bad := _not_finite(state[name], name, model)):
            raise CheckpointError(f"{path} is damaged: {bad!r} has NaN or infinite entries")
    _load_all(path, given, state)
    return extra


def _load_all(path: str | Path, parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load all of them, or none: what has changed when one fails is given its earlier state."""
    before = {name: _kept(_state_of(part)) for name, part in parts.items()}
    loading = ""
    try:
        for loading, part in parts.items():
            part.load_state_dict(state[loading])
    except BaseException as error:
        for name, part in parts.items():
            if not _equal(_state_of(part), before[name]):
                with suppress(ValueError):  # what is worth nothing, as of a diverged training, stays away
                    part.load_state_dict(before[name])
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{path} does not fit the {loading} that is to take it up: {error}") from error


def _state_of(part: Stateful) -> dict[str, Any]:
    """Its state, be it that of a training that went bad, of which it says so once: what is loaded replaces it."""
    try:
        return part.state_dict()
    except ArithmeticError:
        return part.state_dict()


def _check_model(path: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise unless the tensors of a model's state are of our shapes, and of types that can stand in their place."""
    there, here = _tensors(theirs), _tensors(ours)
    their_shapes, our_shapes = ({n: tuple(t.shape) for n, t in found.items()} for found in (there, here))
    if their_shapes != our_shapes:
        raise CheckpointError(f"{path} belongs to another model: {difference(their_shapes, our_shapes)}")
    if other := [name for name in there if not converts(there[name], here[name])]:
        types = ({name: found[name].dtype for name in other} for found in (there, here))
        raise CheckpointError(f"{path} belongs to another model, or is damaged: {difference(*types)}")


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries and lists, by its place."""
    if not isinstance(value, Mapping | list | tuple):
        yield place, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(item, f"{place}/{key}")


def _kept(value: Any) -> Any:
    """A copy whose tensors are on the CPU, where those of a file are too: a GPU may have no room for them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    return [_kept(item) for item in value] if type(value) is list else copy.deepcopy(value)


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are surely equal."""
    mine, theirs = dict(_leaves(one, "")), dict(_leaves(other, ""))

    def same(a: Any, b: Any) -> bool:
        return a.cpu().equal(b) if isinstance(a, Tensor) else isinstance(a, int | float | str | None) and bool(a == b)

    return mine.keys() == theirs.keys() and all(same(a, theirs[place]) for place, a in mine.items())


def _not_finite(state: Any, part: str, model: nn.Module | None) -> str | None:
    """The place of a tensor with NaN or infinite entries, but for infinite ones that the model's buffers have too."""
    tensors = {place: leaf for place, leaf in _leaves(state, part) if isinstance(leaf, Tensor)}
    buffers = {} if model is None else {f"model/{name}": buffer for name, buffer in model.named_buffers()}
    for place, own in _leaves({} if model is None else model.state_dict(), "model"):
        if place in tensors and isinstance(own, Tensor):  # a number may be too large for a narrower type
            tensors[place] = tensors[place].to(own.dtype)
    return not_finite(tensors, buffers)


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
