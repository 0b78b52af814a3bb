"""The experiments behind two figures: precision matrices (Figure 1) and training curves (the supplement's)."""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from noisygrad.cli.main import main
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.data import load_table, splits_of, standardised
from noisygrad_paper.experiments import convergence, precision_matrices
from noisygrad_paper.experiments.cells import ConfigurationError, Results, ResultsError
from noisygrad_paper.experiments.precision_matrices import BOUNDARIES, FAMILIES, PrecisionConfig, normalised, precision
from noisygrad_paper.report.convergence import convergence_table, tuning_table
from noisygrad_paper.report.study import Study
from support.made_results import cell

SMALL = functools.partial(PrecisionConfig, data="diabetes", hidden=(4, 3), epochs=2, factor_every=5)
LAYERS = ((4, 11), (3, 5), (1, 4))
"""(outputs, inputs + 1) of the small network on diabetes, which has ten features and comes with scikit-learn."""
BOUNDS = [0, 44, 59, 63]
LIMITS = list(itertools.pairwise(BOUNDS))
EAGER = {"execution": "eager"}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(main, ["reproduce", *map(str, arguments)])


def arrays(folder):
    with np.load(folder / "precision-matrices.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@functools.cache
def learner(method):
    table = load_table("diabetes")
    every = np.arange(table.rows)
    return precision_matrices.trained(method, SMALL(), standardised(table, [(every, every[:0])]), **EAGER)[0]


def block(matrix, row, column):
    return matrix[slice(*LIMITS[row]), slice(*LIMITS[column])]


def scaled(matrix):
    size = len(matrix)
    return np.array([[matrix[i, j] / math.sqrt(matrix[i, i] * matrix[j, j]) for j in range(size)] for i in range(size)])


def damped_block(a, s):
    """Equation (11) of the paper for one layer, in float64; a 1×1 factor is damped exactly."""
    a, s = a[0].double().numpy(), s[0].double().numpy()
    root = math.sqrt(1.0 / load_table("diabetes").rows)
    if len(s) == 1:
        return s[0, 0] * a + root**2 * np.eye(len(a))
    pi = math.sqrt((np.trace(a) / len(a)) / (np.trace(s) / len(s)))
    return np.kron(s + root / pi * np.eye(len(s)), a + pi * root * np.eye(len(a)))


def test_the_files_have_four_matrices_and_how_they_were_made(tmp_path):
    trained = []
    assert precision_matrices.run(
        SMALL(), tmp_path, report=lambda method, epoch: trained.append((method, epoch)), **EAGER
    ) == list(FAMILIES)
    assert trained == [(method, epoch) for method in FAMILIES for epoch in (1, 2)]
    found = arrays(tmp_path)
    assert found.pop(BOUNDARIES).tolist() == BOUNDS
    assert list(found) == list(FAMILIES)
    for method, matrix in found.items():
        assert matrix.shape == (63, 63)
        assert np.isfinite(matrix).all()
        assert (np.diagonal(matrix) == 1.0).all()
        assert (matrix == matrix.T).all()
        assert np.linalg.eigvalsh(matrix.astype(np.float64)).min() > 0
        np.testing.assert_allclose(matrix, normalised(precision(learner(method))), atol=1e-6)
    about = json.loads((tmp_path / "precision-matrices.json").read_text())
    assert about["config"] == SMALL().plain()
    assert about["rows"] == 442
    assert about["weights"] == 63
    assert set(about["seconds"]) == set(about["elbo"]) == set(FAMILIES)
    assert {"device", "versions"} <= set(about)


def test_factorised_precision_is_diagonal():
    (statistics,) = learner("NNG-FFG").covariance.statistics.values()
    expected = statistics.tensors().popitem()[1][0].double().numpy() + 1.0 / 442
    dense = precision(learner("NNG-FFG")).numpy()
    np.testing.assert_allclose(dense, np.diag(expected), rtol=1e-6)
    assert (normalised(torch.from_numpy(dense)) == np.eye(63)).all()


def test_matrix_variate_precision_is_a_kronecker_product_in_each_layer_and_zero_between():
    expected = np.zeros((63, 63))
    for (begin, end), statistics in zip(LIMITS, learner("NNG-MVG").covariance.statistics.values(), strict=True):
        expected[begin:end, begin:end] = damped_block(statistics.inputs, statistics.outputs)
    found = normalised(precision(learner("NNG-MVG")))
    np.testing.assert_allclose(found, scaled(expected), atol=1e-5)
    assert np.abs(block(found, 0, 0) - np.eye(44)).max() > 0.01


def test_block_tridiagonal_precision_couples_neighbours_and_what_lies_beyond_only_through_them():
    (statistics,) = learner("NNG-BlkTri").covariance.statistics.values()
    dense = precision(learner("NNG-BlkTri")).numpy()
    for layer, factors in enumerate(zip(statistics.inputs, statistics.outputs, strict=True)):
        expected = damped_block(*factors)
        np.testing.assert_allclose(block(dense, layer, layer), expected, atol=1e-4 * np.abs(expected).max())
    # It is the covariance that has no corner; the precision's is what the middle layer carries.
    covariance = np.linalg.inv(dense)
    assert np.abs(block(covariance, 0, 2)).max() < 1e-4 * np.abs(block(covariance, 0, 1)).max()
    through = block(dense, 0, 1) @ np.linalg.solve(block(dense, 1, 1), block(dense, 1, 2))
    np.testing.assert_allclose(block(dense, 0, 2), through, atol=1e-4 * np.abs(through).max())
    assert np.abs(block(normalised(torch.from_numpy(dense)), 0, 1)).max() > 0.01


def test_full_precision_is_the_averaged_fisher_and_the_prior():
    (statistics,) = learner("NNG-full").covariance.statistics.values()
    fisher = statistics.tensors().popitem()[1][0].double().numpy()
    found = normalised(precision(learner("NNG-full")))
    np.testing.assert_allclose(found, scaled(fisher + np.eye(63) / 442), atol=1e-5)
    assert np.abs(block(found, 0, 2)).max() > 0.01


@pytest.mark.parametrize("wrong", [[[1.0, 0.0], [0.0, 0.0]], [[1.0, math.nan], [0.0, 1.0]]])
def test_what_is_no_precision_is_refused(wrong):
    with pytest.raises(ValueError, match="diverged"):
        normalised(torch.tensor(wrong))


def test_an_interrupted_run_goes_on_with_the_next_matrix(tmp_path):
    class Killed(BaseException):
        pass

    def kill(method, epoch):
        if (method, epoch) == ("NNG-BlkTri", 1):
            raise Killed

    with pytest.raises(Killed):
        precision_matrices.run(SMALL(), tmp_path, report=kill, **EAGER)
    assert precision_matrices.missing(SMALL(), tmp_path) == ["NNG-BlkTri", "NNG-full"]
    assert precision_matrices.run(SMALL(), tmp_path, **EAGER) == ["NNG-BlkTri", "NNG-full"]
    whole = tmp_path / "whole"
    precision_matrices.run(SMALL(), whole, **EAGER)
    ours, theirs = arrays(tmp_path), arrays(whole)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_other_settings_are_refused_with_the_difference_unless_forced(tmp_path):
    precision_matrices.run(SMALL(epochs=1), tmp_path, **EAGER)
    before = arrays(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(?s)epochs: stored 1, now 2.*--force"):
        precision_matrices.run(SMALL(), tmp_path, **EAGER)
    assert precision_matrices.run(SMALL(epochs=1), tmp_path, **EAGER) == []
    assert precision_matrices.run(SMALL(), tmp_path, force=True, **EAGER) == list(FAMILIES)
    assert (arrays(tmp_path)["NNG-full"] != before["NNG-full"]).any()


def test_a_spoilt_description_is_named(tmp_path):
    precision_matrices.run(SMALL(epochs=1), tmp_path, **EAGER)
    (tmp_path / "precision-matrices.json").write_text("{}")
    with pytest.raises(ResultsError, match="delete it"):
        precision_matrices.missing(SMALL(epochs=1), tmp_path)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"hidden": ()}, {"hidden": (3, 0)}, {"lr": -1.0}])
