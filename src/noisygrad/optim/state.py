"""An optimiser's state as tensors and numbers in nested dictionaries, and back.

`torch.optim.Optimizer.load_state_dict` would cast every tensor to its parameter's type; here factors keep their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from noisygrad.archive import converts, not_finite
from noisygrad.families.base import TensorRecord
from noisygrad.optim.generators import part_generators_
from noisygrad.optim.options import GROUP_OPTIONS, check_groups
from noisygrad.optim.update import Update
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.faults import whole_number
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure, copied
from noisygrad.posterior.weights import FlatWeights

FORMAT = 4
_CHANGED = "its tensors are under `state` now, where torch's tools expect them"
Key = tuple[int, str]
"""The number of the parameter that a tensor of the state is kept under, and a name."""
_PARTS = {"format", "family", "steps", "settings", "rank", "order", "state", "generators", "likelihood", "param_groups"}


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What an optimiser's state is made of, to be saved and loaded."""

    kind: str
    """The optimiser's class."""
    structure: Structure
    parts: Update
    priors: BlockPriors
    same_draw: bool

    def save(self, param_groups: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
        """See `NoisyOptimizer.state_dict`; the tensors are copies."""
        return {
            "format": FORMAT,
            "family": self.structure.family.name,
            "steps": steps,
            "settings": self._settings(),
            "rank": self.parts.ranks.rank,
            "order": self._order(param_groups),
            "state": self._tensors(param_groups),
            "generators": {str(i): generator.get_state() for i, generator in enumerate(self.parts.weights.generators)},
            "likelihood": {name: _plain(tensor) for name, tensor in self.parts.likelihood.state_dict().items()},
            "param_groups": [
                {**{name: _plain(value) for name, value in group.items()}, "params": numbers}
                for group, numbers in zip(param_groups, _numbers(param_groups), strict=True)
            ],
        }

    def _tensors(self, param_groups: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
        """By a parameter's number, as torch's tools expect them: what belongs to a block is under its first."""
        found: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.structure.parameters))}
        number_of = {place: number for number, place in enumerate(self._order(param_groups))}
        for entry in self._entries():
            for (index, name), tensor in entry.read().items():
                found[number_of[index]][name] = tensor
        return found

    def load(self, state: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> int:
        """See `NoisyOptimizer.load_state_dict`; everything is checked before anything changes. Returns the steps."""
        try:
            theirs = self._checked(state, param_groups)
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
            raise ValueError(f"the state is damaged ({type(error).__name__}: {error})") from error
        self.parts.likelihood.load_state_dict(state["likelihood"])
        with torch.no_grad():
            for entry in self._entries():
                if not entry.is_prior:
                    entry.write_(theirs)
        for index, generator in enumerate(self.parts.weights.generators):
            generator.set_state(state["generators"][str(index)].cpu())
        part_generators_(self.parts.weights.generators, state["rank"], self.parts.ranks, same_draw=self.same_draw)
        for group, saved in zip(param_groups, state["param_groups"], strict=True):
            for name, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)  # the tensor that a scheduler or a captured graph knows
                elif name != "params":
                    group[name] = _plain(value)
        return int(state["steps"])

    def _checked(self, state: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[Key, Tensor]:
        """The tensors of a state that fits."""
        self._check_kind(state)
        order, theirs_numbers = self._order(param_groups), [list(group["params"]) for group in state["param_groups"]]
        if list(state["order"]) != order or theirs_numbers != _numbers(param_groups):
            raise ValueError("the state has other param groups, the same in another order, or is of another model")
        if lost := {name for group in state["param_groups"] for name in GROUP_OPTIONS if name not in group}:
            raise ValueError(f"the state's param groups lack {', '.join(sorted(lost))}: it is damaged")
        check_groups(state["param_groups"])
        for group, saved in zip(param_groups, state["param_groups"], strict=True):
            for name, value in saved.items():
                if (
                    isinstance(value, Tensor)
                    and isinstance(own := group.get(name), Tensor)
                    and value.shape != own.shape
                ):
                    raise ValueError(f"{name} of the state's param groups has the shape {list(value.shape)}")
        entries = self._entries()
        ours = {key: tensor for entry in entries for key, tensor in entry.like().items()}
        theirs = {(order[int(number)], name): t for number, own in state["state"].items() for name, t in own.items()}
        shapes = [{(key, tensor.shape) for key, tensor in tensors.items()} for tensors in (ours, theirs)]
        wrong = sorted({name for (_, name), _ in shapes[0] ^ shapes[1]})
        if wrong:
            raise ValueError(
                f"the state belongs to another model, other groups, another damping or momentum mode: "
                f"{', '.join(wrong[:4])} {'differs' if len(wrong) == 1 else 'differ'} in shape or presence"
            )
        other = {name for (index, name), own in ours.items() if not converts(theirs[index, name], own)}
        noise = self.parts.likelihood.state_dict().items()
        other |= {name for name, own in noise if not converts(state["likelihood"].get(name, own), own)}
        if other:
            raise ValueError(f"the state is damaged: numbers of another type in {', '.join(sorted(other)[:4])}")
        priors = {key: tensor for entry in entries if entry.is_prior for key, tensor in entry.read().items()}
        if any(not torch.equal(tensor.cpu(), theirs[key].cpu()) for key, tensor in priors.items()):
            raise ValueError(
                "the state belongs to another prior: construct the optimiser with the prior it was saved with"
            )
        numbers = {f"{name} of parameter {number}": tensor for (number, name), tensor in theirs.items()}
        numbers |= {f"likelihood/{n}": value for n, value in state["likelihood"].items() if isinstance(value, Tensor)}
        if bad := not_finite(numbers, {}):
            raise ValueError(
                f"the state has NaN or infinite numbers in {bad!r}: it is damaged, or its training diverged"
            )
        if len(state["generators"]) != len(self.parts.weights.generators):
            raise ValueError("the state has another number of replicas")
        for index, generator in enumerate(self.parts.weights.generators):
            torch.Generator(generator.device).set_state(state["generators"][str(index)].cpu())
        for name in ("steps", "rank"):
            whole_number(name, state[name], 0)
        try:
            copy.deepcopy(self.parts.likelihood).load_state_dict(state["likelihood"])  # a failed load is half done
        except RuntimeError as error:
            raise ValueError(f"the state belongs to another likelihood: {error}") from error
        return theirs

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Raise for what is no state of an optimiser like this one."""
        if isinstance(state.get("format"), int) and state["format"] < FORMAT:
            raise ValueError(
                f"the state has format {state['format']}, of an earlier noisygrad; this one reads {FORMAT}: {_CHANGED}"
            )
        if missing := _PARTS - set(state):
            raise ValueError(
                f"this is not the state of a noisygrad optimiser: {', '.join(sorted(missing))} missing. A tool that "
                "keeps only `state` and `param_groups` loses what resuming needs: save optimizer.state_dict() whole"
            )
        if state["format"] != FORMAT:
            raise ValueError(f"the state has format {state['format']!r}, this noisygrad reads {FORMAT}: upgrade it")
        family = self.structure.family.name
        if state["family"] != family:
            raise ValueError(
                f"the state is of the family {state['family']!r}, this optimiser is {family!r} ({self.kind}): load it "
                "into the optimiser that saved it"
            )
        ours = self._settings()
        other = [
            f"{name} is {state['settings'].get(name, 'not recorded')} there, {value} here"
            for name, value in ours.items()
            if name not in state["settings"] or state["settings"][name] != value
        ]
        if other:
            raise ValueError(f"the state belongs to other settings: {'; '.join(other)}")

    def _entries(self) -> list[_Vector | _Record]:
        """All tensors of the state. The mean is among them, for parameters too narrow to hold all its digits."""
        structure, momentum, covariance = self.structure, self.parts.algorithm.momentum, self.parts.algorithm.covariance
        mean = self.parts.weights.mean.flat
        found: list[_Vector | _Record] = [
            _Vector("mean", mean, structure),
            _Vector("prior_mean", self.priors.mean, structure, is_prior=True),
            _Record(0, "updates", _Single(covariance.fisher.updates)),
            _Record(0, "seen", _Single(covariance.fisher.seen)),
            _Record(0, "bound", _Single(covariance.bound)),
        ]
        for name, tensor in momentum.tensors().items():
            like_weights = tensor.shape == mean.shape
            key = f"momentum/{name}"
            found.append(_Vector(key, tensor, structure) if like_weights else _Record(0, key, _Single(tensor)))
        numbers = {name: index for index, name in enumerate(structure.parameters)}
        for block in structure.blocks:
            owner = block if block.follows_memory else None
            index = numbers[block.units[0].slots[0].parameter]
            records = {
                "statistics/": covariance.fisher.statistics[block.name],
                **{f"factors/{part}.": r for part, r in covariance.factors[block.name].records().items()},
            }
            found += [_Record(index, f"{block.name}/{part}", record, owner) for part, record in records.items()]
            prior = self.priors.blocks[block.name]
            found.append(_Record(index, f"{block.name}/prior/", prior, owner, is_prior=True))
        return found

    def _order(self, param_groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """The place in the model of each parameter, group after group: torch numbers them in this order."""
        places = {id(p): i for i, p in enumerate(self.structure.parameters.values())}
        return [places[id(p)] for group in param_groups for p in group["params"]]

    def _settings(self) -> dict[str, Any]:
        """What the meaning of the tensors hangs on."""
        names = ("num_data", "kl_weight", "damping_mode", "safeguard", "momentum_mode")
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.parts.likelihood.config().items())
        return {name: getattr(self.parts.options, name) for name in names} | {
            "likelihood": f"{type(self.parts.likelihood).__name__}({arguments})"
        }


@dataclass
class _Single(TensorRecord):
    """One tensor, without a name of its own."""

    tensor: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.tensor}


class _Vector:
    """A flat vector, parameter by parameter."""

    def __init__(self, name: str, flat: Tensor, structure: Structure, *, is_prior: bool = False) -> None:
        self._name, self._weights, self.is_prior = name, FlatWeights(structure, flat), is_prior
        self._keys = {parameter: (index, name) for index, parameter in enumerate(structure.parameters)}
        self._shapes = structure.shapes

    def like(self) -> dict[Key, Tensor]:
        """What `read` returns, without its numbers; nothing is copied for it."""
        empty = partial(torch.empty, dtype=self._weights.flat.dtype, device="meta")
        return {key: empty(self._shapes[parameter]) for parameter, key in self._keys.items()}

    def read(self) -> dict[Key, Tensor]:
        """Copies, every matrix as one tensor and every parameter row by row."""
        found = self._weights.as_dict(like_parameters=False)
        return {key: found[parameter] for parameter, key in self._keys.items()}

    def write_(self, tensors: Mapping[Key, Tensor]) -> None:
        """The inverse of `read`."""
        self._weights.load_dict_({parameter: tensors[key] for parameter, key in self._keys.items()})


class _Record:
    """The tensors of a record, all under the parameter of number `index`, their names behind `name`; read as a vector.

    `owner` is the block that knows in which order the numbers lie, if not in the usual one.
    """

    def __init__(
        self, index: int, name: str, record: TensorRecord, owner: Block | None = None, *, is_prior: bool = False
    ) -> None:
        self._index, self._name, self._record, self._owner, self.is_prior = index, name, record, owner, is_prior

    def like(self) -> dict[Key, Tensor]:
        return {self._key(name): tensor for name, tensor in self._like().tensors().items()}

    def read(self) -> dict[Key, Tensor]:
        whole = self._record.unpacked().tensors()
        return {self._key(name): copied(tensor, self._owner) for name, tensor in whole.items()}

    def write_(self, tensors: Mapping[Key, Tensor]) -> None:
        like = self._like()
        theirs = {name: tensors[self._key(name)] for name in like.tensors()}
        if self._owner is not None:
            theirs = {name: self._owner.to_memory(tensor) for name, tensor in theirs.items()}
        self._record.load_unpacked_(like.with_tensors(theirs))

    def _key(self, name: str) -> Key:
        return self._index, self._name + name

    def _like(self) -> TensorRecord:
        return self._record.map(lambda tensor: tensor.to("meta")).unpacked()


def blocks_of_parameters(structure: Structure) -> dict[Tensor, dict[str, list[str]]]:
    """What `optimizer.state` says of each parameter: its blocks. Were it empty, torch's tools would try a step."""
    found: dict[Tensor, dict[str, list[str]]] = {}
    for block in structure.blocks:
        for name in dict.fromkeys(slot.parameter for unit in block.units for slot in unit.slots):
            found.setdefault(structure.parameters[name], {"blocks": []})["blocks"].append(block.name)
    return found


def _numbers(param_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of each group's parameters, as torch gives them."""
    counter = count()
    return [[next(counter) for _ in group["params"]] for group in param_groups]


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
