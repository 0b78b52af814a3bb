"""Figure 3 in the report: areas, the paired test, errors and times, and what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from noisygrad_paper.experiments import exploration_conditions as conditions
from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.report import exploration, site
from noisygrad_paper.report.page import ReportPage
from support.made_results import cell
from support.pages import check_stands_alone

ITERATIONS = 6


def runs(
    task: str, method: str, level: float, seeds: int = 8, spread: float = 0.1, iterations: int = ITERATIONS
) -> list[Cell]:
    """Curves that climb to `level`, a little more for each seed."""
    found = []
    for seed in range(seeds):
        returns = np.linspace(0.0, level + spread * seed, iterations)
        metrics = {"returns": returns.tolist(), "area": float(returns.mean())}
        if "NNG" in method or "BBB" in method:
            error = 5.0 if "released" in method else 0.02
            metrics |= {"model_error": [error] * 5, "persistence_error": [0.08] * 5}
        parts = {"rollout": 0.3, "bonus": 0.05, "policy": 0.03, "model": 0.1}
        metrics |= {f"seconds_{part}": seconds for part, seconds in parts.items()}
        found.append(cell(task, method, seed, metrics, experiment="exploration", config={"iterations": ITERATIONS}))
    return found


def everything(task: str, mvg: float = 1.5, bbb: float = 1.0) -> list[Cell]:
    return [
        *runs(task, "TRPO", 0.0, spread=0.0),
        *runs(task, "TRPO+norm", 0.5),
        *runs(task, "TRPO+BBB", bbb),
        *runs(task, "TRPO+NNG-MVG", mvg),
        *runs(task, "TRPO+NNG-MVG/released", 0.2),
    ]


def page_of(folder: Path) -> str:
    page = ReportPage("Title")
    exploration.sections(folder, page)
    return page.html()


def test_areas_are_of_the_median_curve():
    study = exploration.exploration_study(everything("MountainCar"))
    # A line from 0 to the median level has half of that as its mean.
    assert exploration.median_area(study, "TRPO+BBB", "MountainCar") == pytest.approx((1.0 + 0.35) / 2)
    assert exploration.median_area(study, "TRPO", "MountainCar") == 0.0
    assert exploration.median_area(study, "TRPO+NNG-FFG", "MountainCar") is None


def test_pairs_are_of_common_seeds():
    cells = [*runs("MountainCar", "TRPO+NNG-MVG", 1.5, seeds=8), *runs("MountainCar", "TRPO+BBB", 1.0, seeds=6)]
    found = exploration.paired(exploration.exploration_study(cells), "TRPO+NNG-MVG", "TRPO+BBB", "MountainCar")
    assert found is not None
    assert (found.seeds, found.wins) == (6, 6)
    assert found.difference == pytest.approx(0.25)
    assert found.p_value == pytest.approx(2 / 2**6)  # all six on one side, of 2⁶ ways to give signs
    lonely = exploration.exploration_study(runs("MountainCar", "TRPO+BBB", 1.0))
    assert exploration.paired(lonely, "TRPO+NNG-MVG", "TRPO+BBB", "MountainCar") is None


def test_equal_runs_are_not_told_apart():
    cells = [one for method in ("TRPO+NNG-MVG", "TRPO+BBB") for one in runs("MountainCar", method, 1.0)]
    found = exploration.paired(exploration.exploration_study(cells), "TRPO+NNG-MVG", "TRPO+BBB", "MountainCar")
    assert found is not None
    assert (found.wins, found.p_value) == (0, 1.0)


def test_the_section_shows_all(tmp_path: Path) -> None:
    cells = [*everything("MountainCar"), *everything("CartPoleSwingup", mvg=0.5)]
    Results(tmp_path, "exploration").append(cells)
    text = page_of(tmp_path)
    page = check_stands_alone(text)
    assert len(page.all("img")) == 1
    study = exploration.exploration_study(cells)
    tiles = exploration._tiles(study, ["CartPoleSwingup", "MountainCar"])
    assert tiles["tasks where both bonuses are above TRPO alone"] == "2 of 2"
    assert tiles["tasks where NNG-MVG is above BBB"] == "1 of 2"
    assert tiles["p of NNG-MVG against BBB, MountainCar"] == "0.0078"
    assert list(exploration._panels(study, ["MountainCar"])) == ["MountainCar", "MountainCar, as released"]
    assert "TRPO+NNG-FFG on MountainCar: 0 of 10 seeds" in text
    assert "TRPO+BBB on MountainCar: 8 of 20 seeds" in text
    errors = exploration.error_table(study, study.methods, ["MountainCar"])
    assert errors is not None
    assert [(row["method"], row["ratio"]) for row in errors.rows] == [
        ("TRPO+BBB", pytest.approx(0.25)),
        ("TRPO+NNG-MVG", pytest.approx(0.25)),
        ("TRPO+NNG-MVG/released", pytest.approx(62.5)),
    ]
    times = exploration.time_table(study, ["TRPO+BBB"], ["MountainCar"])
    assert times.rows[0]["all"] == pytest.approx(0.48)


def test_without_results_the_command_is_named(tmp_path: Path) -> None:
    assert "noisygrad reproduce exploration" in page_of(tmp_path)
    failed = cell("MountainCar", "TRPO", 0, {}, experiment="exploration", error="the engine broke")
    Results(tmp_path, "exploration").append([failed])
    assert "the engine broke" in page_of(tmp_path)
    assert "Exploration" in site.build_report(tmp_path).html()


def test_the_released_settings_are_spoken_of_where_there_are_runs_of_them(tmp_path: Path) -> None:
    Results(tmp_path / "ours", "exploration").append(runs("MountainCar", "TRPO+BBB", 1.0))
    Results(tmp_path / "both", "exploration").append(everything("MountainCar"))
    assert "released code" not in page_of(tmp_path / "ours")
    assert "released code" in page_of(tmp_path / "both")


def test_runs_of_different_lengths_are_compared_by_what_they_share(tmp_path: Path) -> None:
    cells = [*runs("MountainCar", "TRPO+NNG-MVG", 1.0), *runs("MountainCar", "TRPO+BBB", 2.0, iterations=11)]
    study = exploration.exploration_study(cells)
    # The first half of a climb to twice the level is the same curve.
    assert exploration.median_area(study, "TRPO+BBB", "MountainCar") == pytest.approx(0.5 + 0.35 / 4)
    assert exploration.median_area(study, "TRPO+NNG-MVG", "MountainCar") == pytest.approx(0.5 + 0.35 / 2)
    Results(tmp_path, "exploration").append(cells)
    assert "MountainCar was run with 6, 11 iterations: all runs are compared by their first 6" in page_of(tmp_path)


def test_the_papers_gain_has_a_panel_where_there_are_runs_of_it() -> None:
    cells = [*everything("MountainCar"), *runs("MountainCar", "TRPO+NNG-MVG/blockwise", 1.0)]
    panels = exploration._panels(exploration.exploration_study(cells), ["MountainCar"])
    assert list(panels) == ["MountainCar", "MountainCar, as released", "MountainCar, the paper's gain"]
    assert "TRPO+NNG-MVG/blockwise" in panels["MountainCar, the paper's gain"]


def test_seeds_are_given_by_task_where_they_differ():
    cells = [*runs("MountainCar", "TRPO", 1.0, seeds=4), *runs("CartPoleSwingup", "TRPO", 1.0, seeds=4)]
    cells += [*runs("MountainCar", "TRPO+BBB", 1.0, seeds=2), *runs("CartPoleSwingup", "TRPO+BBB", 1.0, seeds=3)]
    study = exploration.exploration_study(cells)
    rows = exploration.area_table(study, ["TRPO", "TRPO+BBB"], ["MountainCar", "CartPoleSwingup"]).rows
    assert [row["seeds"] for row in rows] == ["4", "2, 3"]


def test_the_committed_figure_shows_what_is_said_of_it() -> None:
    cells = Results(Path(__file__).parents[3] / "results", "exploration").load()
    study = exploration.exploration_study(cells)
    assert not exploration.gaps(study, list(conditions.ITERATIONS))
    assert all(one.error is None for one in cells)
    for task in ("CartPoleSwingup", "MountainCar"):
        assert exploration.median_area(study, "TRPO", task) == 0.0
        for method in conditions.METHODS[1:]:
            area = exploration.median_area(study, method, task)
            assert area is not None
            assert area > 0.0
    found, unclear = (
        exploration.paired(study, conditions.MVG, conditions.BBB, task) for task in ("MountainCar", "CartPoleSwingup")
    )
    assert found is not None
    assert found.seeds == 20
    assert found.difference > 0
    assert found.p_value < 0.05
    # What is not so on the other tasks is said in docs/exploration.md.
    assert unclear is not None
    assert unclear.p_value > 0.05
    for one in cells:  # a model that learns, and a bonus that is cheaper than the rollout
        if "model_error" in one.metrics:
            model, persistence = (np.mean(one.metrics[name][-10:]) for name in ("model_error", "persistence_error"))
            assert (model < persistence) == ("released" not in one.method), one.label
            assert one.metrics["seconds_bonus"] < one.metrics["seconds_rollout"], one.label
