"""`import noisygrad` adds little to `import torch`: what takes long to import is imported when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import noisygrad as ng

# torch's compiler alone takes longer to import than torch itself.
SLOW = (
    "joblib",
    "matplotlib",
    "pandas",
    "rich",
    "scipy.optimize",
    "scipy.special",
    "scipy.stats",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torchmetrics",
    "triton",
)
PROGRAM = """
import sys
import torch
before = set(sys.modules)
import noisygrad as ng
dir(ng), ng.metrics, ng.NoisyKFAC, ng.train
print(*(set(sys.modules) - before))
"""


def test_what_is_slow_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, encoding="utf-8", check=True)
    imported = set(done.stdout.split())
    assert {"noisygrad", "noisygrad.optim.optimizer", "noisygrad.metrics"} <= imported
    assert sorted(imported & set(SLOW)) == []


@pytest.mark.parametrize("name", ng.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(ng)
    assert getattr(ng, name) is not None
