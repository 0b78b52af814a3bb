"""For the whole suite: one thread a process, names that every process agrees on, and what several files ask for."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from noisygrad.kernels import products

pytest.register_assert_rewrite("support")  # before a test imports it, so that its assertions say what they saw
torch.set_num_threads(1)  # the suite runs in several processes and its networks are tiny

# The same examples in every run; HYPOTHESIS_PROFILE=random looks for others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

REAL_DATA = os.environ.get("NOISYGRAD_DATA", "")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No bytes in a test's name: those of an archive hold the second it was packed, which differs between processes."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def only_made_data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds data of this machine by accident: a suite that passes here passes where there is none."""
    monkeypatch.setenv("NOISYGRAD_DATA", str(tmp_path_factory.getbasetemp() / "no-data"))


@pytest.fixture
def real() -> Callable[[str], Path]:
    """Finds the folder of real data that has the part asked for; without it the test is skipped."""

    def folder(part: str) -> Path:
        if not REAL_DATA or not (Path(REAL_DATA) / part).exists():
            pytest.skip(f"NOISYGRAD_DATA does not lead to the real {part}")
        return Path(REAL_DATA)

    return folder


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
