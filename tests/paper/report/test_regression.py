import html
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import rich.console

from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.report import image_aims, paper, regression, site
from noisygrad_paper.report.comparison import LOG_LIKELIHOOD, RMSE, Estimate, signed_difference, verdict
from noisygrad_paper.report.comparison_table import ComparisonTable, Entry
from noisygrad_paper.report.convergence import convergence_table
from noisygrad_paper.report.figures import Curve, difference_plot, training_curves
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.precision import layer_sizes
from noisygrad_paper.report.provenance import common_settings
from noisygrad_paper.report.reasons import REASONS
from noisygrad_paper.report.study import Study
from support import made_results
from support.pages import cell_of, check_stands_alone
from support.paper_source import paper_source, printed_rows

SHIFTS = {"boston": 1.5, "concrete": 0.5, "energy": -0.5, "kin8nm": -1.5, "power": -2.5}


@pytest.mark.skipif(not paper_source().is_file(), reason="the paper's source is not here: set NOISYGRAD_PAPER to it")
@pytest.mark.parametrize(
    ("label", "methods"), [("uci regression", paper.TABLE_1_METHODS), ("tab:uci", paper.SUPPLEMENT_METHODS)]
)
def test_transcription_equals_the_source(label, methods):
    rows = printed_rows(label)
    assert len(rows) == 10
    for row, cells in rows.items():
        assert len(cells) == 2 * len(methods)
        for index, method in enumerate(methods):
            own = row == "naval" and method in ("BBB", "NNG-FFG", "NNG-MVG")
            found = paper.quoted(method, "naval-turbine" if own else row)
            assert found["rmse"].printed == cells[index]
            assert found["log_likelihood"].printed == cells[index + len(methods)]


def test_paper_has_every_row_once():
    for method in paper.METHODS:
        rows = paper.rows_of((method,))
        assert len(rows) == 10
        assert ("naval-turbine" in rows) == (method in ("BBB", "NNG-FFG", "NNG-MVG"))
        assert ("naval" in rows) == (method in ("PBP", "PBP_MV", "VMG"))
    total = sum(paper.quoted("NNG-MVG", data)["rmse"].mean for data in paper.rows_of(("NNG-MVG",)))
    assert total == pytest.approx(2.742 + 5.019 + 0.485 + 0.076 + 0 + 3.886 + 4.097 + 0.637 + 0.979 + 8.885)


def test_paper_reads_rounded_and_absent_errors():
    naval = paper.quoted("NNG-MVG", "naval-turbine")["rmse"]
    assert (naval.mean, naval.standard_error) == (0.0, 0.0005)
    assert naval.text() == "0.000 ± 0.000"
    assert paper.quoted("VMG", "protein")["log_likelihood"].standard_error == 0.0005
    assert paper.quoted("PBP", "year")["rmse"].standard_error is None
    assert paper.quoted("NNG-full", "boston") == {}
    assert [paper.replicates_of(data) for data in ("boston", "protein", "year")] == [20, 5, 1]


def test_estimate_is_mean_and_standard_error():
    values = [1.0, 2.0, 4.0, 9.0]
    found = Estimate.of(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(np.std(values, ddof=1) / 2)
    assert Estimate.of([3.0]) == Estimate(3.0, None)
    with pytest.raises(ValueError, match="at least one"):
        Estimate.of([])


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(2.7421, 0.1251), "2.742 ± 0.125"),
        (Estimate(-2.446, 0.029), "−2.446 ± 0.029"),
        (Estimate(0.07461, 0.00061), "0.07461 ± 0.00061"),
        (Estimate(0.00031, 0.0000041), "0.000310 ± 0.000004"),
        (Estimate(8.9, None), "8.900"),
        (Estimate(0.0, 0.0), "0.000 ± 0.000"),
    ],
)
def test_estimates_are_written_with_their_error(estimate, text):
    assert estimate.text() == text


def test_difference_is_in_standard_errors_and_plus_is_better():
    ours, theirs = Estimate(2.0, 0.3), Estimate(3.0, 0.4)
    assert signed_difference(ours, theirs, RMSE) == pytest.approx(2.0)
    assert signed_difference(ours, theirs, LOG_LIKELIHOOD) == pytest.approx(-2.0)
    assert signed_difference(Estimate(2.0, None), theirs, RMSE) is None
    with pytest.raises(ValueError, match=r"0\.000 as ±0\.0005"):
        signed_difference(Estimate(1.0, 0.0), Estimate(1.0, 0.0), RMSE)
    assert [verdict(value) for value in (1.01, 1.0, 0.0, -1.0, -1.01)] == ["better", *["within"] * 3, "worse"]