def test_a_configuration_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrecisionConfig(**wrong).plain()


def test_the_command_for_matrices_works_once(tmp_path, monkeypatch):
    monkeypatch.setattr(precision_matrices, "PrecisionConfig", SMALL)
    first = run("precision-matrices", "--results", tmp_path)
    assert first.exit_code == 0, first.output
    assert set(arrays(tmp_path)) == {*FAMILIES, BOUNDARIES}
    again = run("precision-matrices", "--results", tmp_path)
    assert again.exit_code == 0
    assert "nothing to do" in again.output
    other = run("precision-matrices", "--results", tmp_path, "--seed", 1)
    assert other.exit_code == 2
    assert "seed: stored 0, now 1" in other.output


@pytest.fixture
def small(monkeypatch):
    """Training curves on a set that is at hand, of few replicates and step sizes."""
    monkeypatch.setattr(convergence, "DATA", ("diabetes",))
    monkeypatch.setattr(convergence, "REPLICATES", (0, 1))
    monkeypatch.setattr(convergence, "TUNING_REPLICATES", (18, 19))
    monkeypatch.setattr(convergence, "RATES", (0.001, 0.01))
    monkeypatch.setattr(convergence, "ELBO_SAMPLES", 3)


def quiet(fraction, text):
    """Takes the progress of a job."""


