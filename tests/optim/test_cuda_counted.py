"""What counts of a batch, on a GPU: the same as on a CPU, waited for nowhere, and followed by captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.training import CapturedStep
from optim.test_cuda import no_waiting
from support.compare import OPTIMIZERS, tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Spoken(torch.nn.Module):
    """A convolution and attention over time, with padding kept out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(3, 8, 3, padding=1)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        hidden = self.first((x * keep.unsqueeze(-1)).mT).mT
        return self.head(self.layer(hidden, src_key_padding_mask=~keep))


def spoken(
    device: str, kind: type[ng.NoisyOptimizer], dtype: torch.dtype, **more: Any
) -> tuple[ng.NoisyOptimizer, Callable[[], Any]]:
    torch.manual_seed(0)
    x, keep = torch.randn(8, 6, 3).to(device, dtype), (torch.arange(6) < torch.randint(2, 7, (8, 1))).to(device)
    label = torch.randint(4, (8, 6)).to(device).masked_fill(~keep, -100)
    weight = torch.rand(8).to(device, dtype) + 0.5
    model = Spoken().to(device, dtype)
    likelihood = ng.Categorical(ignore_index=-100, class_weights=[1.0, 2.0, 0.5, 1.0], label_smoothing=0.1)
    optimizer = kind(model, likelihood, num_data=100, seed=0, **more)
    return optimizer, lambda: (model(x, keep), label, weight)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_counts_is_the_same_on_both_devices(kind: type[ng.NoisyOptimizer]) -> None:
    states = []
    for device in ("cpu", "cuda"):
        settings = {"noise": False, "fisher": "empirical", "stats_every": 1, "factor_every": 1}
        optimizer, closure = spoken(device, kind, torch.float64, **settings)
        for _ in range(3):
            optimizer.step(closure)
        # Bases, and so roots, of eigenvalues that are nearly equal are decided by rounding.
        names = ("mean", "inputs", "outputs") if kind is ng.NoisyEKFAC else ("mean", "statistics")
        found = {
            name: t.cpu() for name, t in tensors_of(optimizer.state_dict()).items() if any(n in name for n in names)
        }
        assert found
        states.append(found)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_counts_is_not_waited_for(kind: type[ng.NoisyOptimizer]) -> None:
    optimizer, closure = spoken("cuda", kind, torch.float32, stats_every=2, factor_every=1000)
    for _ in range(9):
        optimizer.step(closure)
    for _ in range(5):
        optimizer.steps = 100
        optimizer.step(closure)
    with no_waiting():
        for _ in range(10):
            optimizer.step(closure)


@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC])
def test_captured_steps_know_what_counts(kind: type[ng.NoisyOptimizer]) -> None:
    means = []
    for captured in (False, True):
        settings = {"noise": False, "fisher": "empirical", "stats_every": 2, "factor_every": 6}
        optimizer, closure = spoken("cuda", kind, torch.float64, **settings)
        step = CapturedStep(optimizer, closure) if captured else lambda o=optimizer, c=closure: o.step(c)
        for _ in range(20):
            step()
        means.append(optimizer.weights.mean.flat.clone())
    torch.testing.assert_close(*means, rtol=1e-9, atol=1e-11)


def test_a_batch_in_which_nothing_counts_is_reported() -> None:
    model = torch.nn.Linear(3, 4).cuda()
    optimizer = ng.NoisyAdam(model, ng.Categorical(ignore_index=-1), num_data=10, stats_every=1, factor_every=4)
    x, label = torch.randn(5, 3, device="cuda"), torch.full((5,), -1, device="cuda")

    def train() -> None:
        for _ in range(10):
            optimizer.step(lambda: (model(x), label))

    with pytest.raises(ng.NonFiniteError):
        train()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
