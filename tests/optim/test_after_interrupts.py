"""After an interrupt nothing is left behind: what a user does next is what it says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.training import CheckpointError, load_checkpoint, save_checkpoint


def made(seed: int = 0) -> tuple[nn.Module, ng.NoisyKFAC, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model = ng.networks.MLP(3, (8,), 1)
    return model, ng.NoisyKFAC(model, ng.Gaussian(), num_data=100, seed=0), torch.randn(20, 3), torch.randn(20, 1)


def test_zero_grad_gives_up_after_a_signal_that_had_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the library draws, and is delivered before the closure begins."""
    model, optimizer, x, y = made()
    begin = optimizer.weights.begin

    def interrupted(*arguments: object) -> None:
        begin(*arguments)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGUSR1)

    usual = signal.signal(signal.SIGUSR1, signal.default_int_handler)  # a shell may have SIGINT ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(optimizer.weights, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(lambda: (model(x), y))
    finally:
        signal.signal(signal.SIGUSR1, usual)
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
    assert optimizer.accumulated.draws == 1
    optimizer.zero_grad()
    assert optimizer.accumulated.draws == 0


def test_nothing_is_saved_inside_a_draw_or_a_step(tmp_path: Path) -> None:
    """The weights there are drawn: what is loaded would take them for the mean."""
    model, optimizer, x, y = made()
    optimizer.step(lambda: (model(x), y))
    path = tmp_path / "run.safetensors"
    with optimizer.sampled() as draw:
        with pytest.raises(RuntimeError, match="inside a draw or a step"):
            save_checkpoint(path, model=model, optimizer=optimizer)
        draw.nll(model(x), y).backward()
    optimizer.step()

    def saving() -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.state_dict()
        return model(x), y

    with pytest.raises(RuntimeError, match="inside a draw or a step"):
        optimizer.step(saving)
    assert not path.exists()
    save_checkpoint(path, model=model, optimizer=optimizer)
    assert path.exists()


def test_a_training_that_went_bad_is_taken_back(tmp_path: Path) -> None:
    """A step that was masked is told of when a state is asked for; what is loaded replaces it."""
    model, optimizer, x, y = made()
    optimizer.step(lambda: (model(x), y))
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, model=model, optimizer=optimizer)
    optimizer.guard._bad[0] = True
    load_checkpoint(path, model=model, optimizer=optimizer)
    optimizer.step(lambda: (model(x), y))
    with torch.no_grad():
        optimizer.weights.mean.flat.fill_(torch.nan)
    other, _, _, _ = made(1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), 0.1), 1)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert optimizer.steps == 1


def test_noise_of_a_group_is_fixed() -> None:
    model, optimizer, x, y = made()
    optimizer.param_groups[0]["noise"] = False
    with pytest.raises(ValueError, match="noise of a param group is fixed"):
        optimizer.step(lambda: (model(x), y))