def study_of(shifts: dict[str, float], method: str = "NNG-MVG") -> Study:
    return Study([cell for data, shift in shifts.items() for cell in made_results.shifted(method, data, shift)])


def test_standings_recover_the_shifts():
    study = study_of(SHIFTS)
    for data, shift in SHIFTS.items():
        for metric in (RMSE, LOG_LIKELIHOOD):
            standing = study.standing("NNG-MVG", data, metric)
            assert standing.difference == pytest.approx(shift)
    assert study.standing("NNG-full", "boston", RMSE) is None
    assert study.standing("NNG-MVG", "wine", RMSE).ours is None
    assert len(study.standings(["NNG-MVG"], regression.METRICS)) == 18


def test_naval_tasks_are_compared_with_their_own_columns():
    cells = [
        made_results.cell(data, method, replicate, {"rmse": 0.001 + 1e-4 * replicate, "log_likelihood": 6.0})
        for data in ("naval", "naval-turbine")
        for method in paper.METHODS
        for replicate in range(20)
    ]
    study = Study(cells)
    judged = {
        (method, data)
        for method in paper.METHODS
        for data in ("naval", "naval-turbine")
        if study.standing(method, data, RMSE) is not None
    }
    own = {(method, "naval-turbine") for method in ("BBB", "NNG-FFG", "NNG-MVG")}
    assert judged == own | {(method, "naval") for method in ("PBP", "PBP_MV", "VMG")}


def test_summary_counts():
    row = next(row for row in regression.summary_table(study_of(SHIFTS)).rows if row["method"] == "NNG-MVG")
    counts = {name: row[name] for name in ("better", "within", "near", "far")}
    assert counts == {"better": 2, "within": 4, "near": 2, "far": 2}
    assert row["measured"] == "10 of 18"
    assert row["mean"] == "−0.50"


def test_comparison_of_our_two_posteriors():
    cells = [
        made_results.cell(data, method, 0, {"rmse": rmse, "log_likelihood": value})
        for data, method, rmse, value in (
            ("boston", "NNG-MVG", 2.0, -2.0),
            ("boston", "NNG-FFG", 3.0, -3.0),
            ("wine", "NNG-MVG", 0.6, -1.0),
            ("wine", "NNG-FFG", 0.7, -0.9),
            ("yacht", "NNG-MVG", 0.6, -1.0),
            ("year", "NNG-MVG", 8.0, -1.0),
            ("year", "NNG-FFG", 9.0, -2.0),
        )
    ]
    assert regression._better_in_both(Study(cells)) == (1, 2)


def test_shortfalls_use_three_for_the_supplement(monkeypatch):
    study = Study(
        [
            cell
            for method, data, shift in (
                ("NNG-MVG", "boston", -2.2),
                ("BBB", "energy", -1.9),
                ("VMG", "boston", -2.9),
                ("PBP_MV", "wine", -3.2),
                ("PBP", "wine", 4.0),
            )
            for cell in made_results.shifted(method, data, shift)
        ]
    )
    found = [(standing.method, standing.data) for standing in regression.shortfalls(study)]
    assert found == [("PBP_MV", "wine")] * 2 + [("NNG-MVG", "boston")] * 2
    monkeypatch.setitem(REASONS, ("NNG-MVG", "boston", "rmse"), "Because of <the> splits.")
    page = ReportPage("Title")
    regression._shortfalls(page, study)
    (item,) = [line for line in page.html().splitlines() if "NNG-MVG on boston, test RMSE" in line]
    assert "against 2.742 ± 0.125, −2.20 standard errors. Because of &lt;the&gt; splits.</li>" in item


def test_reasons_are_about_figures_of_the_paper():
    aims = {(method, "cifar10", "ece") for method in image_aims.ECE_TARGETS}
    for (method, data, metric), reason in REASONS.items():
        assert metric in paper.quoted(method, data) or (method, data, metric) in aims
        assert reason.endswith(".")


