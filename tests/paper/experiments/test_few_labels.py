"""Twenty labels: the trials, the comparison with HMC, the race of acquisitions, and the commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from noisygrad.cli.main import main as app
from noisygrad_paper.baselines.hmc import HMCSettings
from noisygrad_paper.data import load_table
from noisygrad_paper.experiments import active_learning, few_labels, hmc_correlation
from noisygrad_paper.experiments.cells import Cell, Job, Results
from noisygrad_paper.experiments.few_labels import METHODS, FewPoints, trial


def quiet(done: float, word: str) -> None:
    assert 0.0 <= done <= 1.0
    assert word


def points(sets: int = 3, count: int = 6, inputs: int = 2) -> FewPoints:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sets, count, inputs, generator=generator, dtype=torch.float64)
    return FewPoints(x, x.sum(-1, keepdim=True).sin(), x)


def test_trials_are_apart_and_the_same_every_time() -> None:
    table = load_table("diabetes")
    one, again, other = trial(table, 0), trial(table, 0), trial(table, 1)
    assert [len(one.labelled), len(one.others), len(one.pool)] == [20, 100, table.rows - 120]
    assert sorted(np.concatenate([one.labelled, one.others, one.pool])) == list(range(table.rows))
    assert np.array_equal(one.labelled, again.labelled)
    assert not np.array_equal(one.labelled, other.labelled)
    small = replace(table, x=table.x[:125], y=table.y[:125])
    assert len(trial(small, 0, 5).pool) == 5
    with pytest.raises(ValueError, match=r"has 125 rows; a trial needs 129: 20 labelled, 100 others and a pool"):
        trial(small, 0, 9)


def test_ridge_is_its_formula() -> None:
    data = points()
    fitted = METHODS["ridge"].fit(data, [0, 1, 2], {"ridge": 1.0}, quiet)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    mean, variance = fitted.moments(x)
    for index in range(3):
        seen, asked = (torch.cat([part[index], torch.ones(len(part[index]), 1)], 1) for part in (data.x, x))
        inverse = torch.linalg.inv(seen.T @ seen + torch.eye(3))
        torch.testing.assert_close(variance[index], (asked @ inverse * asked).sum(-1))
        torch.testing.assert_close(mean[index], (asked @ inverse @ seen.T @ data.y[index]).squeeze(-1))
    torch.testing.assert_close(fitted.moments(x[1:2], slice(1, 2))[1], variance[1:2])


@pytest.mark.parametrize("method", ["PBP", "NNG-FFG", "NNG-MVG", "NNG-BlkTri", "NNG-full", "NNG-MVG/exact"])
def test_fits_tell_some_networks_apart_from_all(method: str) -> None:
    data, chosen = points(), METHODS[method]
    config = chosen.config | {"epochs": 3, "test_samples": 50}
    fitted = chosen.fit(replace(data, execution="eager"), [0, 1, 2], config, quiet)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    mean, variance = fitted.moments(x)
    assert mean.shape == variance.shape == (3, 4)
    assert bool((variance > 0).all())
    some = fitted.moments(x[1:], slice(1, None))
    torch.testing.assert_close(some[0], mean[1:])
    torch.testing.assert_close(some[1], variance[1:])


def test_hmc_pads_what_is_still_to_come() -> None:
    x, y, weight = few_labels._padded(torch.ones(2, 23, 3), torch.ones(2, 23, 1))
    assert x.shape == (2, 30, 3)
    assert y.shape == (2, 30, 1)
    assert weight.sum(1).tolist() == [23.0, 23.0]
    assert not x[:, 23:].any()
    x, _, weight = few_labels._padded(torch.ones(2, 20, 3), torch.ones(2, 20, 1))
    assert x.shape[1] == 20
    assert bool((weight == 1).all())


def job(method: str, data: str = "diabetes", trials: int = 2, experiment: object = hmc_correlation) -> Job:
    return experiment.plan([data], [method], trials=trials, epochs=4)[0]


def test_a_job_of_variances() -> None:
    cells = hmc_correlation.run_job(job("NNG-MVG"), quiet, execution="eager")
    assert [cell.replicate for cell in cells] == [0, 1]
    found = hmc_correlation.variances(cells[0])
    assert found.shape == (2, 100)  # two seeds
    assert not np.array_equal(found[0], found[1])
    assert len(cells[0].metrics["mean_0"]) == 100
    # A trial does not depend on which others are computed with it.
    alone = hmc_correlation.run_job(replace(job("NNG-MVG"), replicates=(1,)), quiet, execution="eager")
    np.testing.assert_allclose(hmc_correlation.variances(alone[0]), hmc_correlation.variances(cells[1]), rtol=1e-4)


def made(method: str, rows: Sequence[Sequence[float]], trial: int = 0) -> Cell:
    metrics = {f"variance_{k}": list(row) for k, row in enumerate(rows)}
    return Cell(
        experiment="hmc-correlation",
        data="boston",
        method=method,
        replicate=trial,
        config={},
        metrics=metrics,
        seconds=1.0,
        device="cpu",
    )


def test_variances_are_compared_trial_by_trial() -> None:
    truth, one, other = [1.0, 2.0, 4.0], [2.0, 3.0, 9.0], [0.5, 1.0, 2.0]
    cells = [made("HMC", [truth]), made("NNG-MVG", [one, other]), made("NNG-MVG", [one], trial=1)]
    (found,) = hmc_correlation.compare(cells)  # the second trial has no HMC
    metrics = found.metrics
    first = np.corrcoef(one, truth)[0, 1]
    assert metrics["correlations"] == pytest.approx([first, 1.0])
    assert metrics["correlation"] == pytest.approx((first + 1.0) / 2)
    assert metrics["ratio"] == pytest.approx((2.0 + 0.5) / 2)
    logs = np.corrcoef(np.log(one), np.log(truth))[0, 1]
    assert metrics["log_correlation"] == pytest.approx((logs + 1.0) / 2)
    for useless in ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]):
        (failed,) = hmc_correlation.compare([made("HMC", [truth]), made("NNG-MVG", [useless])])
        assert "nothing to correlate" in str(failed.error)


def test_a_race_takes_the_point_of_the_largest_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_learning, "_CHUNK", 37)
    cells = active_learning.run_job(job("ridge", experiment=active_learning), quiet)
    table = load_table("diabetes")
    x = np.column_stack([(table.x - table.x.mean(0)) / table.x.std(0), np.ones(table.rows)])
    y = (table.y - table.y.mean()) / table.y.std()
    rows, pool, test = (getattr(trial(table, 1), name).tolist() for name in ("labelled", "pool", "others"))
    curve = []
    for _ in range(10):
        inverse = np.linalg.inv(x[rows].T @ x[rows] + np.eye(x.shape[1]))
        errors = x[test] @ inverse @ x[rows].T @ y[rows] - y[test]
        curve.append(np.sqrt(np.mean(errors**2)) * table.y.std())
        best = pool[int(np.argmax(np.einsum("ni,ij,nj->n", x[pool], inverse, x[pool])))]
        rows.append(best)
        pool.remove(best)
    assert cells[1].metrics["rmse_active_by_round"] == pytest.approx(curve)
    assert cells[1].metrics["rmse_active"] == pytest.approx(curve[-1])
    random = cells[1].metrics["rmse_random_by_round"]
    assert random[0] == pytest.approx(curve[0])
    assert random[1:] != pytest.approx(curve[1:])


def test_both_ways_start_from_the_same_network() -> None:
    (cell,) = active_learning.run_job(job("NNG-MVG", trials=1, experiment=active_learning), quiet)
    ways = [cell.metrics[f"rmse_{way}_by_round"] for way in ("random", "active")]
    assert [len(way) for way in ways] == [10, 10]
    assert ways[0][0] == pytest.approx(ways[1][0], rel=1e-4)


def test_a_batch_is_chosen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = few_labels.DrawnFit.batch

    def counted(self: few_labels.DrawnFit, x: torch.Tensor, network: int, count: int) -> list[int]:
        found = real(self, x, network, count)
        asked.append(count)
        assert len(set(found)) == count
        return found

    monkeypatch.setattr(few_labels.DrawnFit, "batch", counted)
    (cell,) = active_learning.run_job(job("NNG-MVG/batch", trials=1, experiment=active_learning), quiet)
    assert asked == [3, 3, 3]
    assert len(cell.metrics["rmse_active_by_round"]) == 10


def test_a_trial_with_nothing_to_choose_by_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = few_labels.RidgeFit.moments

    def some_are_useless(
        self: few_labels.RidgeFit, x: torch.Tensor, only: slice = few_labels.EVERY
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = real(self, x, only)
        if only != few_labels.EVERY:
            variance[1], variance[2, 0] = 1.0, torch.nan
        return mean, variance

    monkeypatch.setattr(few_labels.RidgeFit, "moments", some_are_useless)
    cells = active_learning.run_job(job("ridge", trials=4, experiment=active_learning), quiet)
    errors = [cell.error for cell in cells]
    assert errors[0] is errors[3] is None
    assert "nothing to choose by" in str(errors[1])
    assert "not finite" in str(errors[2])
    assert not cells[1].metrics


@pytest.mark.parametrize("experiment", [hmc_correlation, active_learning])
def test_hmc_goes_through_the_experiments(experiment: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpyro")
    short = HMCSettings(chains=2, warmup=60, samples=20, leapfrog_steps=4, extensions=1)
    monkeypatch.setitem(few_labels.METHODS, "HMC", few_labels.hamiltonian(short))
    monkeypatch.setattr(active_learning, "_HMC", short)
    monkeypatch.setattr(active_learning, "ACQUISITIONS", 2)
    asked = job("HMC", experiment=experiment)
    cells = experiment.run_job(asked, quiet)
    assert [cell.error for cell in cells] == [None, None]
    for cell in cells:
        assert cell.metrics["rhat"] > 1.01  # far too short
        assert cell.metrics["ess"] > 0
    if experiment is hmc_correlation:
        # A trial does not depend on which others are computed with it, and R̂ is of the points that are judged.
        alone = experiment.run_job(replace(asked, replicates=(1,)), quiet)
        assert alone[0].metrics == cells[1].metrics
    else:
        assert len(cells[0].metrics["rmse_active_by_round"]) == 3


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands know the one table that needs no file."""
    monkeypatch.setattr(few_labels, "DATA", ("diabetes",))