@pytest.mark.parametrize("method", convergence.CHANGES)
def test_a_curve_has_an_elbo_for_each_epoch(small, method):
    (job,) = convergence.plan(["diabetes"], [method], {("diabetes", method): 0.01}, epochs=3)
    cells = convergence.run_job(job, quiet, **EAGER)
    assert [found.key for found in cells] == [("diabetes", method, 0), ("diabetes", method, 1)]
    for found in cells:
        assert found.error is None
        assert found.metrics["lr"] == 0.01 == found.config["lr"]
        # 442 rows, of which 398 are trained on in batches of 10.
        assert found.metrics["iterations"] == [39, 78, 117]
        assert len(found.metrics["elbo"]) == 3
        assert found.metrics["elbo"][-1] > found.metrics["elbo"][0]
    assert cells[0].metrics["elbo"] != cells[1].metrics["elbo"]


def test_looking_at_the_elbo_does_not_change_the_training(small, monkeypatch):
    means = []
    elbo = VariationalLearner.elbo

    def seen(self, *arguments):
        means.append(self.mean.clone())
        return elbo(self, *arguments)

    monkeypatch.setattr(VariationalLearner, "elbo", seen)
    (job,) = convergence.plan(["diabetes"], ["NNG-FFG"], {("diabetes", "NNG-FFG"): 0.01}, epochs=3)
    convergence.run_job(job, quiet, **EAGER)
    convergence.run_tuning(job, quiet, **EAGER)
    assert len(means) == 3 + 1
    assert torch.equal(means[2], means[3])


def test_the_elbo_is_that_of_the_training_rows(small, monkeypatch):
    asked = []

    def seen(self, x, y, num_samples, generators):
        asked.append((x, y, num_samples))
        return torch.zeros(self.replicas)

    monkeypatch.setattr(VariationalLearner, "elbo", seen)
    (job,) = convergence.plan(["diabetes"], ["BBB"], {("diabetes", "BBB"): 0.01}, epochs=1)
    convergence.run_job(job, quiet, **EAGER)
    [(x, y, samples)] = asked
    data = standardised(load_table("diabetes"), splits_of("diabetes")[:2])
    np.testing.assert_allclose(x, data.x_train, atol=1e-6)
    np.testing.assert_allclose(y, data.y_train, atol=1e-6)
    assert samples == 3


