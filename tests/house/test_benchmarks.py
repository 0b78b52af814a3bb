"""The benchmark runs, and the page of step times says what the results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results(tmp_path: Path) -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == load("page").page(tmp_path / "growth.png")


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


def test_the_growth_of_cost_has_a_picture_and_slopes(tmp_path: Path) -> None:
    def times(factor: float) -> dict[str, dict[str, float]]:
        kinds = {"plain": 1e-3 * factor, "statistics": 2e-3 * factor, "refresh": 3e-2 * factor, "step": 1.2e-3 * factor}
        return {"SGD": {"plain": 1e-3 * factor, "step": 1e-3 * factor}, "NoisyAdam": kinds, "NoisyKFAC": kinds}

    record = {
        "command": "python benchmarks/scaling.py",
        "device": "a GPU",
        "every": {"statistics": 10, "factors": 200},
        "versions": {"torch": "2"},
        "steps": [
            *({"width": width, "batch": 128, "seconds": times(width**2)} for width in (1.0, 2.0, 4.0)),
            *({"width": 1.0, "batch": batch, "seconds": times(batch / 128)} for batch in (512, 2048)),
        ],
        "prediction": {"plain": 0.01, "draws": 0.1, "ratio": 10.0, "samples": 10, "images": 10000},
    }
    (tmp_path / "scaling.json").write_text(json.dumps(record))
    found = load("growth").growth(tmp_path / "scaling.json", tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "| **NoisyKFAC**, mean | 1.20 | 4.80 | 19.20 | 2.0, 2.0 |" in found
    assert "| **SGD**, mean | 1.00 | 4.00 | 16.00 | 1.0, 1.0 |" in found
    assert "10.0 times one pass" in found
