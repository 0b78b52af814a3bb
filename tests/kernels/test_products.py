"""Products of large float32 matrices by oneDNN: the same numbers, whatever lies where, and only where that is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.kernels import products
from noisygrad.kernels.products import matmul


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def made(rows: int, columns: int, layout: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    if layout == "rows":
        return torch.randn(rows, columns, generator=generator)
    if layout == "columns":
        return torch.randn(columns, rows, generator=generator).mT
    if layout == "expanded":
        return torch.randn(rows, 1, generator=generator).expand(rows, columns)
    return torch.randn(rows + 2, columns + 3, generator=generator)[1:-1, 2:-1]


LAYOUTS = ["rows", "columns", "gaps", "expanded"]


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_it_is_the_product_however_the_matrices_lie(left, right, onednn):
    a, b = made(161, 163, left), made(163, 167, right)
    found = matmul(a, b)
    assert onednn == [(161, 163, 167)]
    truth = a.double() @ b.double()
    torch.testing.assert_close(found.double(), truth, rtol=0.0, atol=2e-6 * float(truth.abs().max()) + 1e-4)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 2049, 2051), (2051, 1, 2049), (2049, 2051, 1)])
def test_thin_matrices(rows, inner, columns, onednn):
    a, b = made(rows, inner, "rows"), made(inner, columns, "rows")
    found = matmul(a, b)
    assert len(onednn) == 1
    torch.testing.assert_close(found, a @ b, rtol=1e-4, atol=2e-4)


def test_what_is_not_for_it_goes_the_usual_way(onednn, monkeypatch):
    a, b = made(200, 200, "rows"), made(200, 200, "columns")
    small, wide, batched = a[:10], a.double(), a.expand(2, 200, 200)
    assert torch.equal(matmul(small, b), small @ b)
    assert torch.equal(matmul(wide, b.double()), wide @ b.double())
    assert torch.equal(matmul(batched, b), batched @ b)
    assert torch.equal(matmul(a[:0], b), a[:0] @ b)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul(a, b).dtype == torch.bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(matmul(a, b), a @ b)
    assert onednn == []


def test_what_may_be_differentiated_goes_the_usual_way(onednn):
    a, b = made(200, 200, "rows"), made(200, 200, "columns")
    with torch.enable_grad():
        tracked = a.clone().requires_grad_()
        matmul(tracked, b).sum().backward()
        _, tangent = torch.func.jvp(lambda x: matmul(x, b), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tracked.grad, torch.ones_like(a) @ b.mT)
    torch.testing.assert_close(tangent, torch.ones_like(a) @ b)
    assert onednn == []


def test_it_can_be_compiled(onednn):
    a, b = made(200, 200, "rows"), made(200, 200, "columns")
    assert torch.equal(torch.compile(matmul, fullgraph=True, backend="eager")(a, b), a @ b)
    assert onednn == []


def test_shapes_that_do_not_fit_are_refused(onednn):
    with pytest.raises(RuntimeError, match="shapes"):
        matmul(made(200, 201, "rows"), made(200, 201, "rows"))


def test_processors_without_gain_never_ask_for_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    products.onednn.cache_clear()
    a = made(200, 200, "rows")
    assert products.onednn() is None
    assert torch.equal(matmul(a, a), a @ a)
    monkeypatch.undo()
    products.onednn.cache_clear()


def test_a_product_that_is_not_finite_says_so(onednn):
    a = made(200, 200, "rows")
    a[3, 5] = float("nan")
    a[7, 7] = float("inf")
    found = matmul(a, made(200, 200, "rows"))
    assert bool(found[3].isnan().all())
    assert not bool(found[7].isfinite().any())
    assert bool(found[8].isfinite().all())
    assert len(onednn) == 1


@pytest.mark.parametrize("way", ["closure", "explicit"])
def test_a_step_of_noisy_k_fac_draws_and_moves_by_it(way, onednn, monkeypatch):
    monkeypatch.setattr(products, "LARGE", 2000)
    torch.manual_seed(0)
    model, x, y = ng.networks.MLP(30, (20,), 3), torch.randn(8, 30), torch.randint(3, (8,))
    optimizer = ng.NoisyKFAC(
        model, ng.Categorical(), num_data=100, stats_every=50, factor_every=50, damping=0.1, seed=0
    )
    asked = []
    with torch.enable_grad():
        for _ in range(6):  # the last has neither statistics nor new factors
            onednn.clear()
            if way == "closure":
                optimizer.step(lambda: (model(x), y))
                continue
            with optimizer.sampled() as draw:
                asked = list(onednn)
                draw.nll(model(x), y).backward()
            optimizer.step()
    first = [(20, 20, 31), (20, 31, 31)]
    assert onednn == first * 2, "U Z Vᵀ of the first layer, and left X right"
    assert way == "closure" or asked == first