def test_tuning_sees_other_replicates_and_varies_the_step_size_alone(small):
    tuning = convergence.tuning_plan(["diabetes"], list(convergence.CHANGES), (0.001, 0.01), epochs=3)
    rates = {("diabetes", method): 0.01 for method in convergence.CHANGES}
    shown = convergence.plan(["diabetes"], list(convergence.CHANGES), rates, epochs=3)
    assert len(tuning) == 2 * len(shown) == 2 * len(convergence.CHANGES)
    assert not {number for job in tuning for number in job.replicates} & set(shown[0].replicates)
    for job, (low, high) in zip(shown, zip(tuning[::2], tuning[1::2], strict=True), strict=True):
        assert [low.method, high.method] == [f"{job.method}/lr=0.001", f"{job.method}/lr=0.01"]
        assert high.config == job.config
        assert {**low.config, "lr": 0.01} == job.config
    assert {job.config["anneal"] for job in shown} == {1.0}


def test_noisy_methods_differ_only_in_what_they_say(small):
    rates = {("diabetes", method): 0.01 for method in convergence.CHANGES}
    configs = {job.method: job.config for job in convergence.plan(["diabetes"], list(convergence.CHANGES), rates)}
    matrix, exact = configs["NNG-MVG"], configs["NNG-MVG/exact-damping"]
    assert {**configs["NNG-FFG"], "family": "kronecker"} == matrix
    assert {**matrix, "damping_mode": "exact", "factor_every": exact["factor_every"]} == exact


def tuned(method, rate, elbo, replicate=0):
    metrics = {"diverged": 1} if elbo is None else {"elbo": elbo, "diverged": 0}
    name = f"{method}/lr={rate:g}"
    return cell("boston", name, replicate, metrics, experiment=convergence.TUNING, config={"lr": rate})


def test_the_step_size_is_chosen_by_the_mean_elbo_at_the_end():
    cells = [
        *(tuned("BBB", rate, elbo) for rate, elbo in ((0.001, -900.0), (0.01, -700.0), (0.1, -800.0))),
        *(tuned("BBB", rate, elbo, 1) for rate, elbo in ((0.001, -900.0), (0.01, -850.0), (0.1, -700.0))),
        tuned("NNG-MVG/exact-damping", 0.001, -500.0),
        tuned("NNG-MVG/exact-damping", 0.01, -400.0),
        tuned("NNG-MVG/exact-damping", 0.01, None, 1),
    ]
    assert convergence.tuned_rates(cells) == {("boston", "BBB"): 0.1, ("boston", "NNG-MVG/exact-damping"): 0.001}


def test_a_method_that_always_diverges_is_named():
    with pytest.raises(ValueError, match="BBB diverged on boston"):
        convergence.tuned_rates([tuned("BBB", 0.1, None), tuned("BBB", 0.3, None)])


def test_a_training_that_diverges_while_tuning_is_a_finding(small):
    (job,) = convergence.tuning_plan(["diabetes"], ["BBB"], (1e20,), epochs=1)
    assert [found.metrics for found in convergence.run_tuning(job, quiet, **EAGER)] == [{"diverged": 1}] * 2


def test_an_unknown_method_is_refused(small):
    with pytest.raises(ValueError, match=r"there is no method .* NNG-FFG"):
        convergence.tuning_plan(["diabetes"], ["VMG"], (0.1,))


