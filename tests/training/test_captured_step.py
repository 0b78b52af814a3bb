"""A whole step that is recorded and replayed, walked on a CPU: the model, its gradient, statistics, the move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import noisygrad as ng
from noisygrad.training import CapturedStep
from support.compare import batches, make, mlp, tensors_of
from support.replay_executor import ReplayExecutor, replayed

STEPS = 48


class Moody(torch.nn.Module):
    """Does something else in evaluation mode, as dropout and batch norm do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else 0.5 * x


def trained(kind: type[ng.NoisyOptimizer], captured: bool, change: Any = None, **options: Any) -> Any:
    """An optimiser after steps on batches that are other ones every time, under schedules."""
    model, data = torch.nn.Sequential(*mlp(), Moody()), batches(STEPS)
    settings = {"stats_every": 2, "factor_every": 8, "kl_clip": lambda step: 1e-2 / step}
    optimizer = make(kind, model, **settings | {"fisher_decay": lambda step: 1 - 0.5 / step} | options)
    x, y = (tensor.clone() for tensor in data[0])
    turn = torch.zeros((), dtype=torch.long)
    all_x, all_y = (torch.stack(tensors) for tensors in zip(*data, strict=True))

    def prepare() -> None:
        x.copy_(all_x.index_select(0, turn.view(1))[0])
        y.copy_(all_y.index_select(0, turn.view(1))[0])
        turn.add_(1)

    step = CapturedStep(optimizer, lambda: (model(x), y), prepare)
    losses = []
    for index in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + index)
        if change is not None:
            change(optimizer, index)
        losses.append(step().clone())
    assert step._captures is captured
    return optimizer, torch.stack(losses), step


def change_damping(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["damping"] = 0.1 if step < STEPS // 2 else 0.2


def change_mode(optimizer: Any, step: int) -> None:
    optimizer.model.train(step < STEPS // 2)


@pytest.mark.parametrize("change", [None, change_damping, change_mode])
@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyFull])
def test_a_captured_step_is_the_step(kind: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, losses, _ = trained(kind, False, change)
    with monkeypatch.context() as patch:
        replayed(patch)
        replay, others, step = trained(kind, True, change)
    assert isinstance(step._executor, ReplayExecutor)
    assert step._executor.replays > STEPS // 4
    torch.testing.assert_close(others, losses, rtol=1e-9, atol=1e-12)
    assert replay.steps == usual.steps == STEPS
    mine, theirs = tensors_of(replay.state_dict()), tensors_of(usual.state_dict())
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n} {m}")


def test_kinds_of_steps_are_recorded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch)
    _, _, step = trained(ng.NoisyAdam, True)
    assert set(step._executor.names) == {"False False", "True False", "True True"}
    _, _, step = trained(ng.NoisyKFAC, True)
    assert set(step._executor.names) == {"False False", "True False"}  # a refresh of matrices waits for the device


def test_a_captured_step_that_goes_bad_changes_nothing_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch)
    model, (x, y) = mlp(), (tensor.clone() for tensor in batches(1)[0])
    optimizer = make(ng.NoisyKFAC, model, stats_every=2, factor_every=32)
    step = CapturedStep(optimizer, lambda: (model(x), y))
    for _ in range(50):
        step()
    before = optimizer.weights.mean.flat.clone()
    x.fill_(float("nan"))
    for _ in range(5):
        step()
    assert torch.equal(optimizer.weights.mean.flat, before)
    while not optimizer.options.factors_due(optimizer.steps + 1):
        step()
    with pytest.raises(ng.NonFiniteError):
        step()
