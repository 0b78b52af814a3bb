"""An optimiser's state as tensors and numbers in nested dictionaries, and back.

`torch.optim.Optimizer.load_state_dict` would cast every tensor to its parameter's type; here factors keep their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noisygrad.families.base import TensorRecord
from noisygrad.optim.generators import part_generators_
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.structure import Structure, copied

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer

FORMAT = 3
"""1 kept roots where now there are inverses; 2 kept both of a diagonal for draws and for steps."""


def save_state(optimizer: NoisyOptimizer) -> dict[str, Any]:
    """See `NoisyOptimizer.state_dict`; the tensors are copies."""
    optimizer.guard.check()
    return {
        "format": FORMAT,
        "family": optimizer.family,
        "steps": optimizer._steps,
        "settings": _settings(optimizer),
        "rank": optimizer.ranks.rank,
        "tensors": {name: tensor for entry in _entries(optimizer) for name, tensor in entry.read().items()},
        "generators": {str(i): generator.get_state() for i, generator in enumerate(optimizer.generators)},
        "likelihood": {name: tensor.detach().clone() for name, tensor in optimizer.likelihood.state_dict().items()},
        "param_groups": [
            {
                **{name: _plain(value) for name, value in group.items() if name != "params"},
                "params": places,
            }
            for group, places in zip(optimizer.param_groups, _places(optimizer), strict=True)
        ],
    }


def load_state(optimizer: NoisyOptimizer, state: Mapping[str, Any]) -> None:
    """See `NoisyOptimizer.load_state_dict`; everything is checked before anything changes."""
    missing = {
        "format",
        "family",
        "steps",
        "settings",
        "rank",
        "tensors",
        "generators",
        "likelihood",
        "param_groups",
    } - set(state)
    if missing:
        raise ValueError(f"this is not the state of a noisygrad optimiser: {', '.join(sorted(missing))} missing")
    if state["format"] > FORMAT:
        raise ValueError(f"the state has format {state['format']}, this noisygrad reads up to {FORMAT}: upgrade it")
    if state["format"] < FORMAT:
        raise ValueError(
            f"the state has format {state['format']}, of an earlier noisygrad; this one reads {FORMAT}. A file of the "
            "posterior itself (posterior.save) is still good"
        )
    if state["family"] != optimizer.family:
        raise ValueError(
            f"the state is of the family {state['family']!r}, this optimiser is {optimizer.family!r} "
            f"({type(optimizer).__name__}): load it into the optimiser that saved it"
        )
    ours = _settings(optimizer)
    other = [
        f"{name} is {state['settings'].get(name, 'not recorded')} there, {value} here"
        for name, value in ours.items()
        if name not in state["settings"] or state["settings"][name] != value
    ]
    if other:
        raise ValueError(f"the state belongs to other settings: {'; '.join(other)}")
    entries = _entries(optimizer)
    shapes = {name: shape for entry in entries for name, shape in entry.shapes().items()}
    theirs = dict(state["tensors"])
    wrong = [
        name
        for name in shapes.keys() | theirs.keys()
        if name not in shapes or name not in theirs or shapes[name] != theirs[name].shape
    ]
    if wrong:
        raise ValueError(
            f"the state belongs to another model, other groups or another damping: {', '.join(sorted(wrong)[:4])} "
            f"{'differs' if len(wrong) == 1 else 'differ'} in shape or presence"
        )
    priors = {name: tensor for entry in entries if entry.is_prior for name, tensor in entry.read().items()}
    if any(not torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in priors.items()):
        raise ValueError("the state belongs to another prior: construct the optimiser with the prior it was saved with")
    if len(state["generators"]) != len(optimizer.generators):
        raise ValueError("the state has another number of replicas")
    if [list(group["params"]) for group in state["param_groups"]] != _places(optimizer):
        raise ValueError("the state has other param groups, or the same in another order")
    try:
        copy.deepcopy(optimizer.likelihood).load_state_dict(state["likelihood"])  # a failed load is half done
    except RuntimeError as error:
        raise ValueError(f"the state belongs to another likelihood: {error}") from error
    optimizer.likelihood.load_state_dict(state["likelihood"])
    with torch.no_grad():
        for entry in entries:
            if not entry.is_prior:
                entry.write_(theirs)
    for index, generator in enumerate(optimizer.generators):
        generator.set_state(state["generators"][str(index)].cpu())
    part_generators_(optimizer.generators, state["rank"], optimizer.ranks, same_draw=optimizer._same_draw)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for name, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # the tensor that a scheduler or a captured graph knows
            elif name != "params":
                group[name] = _plain(value)
    optimizer._steps = int(state["steps"])
    optimizer._consume()


@dataclass
class _Single(TensorRecord):
    """One tensor, without a name of its own."""

    tensor: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.tensor}


@dataclass
class _Entry:
    """Tensors of the state: a record's, by this name and their own."""

    name: str
    record: TensorRecord
    owner: Structure | Block | None = None
    """What knows in which order the numbers lie, if not in the usual one."""

    @property
    def is_prior(self) -> bool:
        return self.name == "prior_mean" or "/prior/" in self.name

    def shapes(self) -> dict[str, torch.Size]:
        """Of what `read` returns; nothing is copied for it."""
        return {self.name + name: tensor.shape for name, tensor in self._like().tensors().items()}

    def read(self) -> dict[str, Tensor]:
        """Copies, every matrix as one tensor and every parameter row by row."""
        return {
            self.name + name: copied(tensor, self.owner) for name, tensor in self.record.unpacked().tensors().items()
        }

    def write_(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `read`."""
        like = self._like()
        theirs = {name: tensors[self.name + name] for name in like.tensors()}
        if self.owner is not None:
            theirs = {name: self.owner.to_memory(tensor) for name, tensor in theirs.items()}
        self.record.load_unpacked_(like.with_tensors(theirs))

    def _like(self) -> TensorRecord:
        return self.record.map(lambda tensor: tensor.to("meta")).unpacked()


def _entries(optimizer: NoisyOptimizer) -> list[_Entry]:
    """All tensors of the state. The mean is among them, for parameters too narrow to hold all its digits."""
    factors, structure = optimizer.factors, optimizer.structure
    found = [
        _Entry("mean", _Single(optimizer.mean.flat), structure),
        _Entry("momentum", _Single(optimizer.mean_step.momentum), structure),
        _Entry("momentum_weight", _Single(optimizer.mean_step.weight)),
        _Entry("updates", _Single(factors.updates)),
        _Entry("prior_mean", _Single(optimizer.priors.mean), structure),
    ]
    for block in factors.blocks:
        parts: dict[str, TensorRecord] = {
            "statistics/": factors.statistics[block.name],
            "prior/": optimizer.priors.blocks[block.name],
            **{f"factors/{part}.": record for part, record in factors.records(block).items()},
        }
        owner = block if block.family == "diagonal" else None
        found += [_Entry(f"{block.name}/{part}", record, owner) for part, record in parts.items()]
    return found


def _places(optimizer: NoisyOptimizer) -> list[list[int]]:
    """The parameters of each param group, by their place in the model."""
    places = {id(p): i for i, p in enumerate(optimizer.structure.parameters.values())}
    return [[places[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _settings(optimizer: NoisyOptimizer) -> dict[str, Any]:
    """What the meaning of the tensors hangs on."""
    options, likelihood = optimizer.options, optimizer.likelihood
    names = ("num_data", "kl_weight", "damping_mode", "fisher_start", "momentum_mode")
    arguments = ", ".join(f"{name}={value!r}" for name, value in likelihood.config().items())
    return {name: getattr(options, name) for name in names} | {
        "likelihood": f"{type(likelihood).__name__}({arguments})"
    }


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
