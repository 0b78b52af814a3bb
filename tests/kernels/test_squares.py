"""The kernel that squares per-example gradients, against the matrices themselves.

On a GPU, or by Triton's interpreter: `pip install triton`, and `TRITON_INTERPRET=1` in the environment.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature.convolution import PatchedPass
from noisygrad.curvature.passes import MatrixPass
from noisygrad.curvature.windows import patches
from noisygrad.kernels import squares as kernels
from noisygrad.posterior.structure import build_structure
from support.devices import follow_memory

pytest.importorskip("triton", reason="Triton comes with torch for NVIDIA GPUs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

CONVOLUTIONS = {
    "colours": (nn.Conv2d(3, 5, 3, padding=1), (4, 3, 6, 7)),
    "several tiles": (nn.Conv2d(9, 70, 3, padding=1), (4, 9, 5, 4)),
    "stride, dilation": (nn.Conv2d(8, 5, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(2, 1)), (4, 8, 9, 7)),
    "even and same": (nn.Conv2d(8, 5, (4, 2), padding="same"), (3, 8, 5, 5)),
    "circular": (nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular"), (3, 4, 5, 5)),
    "large steps": (nn.Conv2d(4, 5, 5, stride=3), (3, 4, 8, 11)),
    "one axis": (nn.Conv1d(4, 70, 3, stride=2, padding=1), (3, 4, 9)),
    "few positions": (nn.Conv2d(16, 33, 3, padding=1), (5, 16, 2, 2)),
}


def squares(gradients: Tensor, inputs: Tensor) -> Tensor:
    """Of W, then of b, from each example's matrix."""
    weight = (gradients.double().mT @ inputs.double()).square().sum(0)
    return torch.cat([weight.flatten(), gradients.double().sum(1).square().sum(0)])


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("processors", [1, 100])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_squares_of_a_convolution_are_those_of_its_matrices(
    name: str, processors: int, order: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, shape = CONVOLUTIONS[name]
    module = module.to(DEVICE)
    monkeypatch.setattr(kernels, "_processors", lambda device: processors)
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    torch.manual_seed(0)
    images = torch.randn(shape, device=DEVICE)
    gradients = torch.randn_like(module(images).detach())
    if images.dim() == 4:
        images, gradients = images.to(memory_format=order), gradients.to(memory_format=order)
    right = squares(gradients.flatten(2).mT, patches(module, images))
    found = PatchedPass(module, images, gradients, True)._by_kernel()
    assert found is not None
    assert relative(found, right) < 1e-6
    without = PatchedPass(module, images, gradients, False)._by_kernel()
    assert without is not None
    torch.testing.assert_close(without, found[: -gradients.shape[1]])


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [name for name, (_, shape) in CONVOLUTIONS.items() if len(shape) == 4])
def test_they_are_written_as_channels_last_weights_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    follow_memory(monkeypatch, {DEVICE})
    module, shape = CONVOLUTIONS[name]
    module = copy.deepcopy(module).to(DEVICE, memory_format=torch.channels_last)
    structure = build_structure(module, "diagonal", lambda name: 0, [True]).in_memory_order()
    (unit,) = structure.units
    images = torch.randn(shape, device=DEVICE)
    one = PatchedPass(module, images, torch.randn_like(module(images).detach()), True)
    assert unit.slots[0].channels_last
    (found,) = one.layout_squares(unit)
    (rows,) = one.square_sums()
    assert torch.equal(found, unit.to_memory(rows))
    assert not torch.equal(found, rows)


def test_gradients_whose_lines_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    module, images = nn.Conv2d(3, 5, 3, padding=1).to(DEVICE), torch.randn(4, 3, 6, 7, device=DEVICE)
    gradients = torch.randn(4, 5, 8, 9, device=DEVICE)[..., 1:7, 1:8]
    found = PatchedPass(module, images, gradients, True)._by_kernel()
    assert found is not None
    assert relative(found, squares(gradients.flatten(2).mT, patches(module, images))) < 1e-6


