"""Results that nobody should have give a page or a sentence, never a traceback."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from noisygrad.cli.main import main
from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.report import site
from support.hostile_results import CELLS, FOLDERS, HUGE, nested

LONGEST = 1000
"""Letters of a message: what is refused is shown in short."""


def told(folder: Path) -> str:
    """What the report says of the results that it cannot show; empty for a page."""
    try:
        assert site.build_report(folder).html().encode().startswith(b"<!DOCTYPE html>")
    except (OSError, ValueError) as error:
        message = str(error)
        assert str(folder) in message
        assert len(message) < LONGEST
        return message
    return ""


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.filterwarnings("ignore")
def test_hostile_results_give_a_page_or_a_sentence(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    told(tmp_path)


def test_there_are_many_kinds() -> None:
    assert len(FOLDERS) >= 60


@pytest.mark.parametrize("kind", ["a link to itself", "a folder for the cells", "matrices: empty file"])
def test_the_command_says_what_is_wrong_in_a_sentence(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    done = CliRunner().invoke(main, ["report", "--results", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.output
    assert not (tmp_path / "page.html").exists()


def test_the_cells_themselves_give_a_page(tmp_path: Path) -> None:
    for experiment, cells in CELLS.items():
        Results(tmp_path, experiment).append(cells)
    assert told(tmp_path) == ""


names = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "NNG-MVG", "HMC", "TRPO", "a/b", "/lr=", "$", "x" * 300, "\ud800", "\x00"]),
)
numbers = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.sampled_from([1e308, -1e308, HUGE, -HUGE, 1e100, 1e-320])
)
trees = st.recursive(
    st.none() | numbers | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
) | st.sampled_from([nested(19), nested(25), nested(2000)])
figures = st.one_of(numbers, st.lists(numbers, max_size=5), trees)


@st.composite
def spoilt_cells(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """Cells of one experiment, a few of whose values are others, or gone."""
    experiment = draw(st.sampled_from(list(CELLS)))
    cells = [copy.deepcopy(vars(cell)) for cell in CELLS[experiment]]
    alike = draw(st.booleans())
    field = draw(st.sampled_from(["metrics", "metrics", "metrics", "config", *sorted(cells[0].keys() - {"metrics"})]))
    inner = draw(st.sampled_from(sorted(cells[0][field]))) if field in {"metrics", "config"} else None
    gone = inner is not None and draw(st.booleans())
    by_field = {"data": names, "method": names, "device": names, "metrics": figures, "replicate": numbers}
    value = draw(by_field.get(field, trees))
    for cell in cells if alike else cells[:1]:
        if inner is None:
            cell[field] = value
        elif gone:
            cell[field].pop(inner, None)
        elif inner in cell[field]:
            cell[field][inner] = value
    return experiment, cells


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(spoilt=spoilt_cells())
def test_whatever_a_cell_can_hold_can_be_shown_or_is_refused(spoilt: tuple[str, list[dict[str, Any]]]) -> None:
    experiment, given_values = spoilt
    cells, refused = [], []
    for values in given_values:
        try:
            cells.append(Cell(**values))
        except ValueError as error:
            refused.append(str(error))
    assert all(len(message) < LONGEST for message in refused)
    with tempfile.TemporaryDirectory() as folder:
        stored = Results(folder, experiment)
        for cell in cells:
            try:
                stored.append([cell])
            except ValueError:  # of another experiment, or another configuration
                event("refused by the file")
        event("a page" if told(Path(folder)) == "" else "a sentence")
