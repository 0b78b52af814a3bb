"""The benchmark runs, and the page of step times says what the results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results() -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == load("page").page()


def test_one_round_of_the_small_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.json"
    arguments = ["--models", "mlp", "--methods", "SGD", "NoisyAdam", "NoisyKFAC", "--rounds", "1", "--no-memory"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--output", str(output)])
    load("run").main()
    record = json.loads(output.read_text())
    steps = record["seconds_per_step"]["mlp"]
    assert set(steps) == {"SGD", "NoisyAdam", "NoisyKFAC"}
    kinds = steps["NoisyKFAC"]
    expected = 0.9 * kinds["plain"] + 0.095 * kinds["statistics"] + 0.005 * kinds["refresh"]
    assert kinds["step"] == pytest.approx(expected)
