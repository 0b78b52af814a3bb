"""Where a GPU's memory does not suffice for statistics, they are taken from fewer examples, and training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from support.compare import each_optimizer


def test_out_of_memory_in_statistics_halves_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from noisygrad.optim import measurement

    real, tried = measurement.fisher_passes, []

    def scarce(*arguments: object, keep: int, **more: object) -> object:
        tried.append(keep)
        if keep > 4:
            raise torch.OutOfMemoryError("no memory for so many")
        return real(*arguments, keep=keep, **more)

    monkeypatch.setattr(measurement, "fisher_passes", scarce)
    model = ng.networks.MLP(3, (4,), 1)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1)
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    with pytest.warns(UserWarning, match="4 examples"):
        optimizer.step(lambda: (model(x), y))
    optimizer.step(lambda: (model(x), y))
    assert tried == [16, 8, 4, 4]
    assert optimizer.measurement.statistics_limit == 4


class Scarce(nn.Module):
    """A network whose forward pass needs more memory than there is once normalisation is in evaluation mode."""

    def __init__(self, fits: int, error: RuntimeError | None = None) -> None:
        super().__init__()
        self.error = error or torch.OutOfMemoryError("no memory for so many")
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        self.fits, self.tried = fits, list[int]()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = self.layers[0](x)  # what a pass has recorded before it fails must be forgotten
        if not self.layers[1].training:
            self.tried.append(len(x))
            if len(x) > self.fits:
                raise self.error
        return scale * self.layers[1:](hidden)


def trained(kind: type[ng.optim.NoisyOptimizer], fits: int) -> tuple[Scarce, ng.optim.NoisyOptimizer]:
    torch.manual_seed(0)
    model, x, y = Scarce(fits), torch.randn(16, 3), torch.randn(16, 1)
    optimizer = kind(model, ng.Gaussian(), num_data=50, stats_every=1, fisher_pass="fresh", stats_batch=4, seed=0)
    optimizer.step(lambda: (model(x, scale=2.0), y))
    optimizer.step(lambda: (model(x=x, scale=2.0), y))
    return model, optimizer


@each_optimizer
def test_out_of_memory_in_a_fresh_pass_halves_its_batch(kind: type[ng.optim.NoisyOptimizer]) -> None:
    with pytest.warns(UserWarning, match="taken from 8 examples"), pytest.warns(UserWarning, match="from 4 examples"):
        scarce, fewer = trained(kind, fits=4)
    plenty, usual = trained(kind, fits=16)
    assert (scarce.tried, fewer.measurement.forward_limit) == ([16, 8, 4, 4], 4)
    assert (plenty.tried, usual.measurement.forward_limit) == ([16, 16], None)
    assert all(module.training for module in scarce.modules())
    # The first four examples say the same, whether others were there or not.
    torch.testing.assert_close(fewer.posterior().precision(), usual.posterior().precision())


def test_out_of_memory_where_no_part_of_a_batch_helps() -> None:
    model, x = Scarce(0), torch.randn(4, 3)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1, fisher_pass="fresh")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match="examples"), pytest.raises(torch.OutOfMemoryError):
        optimizer.step(lambda: (model(x), x[:, :1]))
    assert model.tried == [4, 2, 1]
    assert all(map(torch.equal, model.parameters(), before))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("GET was unable to find an engine to execute this computation", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_libraries_say_it_in_their_own_words(error: str, helps: bool) -> None:
    model, x = Scarce(2, RuntimeError(error)), torch.randn(4, 3)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1, fisher_pass="fresh")
    if helps:
        with pytest.warns(UserWarning, match="taken from 2 examples"):
            optimizer.step(lambda: (model(x), x[:, :1]))
    else:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            optimizer.step(lambda: (model(x), x[:, :1]))


def test_out_of_memory_in_the_backward_pass_of_a_fresh_one_halves_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer examples to square are no help there: the gradients of activations are as large as the batch."""
    from noisygrad.optim import measurement

    real, tried = measurement.fisher_passes, []

    def scarce(kind: object, likelihood: object, output: Tensor, *rest: object, **more: object) -> object:
        tried.append(len(output))
        if len(output) > 4:
            raise torch.OutOfMemoryError("no memory for so many")
        return real(kind, likelihood, output, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(measurement, "fisher_passes", scarce)
    model = ng.networks.MLP(3, (4,), 1)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1, fisher_pass="fresh")
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    with pytest.warns(UserWarning, match="4 examples"):
        optimizer.step(lambda: (model(x), y))
    optimizer.step(lambda: (model(x), y))
    assert tried == [16, 8, 4, 4]
    assert (optimizer.measurement.forward_limit, optimizer.measurement.statistics_limit) == (4, None)
