"""Modules in another mode for a while."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside; every module's own mode again outside."""
    return with_attributes(model.modules(), training=False)
