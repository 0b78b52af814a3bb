"""Figure 3 end to end: plan, seeds side by side, the command, and its bad input."""

import json
import tempfile
from dataclasses import replace

import numpy as np
import pytest

for _module in ("Box2D", "gymnasium", "sb3_contrib"):
    pytest.importorskip(_module)

import torch
from typer.testing import CliRunner

from noisygrad.cli.main import main
from noisygrad_paper.experiments import exploration
from noisygrad_paper.experiments.cells import Job, Results
from noisygrad_paper.experiments.exploration_conditions import (
    BBB,
    COMPARED,
    COMPARED_SEEDS,
    ITERATIONS,
    METHODS,
    MVG,
    NORM,
    SEEDS,
)
from noisygrad_paper.exploration import MODELS


def quick(method: str, replicates=(0, 1), iterations: int = 2, batch: int = 600) -> Job:
    config = exploration._config(method) | {"iterations": iterations, "batch": batch, "seed": 0}
    return Job(data="MountainCar", method=method, replicates=replicates, config=config)


def run(job: Job):
    cells = exploration.run_job(job, lambda fraction, text: None)
    assert [cell.replicate for cell in cells] == list(job.replicates)
    return cells


def test_the_plan_is_the_papers():
    jobs = exploration.plan(list(ITERATIONS), METHODS)
    seeds: dict[tuple[str, str], list[int]] = {}
    for job in jobs:
        seeds.setdefault((job.data, job.method), []).extend(job.replicates)
        assert job.config["batch"] == 5000
        assert job.config["iterations"] == (40 if job.data == "MountainCar" else 150)
        assert len(job.replicates) <= 10
    assert len(seeds) == 3 * len(METHODS)
    for (task, method), found in seeds.items():
        assert sorted(found) == list(range(COMPARED_SEEDS[task] if method in COMPARED else SEEDS))
    settings = {job.method: job.config["model"] for job in jobs if "model" in job.config}
    assert (settings[f"{MVG}/released"]["num_data"], settings[f"{MVG}/released"]["noise_std"]) == (5, 5.0)
    assert settings[MVG]["noise_std"] == settings[BBB]["noise_std"]
    assert settings[MVG]["num_data"] == settings[BBB]["num_data"]
    for what in ({"seeds": 0}, {"iterations": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            exploration.plan(["MountainCar"], METHODS, **what)
    with pytest.raises(ValueError, match="no task 'Swimmer'"):
        exploration.plan(["Swimmer"], METHODS)
    with pytest.raises(ValueError, match=r"no condition 'TRPO\+RND'"):
        exploration.plan(["MountainCar"], ["TRPO+RND"])


def test_settings_are_tuned_on_other_seeds(tmp_path):
    (job,) = exploration.plan(["MountainCar"], [MVG], seeds=1, tuning=True, changes={"num_data": 900, "lr": 0.1})
    assert job.method == f"{MVG} num_data=900 lr=0.1"
    assert (job.config["model"]["num_data"], job.config["model"]["fit"]["lr"]) == (900, 0.1)
    settings = exploration._settings(job.config["model"])
    assert settings == replace(MODELS["NNG-MVG"], num_data=900, fit=replace(MODELS["NNG-MVG"].fit, lr=0.1))
    (job_of_norm,) = exploration.plan(["MountainCar"], [NORM], seeds=1, tuning=True, changes={"weight": 1e-3})
    assert job_of_norm.config["weight"] == 1e-3
    for name, model in MODELS.items():  # back from what a file of results holds
        stored = json.loads(json.dumps(exploration._config(f"TRPO+{name}")["model"]))
        assert exploration._settings(stored) == model
    # The figure's seeds are others.
    plain = replace(job, config={name: value for name, value in job.config.items() if name != "tuning"})
    first, other = (exploration._Group(each).agents[0]._algorithm.seed for each in (job, plain))
    assert (first, other) == (0, 100)
    for match, what in (
        ("ask for tuning", {"methods": [MVG], "changes": {"lr": 0.1}}),
        ("has no setting magic", {"methods": [MVG], "tuning": True, "changes": {"magic": 1}}),
        ("has no setting weight; it has none", {"methods": ["TRPO"], "tuning": True, "changes": {"weight": 0.1}}),
        ("has no setting model", {"methods": [MVG], "tuning": True, "changes": {"model": 1}}),
        ("give a int", {"methods": [MVG], "tuning": True, "changes": {"num_data": 0.5}}),
    ):
        with pytest.raises(ValueError, match=match):
            exploration.plan(["MountainCar"], **what)
    options = ["reproduce", "exploration", "--tasks", "MountainCar", "--methods", BBB, "--seeds", "1"]
    options += ["--iterations", "1", "--tuning", "--set", "lr=0.02", "--results", str(tmp_path)]
    found = CliRunner().invoke(main, options)
    assert found.exit_code == 0, found.output
    assert not Results(tmp_path, "exploration").load()
    (cell,) = Results(tmp_path, "exploration-tuning").load()
    assert cell.method == f"{BBB} lr=0.02"


def test_training_leaves_no_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(quick("TRPO", replicates=(0,), iterations=1))
    assert not list(tmp_path.iterdir())


# Rollouts of 60 steps a copy never reach the end of an episode, so no return is known: 5000 steps do.
@pytest.mark.parametrize("method", ["TRPO+NNG-MVG", "TRPO+norm"])
def test_a_job_end_to_end(method):
    before = torch.get_rng_state()
    cells = run(quick(method, iterations=2, batch=5000))
    assert torch.equal(torch.get_rng_state(), before)
    for cell in cells:
        assert cell.error is None
        assert len(cell.metrics["returns"]) == 2
        assert cell.metrics["area"] == np.mean(cell.metrics["returns"])
        parts = [cell.metrics[f"seconds_{part}"] for part in ("rollout", "bonus", "policy", "model")]
        assert parts[0] > 0
        if "model_error" in cell.metrics:
            assert len(cell.metrics["model_error"]) == len(cell.metrics["persistence_error"]) == 1
            assert cell.metrics["model_error"][0] < cell.metrics["persistence_error"][0]
            assert parts[3] > 0


def test_a_rollout_without_the_end_of_an_episode_is_said_to_have_no_return():
    (cell,) = run(quick("TRPO", replicates=(0,), iterations=1))
    assert "not finite: returns = [nan]" in cell.error


def test_a_seed_begins_alike_in_any_company_and_under_any_condition():
    def first_rollout(method, replicates):
        group = exploration._Group(quick(method, replicates))
        group.iterate()
        group.iterate()
        agent = next(agent for agent in group.agents if agent.replicate == 3)
        return agent._algorithm.rollout_buffer.actions.copy(), agent._algorithm.rollout_buffer.advantages.copy()

    alone, company = first_rollout("TRPO+BBB", (3,)), first_rollout("TRPO+BBB", (1, 3))
    np.testing.assert_array_equal(alone[0], company[0])
    np.testing.assert_allclose(alone[1], company[1], rtol=1e-2, atol=1e-6)
    without = first_rollout("TRPO", (2, 3))
    # TRPO has moved by nothing yet, and so it has not taken its buffer apart.
    np.testing.assert_array_equal(alone[0], without[0].swapaxes(0, 1).reshape(-1, 1))
    assert (without[1] == 0).all()


def test_the_command_runs_what_is_missing_and_shows_it(tmp_path):
    options = ["reproduce", "exploration", "--tasks", "MountainCar", "--methods", "TRPO,TRPO+norm"]
    options += ["--iterations", "1", "--results", str(tmp_path)]
    done = CliRunner().invoke(main, [*options, "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert "Area under the curve of median returns" in " ".join(done.output.split())
    again = CliRunner().invoke(main, [*options, "--seeds", "2"])
    assert again.exit_code == 0, again.output
    assert "2 of 4 cells are already in" in " ".join(again.output.split())
    assert len(Results(tmp_path, "exploration").load()) == 4
    other = CliRunner().invoke(main, [*options[:-4], "--iterations", "2", "--results", str(tmp_path), "--seeds", "1"])
    assert other.exit_code == 2
    assert "iterations: stored 1, now 2" in other.output
    unknown = CliRunner().invoke(main, ["reproduce", "exploration", "--tasks", "Swimmer"])
    assert unknown.exit_code == 2
    assert "known are CartPoleSwingup" in unknown.output
