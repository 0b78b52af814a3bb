"""Modules in another mode for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def with_attributes(modules: Iterable[nn.Module], **values: Any) -> Iterator[None]:
    """Attributes of all these modules have other values inside, and each its own again outside."""
    before = [(module, name, getattr(module, name)) for module in modules for name in values]
    try:
        for module, name, _ in before:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again outside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()  # which a module may have more to do for
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training