def test_tables_show_verdicts_gaps_and_failures():
    cells = made_results.shifted("NNG-MVG", "boston", 1.5) + made_results.shifted("NNG-MVG", "energy", -1.5, count=12)
    cells += [*made_results.shifted("NNG-MVG", "wine", 0.2), made_results.failed("yacht", "NNG-MVG", 0, "too bad")]
    cells += [made_results.cell("year", "NNG-MVG", 0, {"rmse": 8.9, "log_likelihood": -3.6})]
    study = Study(cells)
    table = regression.comparison_table(study, paper.TABLE_1_METHODS, tuple(paper.DATA), RMSE)
    html = table.html()
    boston = cell_of(html, "boston", 3)
    assert 'class="number entry better"' in boston
    assert 'title="z = +1.50: ours is better by 1.50 standard errors of the difference"' in boston
    assert 'aria-label="better">▲' in boston
    assert "paper 2.742 ± 0.125" in boston
    assert f"{2.742 - 1.5 * 0.125 * math.sqrt(2):.3f} ± 0.125" in boston
    assert "splits" not in boston
    energy = cell_of(html, "energy", 3)
    assert "worse" in energy
    assert "12 of 20 splits" in energy
    assert 'class="number entry within"' in cell_of(html, "wine", 3)
    assert "1 failed" in cell_of(html, "yacht", 3)
    assert "–</span>" in cell_of(html, "yacht", 3)
    year = cell_of(html, "year", 3)
    assert 'class="number entry"' in year
    assert "8.900" in year
    assert "–</span>" in cell_of(html, "boston", 0)
    assert "paper 3.171 ± 0.149" in cell_of(html, "boston", 0)
    assert html.count('<p class="legend">') == 1
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    console.print(table.rich())
    assert "▲" in console.export_text()


def test_page_of_full_results(tmp_path):
    made_results.write_all(tmp_path)
    text = site.build_report(tmp_path).html()
    page = check_stands_alone(text)
    assert len(page.all("img")) == 16
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Regression in short",
        "Table 1: test RMSE",
        "Table 1: test log-likelihood",
        "Supplement: PBP_MV and VMG",
        "How far from the paper",
        "Beyond the paper",
        "Where it falls short",
        "How regression was made",
        "Classification: Table 2",
        "Classification: calibration",
        "Classification: reliability",
        "Classification: training",
        "Classification: corrupted images",
        "Classification: what made the difference",
        "MNIST: calibration",
        "MNIST: reliability",
        "MNIST: training",
        "Digits: calibration",
        "Digits: reliability",
        "Digits: training",
        "Where classification falls short",
        "How classification was made",
        "Variances beside HMC&#x27;s",
        "Active learning",
        "Exploration",
        "Training curves",
        "Figure 1: precision matrices",
    ]
    for shown in (
        "NNG-MVG/point-noise",
        "my-table",
        "naval (turbine, 17 features)",
        "naval (compressor, 16 features)",
        "1 of 1202 trainings failed",
        "PBP on wine, split 3: not finite: rmse = nan",
        "VMG: protein (0 of 5)",
        "Settings of NNG-MVG",
        "optim.lr",
        "cuda: NVIDIA H200",
    ):
        assert shown in text
    assert text == site.build_report(tmp_path).html()


def test_empty_results_say_what_makes_them(tmp_path):
    text = site.build_report(tmp_path).html()
    for command in ("regression", "classification", "convergence", "precision-matrices"):
        assert f"noisygrad reproduce {command}" in text
    assert "<img" not in text
    written = site.build_report(tmp_path).write(tmp_path / "report.html")
    assert written.read_text(encoding="utf-8") == text


def test_results_without_the_papers_methods_make_a_page(tmp_path):
    Results(tmp_path, "regression").append([made_results.failed("diabetes", "point", 0, "too bad")])
    text = site.build_report(tmp_path).html()
    assert "0 are measured here" in text
    assert "1 of 1 trainings failed" in text
    assert "<img" not in text


def test_settings_name_the_data_where_they_differ():
    cells = [("a", {"epochs": 10, "batch": 1, "only": True}), ("b", {"epochs": 10, "batch": 2}), ("b", {"epochs": 10})]
    assert common_settings(cells) == {"epochs": "10", "batch": "1 (a); 2 (b)", "only": "true (a)"}


def test_convergence_counts_iterations_to_the_reference(tmp_path):
    def run(method: str, elbo: list[float]):
        metrics = {"iterations": [10, 20, 30, 40], "elbo": elbo, "lr": 0.01}
        return made_results.cell("boston", method, 0, metrics, experiment="convergence")

    study = Study(
        [run("BBB", [-9.0, -5, -4, -3]), run("NNG-FFG", [-9.0, -3, -2, -2]), run("NNG-MVG", [-9.0, -8, -7, -6])]
    )
    rows = {row["method"]: row for row in convergence_table(study).rows}
    assert [rows[name]["reached"] for name in ("BBB", "NNG-FFG", "NNG-MVG")] == [40, 20, "never"]
    assert [rows[name]["speed"] for name in ("BBB", "NNG-FFG", "NNG-MVG")] == [1.0, 2.0, None]
    assert rows["NNG-FFG"]["final"] == -2.0
    assert rows["BBB"]["lr"] == "0.01"


