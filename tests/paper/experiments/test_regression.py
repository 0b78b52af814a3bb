"""A small cell of every method runs end to end; the command resumes, refuses and explains; the committed results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from noisygrad.cli.main import main
from noisygrad_paper.data import standardised
from noisygrad_paper.data.splits import standard_splits
from noisygrad_paper.data.tables import DataTable
from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.experiments.methods import METHODS, SMALL_SETS
from noisygrad_paper.experiments.regression import DATA, annealing, held_out, plan, run_job
from noisygrad_paper.report import paper
from noisygrad_paper.report.comparison import LOG_LIKELIHOOD, RMSE
from noisygrad_paper.report.reasons import REASONS
from noisygrad_paper.report.regression import shortfalls
from noisygrad_paper.report.study import Study

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3))
    y = 5.0 + 3.0 * np.sin(x.sum(1)) + 0.1 * random.normal(size=40)
    rows = [",".join(map(repr, map(float, (*features, target)))) for features, target in zip(x, y, strict=True)]
    path = tmp_path / "waves.csv"
    path.write_text("a,b,c,height\n" + "\n".join(rows) + "\n")
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def reproduce(table: Path, folder: Path, *more: object, methods: str = "NNG-FFG") -> tuple[int, str]:
    return run(
        "reproduce", "regression", "--csv", table, "--target", "height", "--methods", methods, "--epochs", 2,
        "--splits", 3, "--results", folder, *more,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_finite_cells(method: str, table: Path) -> None:
    csv = (str(table), "height")
    (job,) = plan(["csv-waves"], [method], epochs=2, splits=2, csv=csv)
    seen = []
    cells = run_job(job, lambda fraction, text: seen.append(fraction), csv=csv, execution="eager")
    assert [cell.replicate for cell in cells] == [0, 1]
    for cell in cells:
        assert cell.error is None
        assert {"rmse", "log_likelihood"} <= cell.metrics.keys()
        assert ("elbo" in cell.metrics) == ("kl" in cell.metrics and method not in {"NNG-MVG/optimizer", "VMG"})
        assert 0 < cell.metrics["rmse"] < 20
    assert seen[-1] == 1.0


def test_figures_are_in_the_unit_of_the_target(table: Path) -> None:
    """Ten times the target: ten times the error, and a density of a tenth."""
    rows = table.read_text().splitlines()
    larger = table.with_name("larger.csv")
    scaled = [",".join([*row.split(",")[:-1], repr(10 * float(row.split(",")[-1]))]) for row in rows[1:]]
    larger.write_text("\n".join([rows[0], *scaled]) + "\n")
    found = []
    for path in (table, larger):
        csv = (str(path), "height")
        (job,) = plan([path.stem], ["NNG-MVG"], epochs=2, splits=1, csv=csv)
        found.append(run_job(job, lambda fraction, text: None, csv=csv, execution="eager")[0].metrics)
    assert math.isclose(found[1]["rmse"], 10 * found[0]["rmse"], rel_tol=1e-4)
    assert math.isclose(found[1]["log_likelihood"], found[0]["log_likelihood"] - math.log(10), rel_tol=1e-4)


def test_a_missing_cell_alone_is_computed_again(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert reproduce(table, folder)[0] == 0
    path = Results(folder, "regression").path
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    path.write_text("\n".join([lines[0], lines[2]]) + "\n")
    code, output = reproduce(table, folder)
    assert code == 0, output
    again = path.read_text().splitlines()
    assert again[:2] == [lines[0], lines[2]]
    new, old = json.loads(again[2]), json.loads(lines[1])
    # A replica is what it would be alone, so the table is the same.
    assert new["replicate"] == old["replicate"] == 1
    for name, value in old["metrics"].items():
        assert math.isclose(new["metrics"][name], value, rel_tol=1e-4, abs_tol=1e-6), name


def test_other_settings_are_refused_with_the_difference(table: Path, tmp_path: Path) -> None:
    assert reproduce(table, tmp_path / "results")[0] == 0
    code, output = reproduce(table, tmp_path / "results", "--seed", 7)
    assert code == 2
    assert "seed" in output
    assert "7" in output


def test_validation_never_sees_the_test_rows(table: Path, tmp_path: Path) -> None:
    for train, test in standard_splits(40, 3):
        kept, held = held_out((train, test))
        assert sorted([*kept, *held]) == sorted(train)
        assert len(held) == 7
    folder = tmp_path / "results"
    for more in ((), ("--set", "lr=0.02"), ("--set", "lr=0.02", "--set", "mc_samples=3")):
        code, output = reproduce(table, folder, "--validation", *more)
        assert code == 0, output
    cells = Results(folder, "regression-validation").load()
    assert {cell.method for cell in cells} == {"NNG-FFG", "NNG-FFG lr=0.02", "NNG-FFG lr=0.02 mc_samples=3"}
    assert all(cell.config["validation"] for cell in cells)
    assert not Results(folder, "regression").path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "lr=0.1"), "validation"),
        (("--validation", "--set", "lr"), "NAME=VALUE"),
        (("--validation", "--set", "rl=1"), "mc_samples"),
        (("--validation", "--set", "epochs=ten"), "epochs is 1000"),
        (("--validation", "--set", "batch_size=3.5"), "int"),
        (("--methods", "NNG-XYZ"), "NNG-MVG"),
        (("--data", "bostn"), "boston"),
        (("--csv", "nowhere.csv"), "go together"),
        (("--csv", "nowhere.csv", "--target", "y"), "nowhere.csv"),
        (("--backend", "dask", "--data", "yacht", "--epochs", "1"), "scheduler"),
        (("--device", "cuda:99"), "GPU"),
        (("--device", "gpu"), "cuda"),
        (("--csv", "x.csv", "--target", "y", "--data", "boston"), "one of them"),
        (("--methods", "NNG-full", "--data", "kin8nm"), "kin8nm"),
    ],
)
def test_a_wrong_argument_is_explained(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    if "--device" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    if "--set" in arguments:
        arguments = ("--data", "diabetes", "--methods", "NNG-FFG", *arguments)
    code, output = run("reproduce", "regression", "--results", tmp_path / "r", *arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_missing_data_name_the_command_that_fetches_them(tmp_path: Path) -> None:
    code, output = run(
        "reproduce", "regression", "--data", "yacht", "--data-dir", tmp_path, "--results", tmp_path / "r"
    )
    assert code == 2
    assert "noisygrad data fetch yacht" in output


def test_annealing():
    assert [annealing(epoch, epochs=4, factor=0.1) for epoch in (1, 2, 3, 4)] == [1.0, 1.0, 0.1, 0.1]
    assert annealing(1, epochs=10, factor="cosine") == 1.0
    assert annealing(10, epochs=10, factor="cosine") < 0.05


def test_large_sets_have_large_batches_and_protein_a_wide_network():
    def config(name: str, rows: int) -> dict:
        from noisygrad_paper.experiments.regression import problem_of

        made = DataTable(name=name, label=name, x=np.zeros((rows, 2)), y=np.arange(float(rows)), target="y")
        return METHODS["NNG-MVG"].config(problem_of(made))

    assert config("boston", 506)["batch_size"] == 10
    assert config("power", 9568)["batch_size"] == 100
    assert config("protein", 45730)["hidden"] == [100]
    assert config("yacht", 308) | {"hidden": [50]} == config("yacht", 308)


def test_splits_are_standardised_apart():
    random = np.random.default_rng(1)
    made = DataTable(name="t", label="t", x=random.normal(size=(30, 2)), y=random.normal(size=30), target="y")
    data = standardised(made, standard_splits(30, 3))
    assert np.allclose(data.x_train.mean(1), 0.0)
    assert np.allclose(data.y_train.std(1), 1.0)


def committed() -> dict[tuple[str, str], list]:
    found: dict[tuple[str, str], list] = {}
    for cell in Results(RESULTS, "regression").load():
        found.setdefault((cell.method, cell.data), []).append(cell)
    return found


PARTS = {"NNG-full", "NNG-EMVG", "NNG-MVG/optimizer"}
"""Methods that were run on some sets."""


@pytest.mark.parametrize("method", METHODS)
def test_committed_results_are_complete(method: str) -> None:
    cells = committed()
    for data in DATA:
        mine = cells.get((method, data), [])
        if not mine and method in PARTS:
            continue
        assert sorted(cell.replicate for cell in mine) == list(range(paper.replicates_of(data))), data


def test_no_committed_cell_failed():
    assert [cell.label for cells in committed().values() for cell in cells if cell.error is not None] == []


def test_committed_results_reach_the_papers():
    """NNG, BBB and PBP within two standard errors or better everywhere; NNG-MVG, on average, at or above."""
    study = Study(Results(RESULTS, "regression").load())
    metrics = (RMSE, LOG_LIKELIHOOD)
    for method in ("NNG-MVG", "NNG-FFG", "BBB", "PBP"):
        standings = study.standings([method], metrics)
        assert len(standings) == 18
        for standing in standings:
            assert standing.difference is not None
            assert standing.difference > -2.0, (method, standing.data, standing.metric.key, standing.difference)
    mean = np.mean([standing.difference for standing in study.standings(["NNG-MVG"], metrics)])
    assert mean >= 0.0
    better = 0
    for data in set(DATA) - {"naval"}:
        ours, theirs = ([study.estimate(m, data, metric).mean for metric in metrics] for m in ("NNG-MVG", "NNG-FFG"))
        better += ours[0] < theirs[0] and ours[1] > theirs[1]
    assert better >= 8


def test_every_figure_that_falls_short_has_a_word_on_why():
    study = Study(Results(RESULTS, "regression").load())
    without = [
        (standing.method, standing.data, standing.metric.key)
        for standing in shortfalls(study)
        if (standing.method, standing.data, standing.metric.key) not in REASONS
    ]
    assert without == []


def test_a_point_noise_beats_the_papers_log_likelihood_where_its_prior_is_a_floor():
    study = Study(Results(RESULTS, "regression").load())
    for data in ("yacht", "energy"):
        ours = study.estimate("NNG-MVG/point-noise", data, LOG_LIKELIHOOD)
        assert ours is not None
        assert ours.mean > paper.quoted("NNG-MVG", data)["log_likelihood"].mean + 0.5


def test_a_changed_csv_is_another_configuration(table: Path, tmp_path: Path) -> None:
    assert reproduce(table, tmp_path / "results")[0] == 0
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    code, output = reproduce(table, tmp_path / "results")
    assert code == 2
    assert "sha256" in output


def test_a_csv_of_a_known_name_has_its_own_settings(table: Path, tmp_path: Path) -> None:
    own = tmp_path / "protein.csv"
    own.write_text(table.read_text())
    (job,) = plan(["csv-protein"], ["NNG-MVG"], csv=(str(own), "height"))
    assert job.config["hidden"] == [50]


def test_a_full_covariance_is_for_small_networks(table: Path) -> None:
    wide = table.with_name("wide.csv")
    header = ",".join([f"f{index}" for index in range(30)] + ["height"])
    random = np.random.default_rng(2)
    wide.write_text(
        "\n".join([header, *(",".join(map(repr, map(float, row))) for row in random.normal(size=(30, 31)))])
    )
    assert plan(["csv-wide"], ["NNG-full"], csv=(str(wide), "height")) == []
    assert len(plan(["csv-waves"], ["NNG-full"], csv=(str(table), "height"))) == 1


def test_committed_results_of_the_full_covariance_are_of_the_small_sets():
    assert {data for method, data in committed() if method == "NNG-full"} <= set(SMALL_SETS)
