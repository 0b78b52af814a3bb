"""A refresh that fails leaves no trace: the Fisher, its count, and the factors in their kind and their numbers."""

from __future__ import annotations

from typing import Any

import pytest

import noisygrad as ng
from noisygrad.posterior.blocks import Block
from support.compare import assert_unchanged, batches, differences, each_optimizer, leaves, make, mlp, snapshot, train


def break_last_block(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block cannot be factorised any more; those before it can."""
    covariance = optimizer.covariance
    assert len(covariance.blocks) > 1
    factorise = covariance._factorise

    def refuse(block: Block, damping: float) -> Any:
        if block is covariance.blocks[-1]:
            raise ng.FactorisationError(f"layer {block.name}: made to fail", 1e30)
        return factorise(block, damping)

    monkeypatch.setattr(covariance, "_factorise", refuse)


def factors_of(optimizer: Any) -> dict[str, Any]:
    """Of every block: whether draws and steps have one factorisation, and all its tensors."""
    every = optimizer.covariance.factors.items()
    found = {name: {"shared": own.shared, "tensors": own.tensors()} for name, own in every}
    return {path: leaf if isinstance(leaf, bool) else leaf.clone() for path, leaf in leaves(found).items()}


@each_optimizer
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.1, 0.1), (0.0, 0.1), (0.1, 0.0)])
def test_nothing_is_left_of_a_refresh_that_fails(
    kind: type, before: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the damping was switched on or off, which asks for factors of another kind."""
    model, data = mlp(), batches(4)
    optimizer = make(kind, model, damping=before, groups={"4.*": {}})  # two groups, so two blocks at least
    train(optimizer, model, data[:2])
    for group in optimizer.param_groups:
        group["damping"] = after
    state, factors = snapshot(optimizer), factors_of(optimizer)
    assert state["/optimizer/state/0/updates"] == 2
    with optimizer.sampled() as draw:
        draw.nll(model(data[2][0]), data[2][1]).backward()
    with monkeypatch.context() as broken:
        break_last_block(optimizer, broken)
        with pytest.raises(ng.FactorisationError, match="made to fail"):
            optimizer.step()
    assert not differences(factors, factors_of(optimizer))
    assert_unchanged(state, optimizer)
    train(optimizer, model, data[3:])
    assert all(own.shared == (after == 0.0) for own in optimizer.covariance.factors.values())