def test_curves_draw_every_training_and_the_level():
    curve = Curve([1, 2, 3], [-3.0, -2.0, -1.0])
    figure = training_curves({"boston": {"BBB": [curve, curve], "NNG-MVG": [curve]}}, {"boston": -1.0})
    (axes,) = figure.axes
    assert len(axes.lines) == 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["BBB", "NNG-MVG", "BBB at the end"]


def test_difference_plot_keeps_far_values_at_the_edge():
    figure = difference_plot({"RMSE": {"BBB": {"boston": -40.0, "wine": 0.5}}}, {"boston": "boston", "wine": "wine"})
    (axes,) = figure.axes
    (dots,) = (found for found in axes.collections if found.get_label() == "BBB")
    assert [x for x, _ in dots.get_offsets()] == [-6.0, 0.5]
    assert [text.get_text() for text in axes.texts] == ["−40"]


def test_layer_sizes_from_inner_or_all_boundaries():
    expected = {"layer 1": 4, "layer 2": 3, "layer 3": 1}
    assert layer_sizes(np.array([0, 4, 7, 8]), 8) == expected
    assert layer_sizes(np.array([4, 7]), 8) == expected
    assert layer_sizes(None, 8) is None


def test_precision_says_which_matrix_is_missing(tmp_path):
    np.savez(tmp_path / "precision-matrices.npz", **{"NNG-FFG": np.eye(3)})
    text = site.build_report(tmp_path).html()
    assert "Not among the results: NNG-MVG, NNG-BlkTri, NNG-full." in text


def bad_precision(folder: Path) -> None:
    np.savez(folder / "precision-matrices.npz", other=np.eye(3))


def bad_curve(folder: Path) -> None:
    cell = made_results.cell("boston", "BBB", 0, {"elbo": 3.0}, experiment="convergence")
    Results(folder, "convergence").append([cell])


def bad_arrays(folder: Path) -> None:
    bad_precision(folder)
    path = folder / "precision-matrices.npz"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (bad_precision, "expected matrices named"),
        (bad_arrays, r"precision-matrices\.npz has no precision matrices: .*Delete it"),
        (bad_curve, "a list 'iterations'"),
    ],
)
def test_bad_results_are_named(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        site.build_report(tmp_path)


def test_bad_lines_are_named_on_the_page_and_counted_nowhere(tmp_path):
    made_results.write_regression(tmp_path)
    path = tmp_path / "regression.jsonl"
    whole = site.build_report(tmp_path).html()
    assert "Lines that cannot be read" not in whole
    lines = path.read_text().splitlines(keepends=True)
    number, line = next((n, line) for n, line in enumerate(lines, start=1) if '"yacht"' in line and '"BBB"' in line)
    path.write_text("".join(lines).replace(line, line.replace('"rmse": ', '"rmse": 1')))
    with pytest.warns(UserWarning, match=f"line {number} of"):
        text = site.build_report(tmp_path).html()
    assert "Lines that cannot be read" in text
    assert f"line {number} of regression.jsonl is bad (it does not have the checksum" in html.unescape(text)
    path.write_text("".join(lines).replace(line, ""))
    without = site.build_report(tmp_path).html()
    assert without in text.replace(text[text.index("<section>\n<h2>Lines that") : text.index("<footer>")], "")
    assert without != whole


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match="noisygrad reproduce regression"):
        site.build_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="2 entries; expected 1"):
        ComparisonTable(columns=["a"], rows={"x": [Entry(), Entry()]}, caption="Wrong")
    with pytest.raises(ValueError, match="no columns"):
        ComparisonTable(columns=[], rows={}, caption="Wrong")
    with pytest.raises(ValueError, match="1 iterations and 2 values"):
        Curve([1], [1.0, 2.0])
    with pytest.raises(ValueError, match="lie outside"):
        layer_sizes(np.array([0, 9]), 8)
    with pytest.raises(ValueError, match="nothing to draw"):
        difference_plot({"RMSE": {}}, {})
