"""For the whole suite: one thread a process, names that every process agrees on, and what several files ask for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from noisygrad.families import products

torch.set_num_threads(1)  # the suite runs in several processes and its networks are tiny


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No bytes in a test's name: those of an archive hold the second it was packed, which differs between processes."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The sizes of all products that oneDNN was asked for, as if this processor were one that gains by it."""
    if not products.has_onednn() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    products.onednn.cache_clear()
    multiply = products.onednn()
    assert multiply is not None
    seen: list[tuple[int, ...]] = []

    def counted(rows: Tensor, columns: Tensor) -> Tensor:
        # With gaps it would be hundreds of times slower.
        assert columns.is_contiguous() or columns.mT.is_contiguous()
        seen.append((*rows.shape, columns.shape[0]))
        return multiply(rows, columns)

    monkeypatch.setattr(products, "onednn", lambda: counted)
    yield seen
    monkeypatch.undo()
    products.onednn.cache_clear()