def test_a_line_of_one_position_has_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    module, images = nn.Conv2d(3, 5, (3, 4)).to(DEVICE), torch.randn(4, 3, 9, 4, device=DEVICE)
    gradients = torch.randn(4, 5, 1, 7, device=DEVICE).transpose(2, 3)
    assert gradients.is_contiguous()
    assert gradients.stride(3) == 7
    found = PatchedPass(module, images, gradients, True)._by_kernel()
    assert found is not None
    assert relative(found, squares(gradients.flatten(2).mT, patches(module, images))) < 1e-6


@pytest.mark.parametrize(("batch", "positions", "outputs", "inputs"), [(5, 7, 33, 65), (1, 2, 1, 1), (3, 40, 70, 20)])
def test_squares_of_a_sequence(
    batch: int, positions: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    torch.manual_seed(0)
    gradients, a = (torch.randn(batch, positions, size, device=DEVICE) for size in (outputs, inputs))
    right = squares(gradients, a)
    (found,) = MatrixPass(a, gradients, True).square_sums()
    assert relative(found, right) < 1e-6


def test_a_frozen_matrix_leaves_its_bias_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    gradients = torch.randn(3, 4, 5, device=DEVICE)
    weight, bias = MatrixPass(gradients.new_zeros(3, 4, 0), gradients, True).square_sums()
    assert weight.numel() == 0
    torch.testing.assert_close(bias, gradients.sum(1).square().sum(0))


def test_examples_that_are_too_large_are_left_to_others() -> None:
    small = torch.zeros(1, 2, 1, device=DEVICE)
    assert kernels.of_sequences(small, small, False) is not None
    with_gap = torch.empty_strided((1, 2, 1), (0, 2**31, 1), device="meta")
    assert kernels.of_sequences(small.to("meta"), with_gap, False) is None
    assert kernels.of_sequences(with_gap, small.to("meta"), False) is None


def test_what_does_not_work_is_said_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*arguments: object, **more: object) -> None:
        tried.append(arguments)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(kernels, "_WORKING", {})
    monkeypatch.setattr(kernels, "of_sequences", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match="no C compiler"):
        assert not kernels._works(torch.device(DEVICE))
    assert not kernels._works(torch.device(DEVICE))
    assert len(tried) == 1


def test_it_does_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WORKING", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels._works(torch.device(DEVICE))


def test_three_axes_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: True)
    images, gradients = torch.zeros(1, 2, 3, 3, 3), torch.zeros(1, 3, 2, 2, 2)
    assert PatchedPass(nn.Conv3d(2, 3, 2), images, gradients, True)._by_kernel() is None


@on_a_gpu
def test_it_is_as_exact_as_products_may_be() -> None:
    module, shape = CONVOLUTIONS["several tiles"]
    module = module.to(DEVICE)
    images = torch.randn(shape, device=DEVICE)
    gradients = torch.randn_like(module(images).detach())
    right = squares(gradients.flatten(2).mT, patches(module, images))

    def error(rounded: bool) -> float:
        usual = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = rounded
        try:
            found = PatchedPass(module, images, gradients, True)._by_kernel()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = usual
        assert found is not None
        return relative(found, right)

    assert error(False) < 1e-6 < error(True) < 1e-2


@on_a_gpu
def test_hardly_any_memory_is_used() -> None:
    module = nn.Conv2d(64, 64, 3, padding=1).to(DEVICE)
    images = torch.randn(128, 64, 16, 16, device=DEVICE)
    one = PatchedPass(module, images, torch.randn_like(images), True)
    one.square_sums()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = one.square_sums()
    used = torch.cuda.max_memory_allocated() - before
    assert len(found) == 1
    assert used < 12e6  # the matrices of all examples are 19 MB, their patches 75


@on_a_gpu
def test_training_is_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(16, 3, 8, 8, device=DEVICE), torch.randint(4, (16,), device=DEVICE)

    def fisher() -> Tensor:
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*body, nn.Linear(45, 4)).to(DEVICE)
        optimizer = ng.NoisyAdam(model, ng.Categorical(), num_data=100, stats_every=1, factor_every=1, seed=1)
        optimizer.step(lambda: (model(x), y))  # later ones go apart by what they have rounded
        return next(iter(optimizer.covariance.statistics.values())).tensors()["fisher"].clone()

    own = fisher()
    monkeypatch.setattr(kernels, "applies", lambda gradients, positions: False)
    assert relative(own, fisher().double()) < 1e-6
