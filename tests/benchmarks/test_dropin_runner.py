"""The runner does what is missing and no more; the table counts what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dropin_tasks import results
from dropin_tasks.cell import batches
from dropin_tasks.listing import listing
from dropin_tasks.methods import ADAMW, choose, method_named
from dropin_tasks.runner import Order, missing, run
from dropin_tasks.store import Store
from dropin_tasks.table import Pairing, Results, comparison
from dropin_tasks.tasks import TASKS
from dropin_tasks.variation import Variation
from support.made_dropin import made_folder

ROOT = Path(__file__).resolve().parents[2]
TASK = "concrete-regression"


def order(folder: Path, *methods: str, seeds: int = 1, jobs: int = 1) -> Order:
    return Order(
        tasks=[TASK],
        methods=[method_named(name) for name in methods],
        seeds=seeds,
        variation=Variation(epoch_factor=0.002),
        output=folder / "out" / "results.jsonl",
        folder=made_folder(folder, "uci-concrete"),
        only_prepared=True,
        jobs=jobs,
    )


def test_a_run_does_what_is_missing(tmp_path: Path) -> None:
    told = []
    first = order(tmp_path, "adamw-1e-3", "noisy-adam")
    assert run(first, lambda *what: told.append(what)) == {}
    assert [(done, total) for done, total, _ in told] == [(1, 2), (2, 2)]
    lines = first.output.read_text().splitlines()
    for line in map(json.loads, lines):
        assert {"nll", "rmse", "nll_mean_weights", "seconds", "ms_per_step", "warnings", "marginal_nll"} <= set(line)
        assert (line["half"], line["steps"], line["variation"]["epoch_factor"]) == ("tune", 8, 0.002)
    assert missing(first) == []
    more = order(tmp_path, "adamw-1e-3", "noisy-adam", seeds=2)
    assert [job.key[1:] for job in missing(more)] == [(m.name + "@epoch-factor=0.002", 1) for m in more.methods]
    # A torn last line is a training that is done again.
    first.output.write_text(lines[0] + "\n" + lines[1][:40])
    run(first, lambda *_: None)
    again = first.output.read_text().splitlines()
    assert [again[0], again[1]] == [lines[0], lines[1][:40]]
    assert json.loads(again[2])["nll"] == json.loads(lines[1])["nll"]


def test_other_processes_find_the_same(tmp_path: Path) -> None:
    alone, many = order(tmp_path, "adamw-1e-3"), order(tmp_path, "adamw-1e-3", jobs=2)
    run(alone, lambda *_: None)
    (found,) = results.read(alone.output).values()
    alone.output.unlink()
    run(many, lambda *_: None)
    (again,) = results.read(many.output).values()
    assert again["nll"] == found["nll"]


def test_missing_data_are_a_note(tmp_path: Path) -> None:
    asked = order(tmp_path, "adamw-1e-3")
    (tmp_path / "uci-concrete.npz").unlink()
    skipped = run(asked, lambda *_: None)
    assert list(skipped) == [f"{TASK} by adamw-1e-3"]
    assert "uci-concrete.npz is not in the prepared folder" in skipped[f"{TASK} by adamw-1e-3"]
    assert not asked.output.exists()


def test_what_breaks_is_a_result(tmp_path: Path) -> None:
    asked = order(tmp_path)
    broken = method_named("noisy-kfac", {"lr": -1.0}, "backwards")
    run(Order(**{**vars(asked), "methods": [broken]}), lambda *_: None)
    (found,) = results.read(asked.output).values()
    assert found["method"] == "noisy-kfac[backwards]@epoch-factor=0.002"
    assert found["broke"].startswith("ValueError: lr")
    assert found["broke_after"] == 0
    other = method_named("noisy-kfac", {"lr": 0.1}, "backwards")
    with pytest.raises(ValueError, match="give these another --label"):
        missing(Order(**{**vars(asked), "methods": [other]}))


def test_batches_depend_on_the_seed_alone() -> None:
    first = [index.tolist() for index in batches(10, 4, 5, 0)]
    assert first == [index.tolist() for index in batches(10, 4, 5, 0)]
    assert first != [index.tolist() for index in batches(10, 4, 5, 1)]
    assert all(len(index) == 4 for index in first)
    assert len(set(first[0]) | set(first[1])) == 8
    assert torch.is_tensor(next(batches(10, 4, 5, 0)))


def test_unknown_names_are_told() -> None:
    assert choose(["adamw-*"], [*ADAMW, "ivon"], "method") == list(ADAMW)
    with pytest.raises(ValueError, match="no task is called 'mnits'; there are"):
        choose(["mnits"], list(TASKS), "task")


def records(figures: Mapping[str, list[float]], **others: Any) -> dict[results.Key, dict[str, Any]]:
    return {
        (TASK, method, seed): {"nll": value, "validation_nll": value, **others}
        for method, values in figures.items()
        for seed, value in enumerate(values)
    }


def test_level_is_a_hundredth_of_a_nat_or_of_the_rival() -> None:
    assert Pairing(0.309, 0.3, 3).level
    assert not Pairing(0.311, 0.3, 3).level
    assert Pairing(3.029, 3.0, 3).level
    assert not Pairing(3.031, 3.0, 3).level
    assert Pairing(-2.98, -3.0, 3).level
    assert not Pairing(float("inf"), 0.3, 3).level
    assert Pairing(0.3, float("inf"), 3).level
    assert Pairing(0.299, 0.3, 3).ahead
    assert not Pairing(0.3, 0.3, 3).ahead


def test_pairs_are_of_the_seeds_that_both_have() -> None:
    found = Results(records({"noisy-kfac": [0.1, 0.2, 0.9], "adamw-1e-3": [0.2, 0.3]}))
    assert found.pairing(TASK, "noisy-kfac", "adamw-1e-3") == Pairing(pytest.approx(0.15), pytest.approx(0.25), 2)
    assert found.pairing(TASK, "noisy-kfac", "adamw tuned") is None


def test_the_rate_is_chosen_on_validation_rows() -> None:
    made = records({name: [0.5, 0.5] for name in ADAMW})
    made[TASK, "adamw-3e-3", 0]["validation_nll"] = 0.3
    made[TASK, "adamw-1e-2", 0] = {"broke": "NonFiniteError: loss"}
    made[TASK, "adamw-3e-4", 1]["nll"] = 0.0  # of which a choice may know nothing
    assert Results(made).tuned(TASK) == "adamw-3e-3"


def test_the_table_counts(tmp_path: Path) -> None:
    made = records({name: [0.5] for name in ADAMW} | {"ivon": [0.4]}, ece=0.1, ms_per_step=1.0)
    made |= records({"noisy-kfac": [0.45]}, ece=0.05, ms_per_step=2.0)
    made[TASK, "noisy-adam", 0] = {"broke": "NonFiniteError: loss"}
    made[TASK, "noisy-kfac@batch-factor=4", 0] = {"nll": 9.0}
    path = tmp_path / "results.jsonl"
    for (task, method, seed), record in made.items():
        results.append(path, {"task": task, "method": method, "seed": seed, **record})
    text = comparison(results.read(path), list(TASKS))
    assert "0.4500 ++-" in text
    assert (
        "noisy-kfac: level with adamw-1e-3 1/1, with tuned AdamW 1/1, ahead of IVON 0/1, ECE below adamw-1e-3's 1/1"
    ) in text
    assert "step 2.0 × AdamW's" in text
    assert "noisy-adam: level with adamw-1e-3 0/1" in text
    assert "broke 1/1" in text
    assert "9.0000" not in text


def test_tasks_are_listed_with_what_is_missing(tmp_path: Path) -> None:
    text = listing([TASK, "kin8nm-deep"], Store(made_folder(tmp_path, "uci-concrete"), only_prepared=True))
    assert "concrete-regression         tune" in text
    assert "uci-kin8nm.npz is not in the prepared folder" in text


def test_the_command_refuses_unknown_tasks() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "dropin.py"), "--tasks", "concrete", "--table"]
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert refused.returncode == 2
    assert "no task is called 'concrete'" in refused.stderr
