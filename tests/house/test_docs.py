"""The documentation's page of results says what the results say, and its pictures can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = maker.studies()
    made = maker.page(found)
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == made, "run python docs/make_results.py"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert maker.readme(text, found) == text, "run python docs/make_results.py"
    monkeypatch.setattr(maker, "ASSETS", tmp_path)
    maker.pictures(found)
    named = {path.name for path in tmp_path.iterdir()}
    assert named == {"exploration.png", "reliability.png"}
    for name in named:
        assert f"(assets/{name})" in made
        assert (ROOT / "docs" / "assets" / name).exists()
