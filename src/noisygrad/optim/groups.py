"""Param groups: patterns of parameter names with settings of their own, checked when made and before every step."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from noisygrad.optim.options import fraction, positive

GROUP_OPTIONS = ("lr", "momentum", "damping", "noise")


class GroupPatterns:
    """Which group each parameter is in: that of the first pattern that matches its name, else 0, with the defaults."""

    def __init__(self, groups: Mapping[str, Mapping[str, Any]] | None, defaults: dict[str, Any]) -> None:
        groups = {} if groups is None else groups
        if not isinstance(groups, Mapping) or not all(isinstance(own, Mapping) for own in groups.values()):
            raise TypeError(
                'groups must map patterns of names to dictionaries of settings, such as {"head.*": {"lr": 1e-3}}; '
                f"got {groups!r}"
            )
        named = [("*", {}), *groups.items()]
        self._patterns = [pattern for pattern, _ in named]
        self.settings = [_checked(pattern, {**defaults, **own}) for pattern, own in named]

    def of(self, name: str) -> int:
        """The number of the parameter's group."""
        return next((i for i, p in enumerate(self._patterns) if i and fnmatch.fnmatchcase(name, p)), 0)

    def param_groups(self, parameters: Mapping[str, nn.Parameter], used: Sequence[int]) -> list[dict[str, Any]]:
        """What `torch.optim.Optimizer` is given; raises for a pattern that is not among the groups that are used."""
        for index in set(range(1, len(self._patterns))) - set(used):
            raise ValueError(f"the pattern {self._patterns[index]!r} in groups matches no trainable parameter")
        mine = {name: self.of(name) for name in parameters}
        return [
            {"params": [parameters[name] for name in parameters if mine[name] == index], **self.settings[index]}
            for index in used
        ]


def check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise for a learning rate that a user or a scheduler has made senseless since; a GPU's tensor is not waited for.

    0 is a start that schedules have.
    """
    for group in groups:
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.item() if lr.device.type == "cpu" else 0.0
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"lr of a param group must be a number of at least 0 and finite; it was set to {lr!r}")


def _checked(pattern: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` if they can be those of a param group, else a ValueError that names what is wrong."""
    unknown = set(settings) - set(GROUP_OPTIONS)
    if unknown:
        raise ValueError(
            f"group {pattern!r}: unknown options {sorted(unknown)}; possible are {', '.join(GROUP_OPTIONS)}"
        )
    lr = settings["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        raise ValueError(f"lr must be a number or a tensor without dimensions, got one of shape {list(lr.shape)}")
    positive("lr", float(lr) if isinstance(lr, Tensor) else lr)
    fraction("momentum", settings["momentum"])
    if not isinstance(settings["damping"], Real) or not 0 <= float(settings["damping"]) < math.inf:
        raise ValueError(f"damping must be at least 0, got {settings['damping']!r}")
    if not isinstance(settings["noise"], bool):
        raise ValueError(f"noise must be True or False, got {settings['noise']!r}")
    return settings
