"""Products of large float32 matrices by oneDNN: the same numbers, whatever lies where, and only where that is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noisygrad.families import products
from noisygrad.families.products import matmul


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


def test_what_is_to_be_differentiated_is(onednn):
    a = made(200, 200, "rows").requires_grad_()
    matmul(a, a.detach()).sum().backward()
    assert a.grad is not None
    assert onednn == []
    with torch.no_grad():
        matmul(a, a)
    assert len(onednn) == 1


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