def test_tuning_has_a_file_of_its_own(embedded: None, tmp_path: Path) -> None:
    options = ["reproduce", "active-learning", "--data", "diabetes", "--methods", "PBP", "--trials", "1"]
    found = CliRunner().invoke(app, [*options, "--tuning", "--set", "epochs=1", "--results", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["active-learning-tuning.jsonl"]


@pytest.mark.parametrize("command", ["hmc-correlation", "active-learning"])
def test_the_command_keeps_what_it_has(
    embedded: None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"hmc-correlation": "ridge", "active-learning": "PBP"}[command]
    options = ["reproduce", command, "--data", "diabetes", "--methods", method, "--trials", "2", "--epochs", "1"]
    runner = CliRunner()
    first = runner.invoke(app, [*options, "--results", str(tmp_path)])
    assert first.exit_code == 0, first.output
    cells = Results(tmp_path, command).load()
    assert len(cells) == 2
    experiment = {"hmc-correlation": hmc_correlation, "active-learning": active_learning}[command]
    monkeypatch.setattr(experiment, "run_job", lambda *args, **kwargs: pytest.fail("it is there already"))
    again = runner.invoke(app, [*options, "--results", str(tmp_path)])
    assert again.exit_code == 0
    assert Results(tmp_path, command).load() == cells
    wrong = runner.invoke(app, ["reproduce", command, "--methods", "magic", "--results", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "known are" in wrong.output


def test_settings_are_tuned_on_other_trials() -> None:
    experiment = active_learning
    (asked,) = experiment.plan(["diabetes"], ["PBP"], trials=1, tuning=True, changes={"epochs": 2})
    assert asked.method == "PBP epochs=2"
    (tuned,) = experiment.run_job(asked, quiet)
    assert tuned.experiment == "active-learning-tuning"
    plain = replace(asked, config={name: value for name, value in asked.config.items() if name != "tuning"})
    (other,) = experiment.run_job(plain, quiet)
    assert tuned.metrics["rmse_random"] != other.metrics["rmse_random"]  # of another trial
    (far,) = experiment.run_job(replace(plain, replicates=(1000,)), quiet)
    assert tuned.metrics == far.metrics
    for match, what in (
        ("ask for tuning", {"changes": {"epochs": 2}}),
        ("has no setting magic", {"tuning": True, "changes": {"magic": 2}}),
        ("give a int", {"tuning": True, "changes": {"epochs": "many"}}),
    ):
        with pytest.raises(ValueError, match=match):
            experiment.plan(["diabetes"], ["PBP"], **what)


def test_the_truth_alone_needs_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("numpyro")
    monkeypatch.setattr(hmc_correlation, "run_job", lambda job, *args, **kwargs: [made("HMC", [[1.0, 2.0]])])
    monkeypatch.setattr(
        hmc_correlation, "plan", lambda *args, **kwargs: [Job(data="boston", method="HMC", replicates=(0,), config={})]
    )
    options = ["reproduce", "hmc-correlation", "--data", "boston", "--methods", "HMC", "--results", str(tmp_path)]
    found = CliRunner().invoke(app, options)
    assert found.exit_code == 0, found.output


def test_hmc_without_its_extra_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = ["reproduce", "hmc-correlation", "--data", "yacht", "--results", str(tmp_path)]
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert "HMC needs jax, numpyro: pip install 'noisygrad[paper]'" in refused.output
    assert not list(tmp_path.iterdir())