def test_a_stopped_command_goes_on(small, monkeypatch, tmp_path):
    arguments = ("convergence", "--methods", "BBB,NNG-FFG", "--epochs", 2, "--results", tmp_path)
    computed = []

    def counted(function, stop_at):
        def work(job, report, **options):
            if job.method == stop_at:
                raise KeyboardInterrupt
            computed.append(job.method)
            return function(job, report, **options)

        return work

    tuning, curves = convergence.run_tuning, convergence.run_job
    for stop, expected in (
        (("NNG-FFG/lr=0.001", None), ["BBB/lr=0.001", "BBB/lr=0.01"]),
        ((None, "NNG-FFG"), ["NNG-FFG/lr=0.001", "NNG-FFG/lr=0.01", "BBB"]),
        ((None, None), ["NNG-FFG"]),
        ((None, None), []),
    ):
        monkeypatch.setattr(convergence, "run_tuning", counted(tuning, stop[0]))
        monkeypatch.setattr(convergence, "run_job", counted(curves, stop[1]))
        done = run(*arguments)
        assert done.exit_code == (0 if stop == (None, None) else 130), done.output
        assert computed == expected
        computed.clear()
    cells = Results(tmp_path, "convergence").load()
    assert len(cells) == 4
    assert len(Results(tmp_path, "convergence-tuning").load()) == 8
    tuned = convergence.tuned_rates(Results(tmp_path, "convergence-tuning").load())
    assert {(found.data, found.method): found.config["lr"] for found in cells} == tuned
    assert "final ELBO" in done.output
    other = run(*arguments[:-2], "--seed", 1, "--results", tmp_path)
    assert other.exit_code == 2
    assert "seed: stored 0, now 1" in other.output


def training(method, replicate, elbo, iterations=(10, 20, 30)):
    metrics = {"iterations": list(iterations), "elbo": elbo, "lr": 0.01}
    return cell("boston", method, replicate, metrics, experiment="convergence")


def test_means_over_the_trainings_are_compared_and_single_ones_counted():
    study = Study(
        [
            training("BBB", 0, [-9.0, -8.0, -7.0]),
            training("BBB", 1, [-5.0, -4.0, -3.0]),
            # In the mean −8, −4.5, −4, beside the −5 that BBB ends with; the second alone never has its −3.
            training("NNG-FFG", 0, [-8.0, -5.5, -4.5]),
            training("NNG-FFG", 1, [-8.0, -3.5, -3.5]),
            # BBB has no third training to compare this with.
            training("NNG-FFG", 2, [99.0, 99.0, 99.0]),
            training("NNG-MVG", 0, [-8.0, -7.5, -7.2]),
            training("NNG-MVG", 1, [-3.0, -3.0, -3.0]),
        ]
    )
    rows = {row["method"]: row for row in convergence_table(study).rows}
    assert [rows[name]["reached"] for name in ("BBB", "NNG-FFG", "NNG-MVG")] == [30, 20, "never"]
    assert [rows[name]["trainings"] for name in ("BBB", "NNG-FFG", "NNG-MVG")] == ["2 of 2", "1 of 2", "1 of 2"]
    assert [rows[name]["speed"] for name in ("BBB", "NNG-FFG", "NNG-MVG")] == [1.0, 1.5, None]


def test_trainings_that_cannot_be_averaged_are_refused():
    elbo = [-9.0, -8.0, -7.0]
    study = Study([training("BBB", 0, elbo), training("BBB", 1, elbo, (10, 20, 31))])
    with pytest.raises(ValueError, match="same iterations"):
        convergence_table(study)


def test_the_report_shows_what_tuning_found():
    study = Study([tuned("BBB", 0.01, -700.0), tuned("BBB", 0.01, -800.0, 1), tuned("BBB", 0.1, None)])
    (row,) = tuning_table(study).rows
    assert row == {"data": "boston", "method": "BBB", "0.01": -750.0, "0.1": "diverged"}


def test_committed_curves_show_natural_gradients_ahead_of_bbb():
    """NNG-FFG has what BBB ends with in fewer iterations; NNG-MVG, damped exactly, in half as many, and ends above."""
    study = Study(Results(Path(__file__).resolve().parents[3] / "results", "convergence").load())
    rows = {(row["data"], row["method"]): row for row in convergence_table(study).rows}
    assert {data for data, _ in rows} == {"boston", "concrete"}
    for data in ("boston", "concrete"):
        bbb, ffg, mvg = (rows[data, method] for method in ("BBB", "NNG-FFG", "NNG-MVG/exact-damping"))
        assert ffg["reached"] < bbb["reached"]
        assert mvg["reached"] <= bbb["reached"] / 2
        assert mvg["final"] > bbb["final"]
