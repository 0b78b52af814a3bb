"""For tests that register layers."""

from collections.abc import Iterator

import pytest
import torch

from noisygrad.curvature.registry import REGISTRY


@pytest.fixture
def own_registry() -> Iterator[None]:
    torch.manual_seed(0)
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
