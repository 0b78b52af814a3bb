"""Random networks: every statistic equals the dense truth up to rounding; `support.fuzz` takes more by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import fuzz, random_networks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1))
@pytest.mark.filterwarnings("ignore")
def test_random_networks_equal_the_dense_truth(seed: int) -> None:
    for case, statistic, error in fuzz.errors(seed):
        assert error <= 1.0, f"{statistic} is {error:.3g} times farther from the truth than rounding: {case}"


def test_the_networks_are_of_many_kinds() -> None:
    cases = [random_networks.Builder(seed).case() for seed in range(100)]
    kinds = {type(module).__name__ for case in cases for module in case.model.modules()}
    expected = {"Linear", "Conv1d", "Conv2d", "MultiheadAttention", "Embedding", "LayerNorm", "RMSNorm", "BatchNorm1d"}
    assert kinds >= expected | {
        "BatchNorm2d",
        "GroupNorm",
        "InstanceNorm2d",
        "Twice",
        "Tied",
        "Folded",
        "SequenceInFront",
    }
    assert {case.mask is None for case in cases} == {case.weight is None for case in cases} == {True, False}
    assert any(not p.requires_grad for case in cases for p in case.model.parameters())
