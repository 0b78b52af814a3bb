"""Stored cells: nothing is lost but what a kill cuts off, nothing is stored twice, nothing of another configuration."""

import itertools
import json
import math
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noisygrad_paper.experiments.cells import Cell, ConfigurationError, Job, Results
from noisygrad_paper.experiments.signed_lines import signed
from support.processes import clean_processes

VERSIONS = {"python": "3", "torch": "2"}
CONFIG = {"epochs": 40, "prior": {"variance": 1.0}, "hidden": [50]}


def cell(replicate=0, **changes):
    values = {
        "experiment": "regression",
        "data": "yacht",
        "method": "NNG-MVG",
        "replicate": replicate,
        "config": CONFIG,
        "metrics": {"rmse": 0.9, "log_likelihood": -2.3 - replicate},
        "seconds": 1.5,
        "versions": VERSIONS,
        "device": "cpu",
    }
    return Cell(**{**values, **changes})


def failed(replicate=0, error="diverged", **changes):
    return cell(replicate, metrics={}, error=error, **changes)


def job(*replicates, **changes):
    values = {"data": "yacht", "method": "NNG-MVG", "replicates": replicates, "config": CONFIG}
    return Job(**{**values, **changes})


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results", "regression")


def store(folder, method, begin, end, step, barrier):
    """What a process does: store cells, some at a time, until it is killed or has them all."""
    results = Results(folder, "regression")
    config = {"text": "x" * 2000}
    barrier.wait()
    for first in range(begin, end, step):
        numbers = range(first, min(first + step, end))
        results.append([cell(n, method=method, config=config, metrics={"rmse": n / 7}) for n in numbers])


@pytest.fixture
def launch():
    """Start processes that store cells, all at the same moment."""
    context = clean_processes()
    processes = []

    def start(*arguments):
        barrier = context.Barrier(len(arguments) + 1)
        begun = [context.Process(target=store, args=(*each, barrier)) for each in arguments]
        processes.extend(begun)
        for process in begun:
            process.start()
        barrier.wait()
        return begun

    yield start
    for process in processes:
        process.kill()


def test_a_line_has_the_documented_fields_and_comes_back():
    line = cell(3).to_line()
    assert set(json.loads(line)) == {
        "experiment", "data", "method", "replicate", "config", "metrics", "seconds", "versions", "device",
        "checksum",
    }  # fmt: skip
    assert "\n" not in line
    assert Cell.from_line(line) == cell(3)
    assert Cell.from_line(failed(2, "Zeile\nzwei ü").to_line()) == failed(2, "Zeile\nzwei ü")


def test_numbers_of_numpy_and_tuples_become_plain():
    made = cell(
        np.int64(4),
        config={"hidden": (50, 50), 3: None},
        metrics={"rmse": np.float32(0.5), "returns": (np.float64(1), 2)},
        seconds=np.float64(2),
    )
    assert made == Cell.from_line(made.to_line())
    assert made.config == {"hidden": [50, 50], "3": None}
    assert made.metrics == {"rmse": 0.5, "returns": [1.0, 2]}
    assert {type(made.metrics["rmse"]), type(made.seconds)} == {float}
    assert type(made.replicate) is int


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"metrics": {"rmse": 1.0, "log_likelihood": math.nan}},
            ["yacht NNG-MVG replicate 7", "log_likelihood", "nan"],
        ),
        ({"metrics": {"returns": [1.0, -math.inf]}}, ["returns", "-inf"]),
        ({"metrics": {"rmse": torch.tensor(0.5)}}, ["rmse", "Tensor"]),
        ({"metrics": {"rmse": "0.5"}}, ["rmse", "'0.5'"]),
        ({"metrics": {}}, ["metrics or an error"]),
        ({"error": "diverged"}, ["metrics or an error"]),
        ({"metrics": {}, "error": ""}, ["metrics or an error"]),
        ({"seconds": math.inf}, ["seconds"]),
        ({"config": {"prior_variance": math.inf}}, ["config", "finite"]),
        ({"config": {"device": torch.device("cpu")}}, ["config", "text"]),
        ({"replicate": -1}, ["replicate", "-1"]),
        ({"replicate": True}, ["replicate", "True"]),
    ],
)
def test_what_cannot_be_stored_is_refused(changes, words):
    with pytest.raises(ValueError, match="yacht NNG-MVG") as caught:
        cell(**{"replicate": 7, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("change", [{"replicates": ()}, {"replicates": (1, 1)}, {"cost": 0.0}, {"cost": math.nan}])
def test_a_job_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match="yacht NNG-MVG"):
        job(**{"replicates": (0,), **change})


def test_a_job_makes_a_failed_cell_of_a_figure_that_is_not_finite():
    found = job(0, 1).cell("regression", 1, {"rmse": 1.0, "log_likelihood": math.nan}, seconds=2.0, device="cpu")
    assert (found.error, found.metrics, found.config) == ("not finite: log_likelihood = nan", {}, CONFIG)
    fine = job(0, 1).cell("regression", 1, {"rmse": 1.0}, seconds=2.0, device="cpu")
    assert (fine.error, fine.metrics, fine.key) == (None, {"rmse": 1.0}, ("yacht", "NNG-MVG", 1))
    with pytest.raises(ValueError, match="Tensor"):  # a mistake of the programmer's, not a divergence
        job(0).cell("regression", 0, {"rmse": torch.tensor(1.0)}, seconds=2.0, device="cpu")


def test_cells_are_stored_once_and_the_first_wins(results):
    assert results.load() == []
    assert results.append([cell(0), cell(1)]) == [cell(0), cell(1)]
    other = Results(results.path.parent, "regression")
    assert other.append([replace(cell(1), seconds=99.0), cell(2), cell(2)]) == [cell(2)]
    assert results.load() == [cell(0), cell(1), cell(2)]
    assert len(results.path.read_text().splitlines()) == 3


def test_a_computed_cell_replaces_a_failed_one_and_never_the_other_way(results):
    results.append([failed(0), cell(1)])
    assert results.append([failed(0), failed(1)]) == []
    assert results.missing([job(0, 1)]) == [job(0)]
    assert results.append([failed(0, "another reason")]) == [failed(0, "another reason")]
    assert results.load() == [failed(0, "another reason"), cell(1)]
    results.append([cell(0)])
    assert {found.replicate: found.error for found in results.load()} == {0: None, 1: None}
    assert results.missing([job(0, 1)]) == []


def test_missing_gives_jobs_with_only_the_missing_replicates(results):
    results.append([cell(0), cell(2), cell(0, data="wine")])
    plan = [job(0, 1, 2, 3), job(0, data="wine"), job(0, method="BBB")]
    assert results.missing(plan) == [job(1, 3), job(0, method="BBB")]


@pytest.mark.parametrize("kept", [1, 40, 80, -2])
def test_a_cut_off_last_line_stays_is_named_and_counts_as_missing(results, kept):
    results.append([cell(0), cell(1)])
    lines = results.path.read_bytes().splitlines()
    spoilt = lines[0] + b"\n" + lines[1][:kept]
    results.path.write_bytes(spoilt)
    with pytest.warns(UserWarning, match=r"line 2 of .*regression\.jsonl is bad"):
        assert results.load() == [cell(0)]
    assert results.append([cell(1), cell(2)]) == [cell(1), cell(2)]
    assert results.path.read_bytes().startswith(spoilt + b"\n")
    with pytest.warns(UserWarning, match="line 2 of"):
        assert results.load() == [cell(0), cell(1), cell(2)]
    assert [path.name for path in results.path.parent.iterdir()] == ["regression.jsonl"]


def test_a_last_line_that_lacks_only_its_end_is_kept(results):
    results.append([cell(0), cell(1)])
    results.path.write_bytes(results.path.read_bytes().removesuffix(b"\n"))
    assert results.load() == [cell(0), cell(1)]
    assert results.append([cell(1), cell(2)]) == [cell(2)]
    assert results.load() == [cell(0), cell(1), cell(2)]
    assert list(results.path.parent.iterdir()) == [results.path]


OTHERS = {
    "a brace": "{",
    "a mark of git": "<<<<<<< HEAD",
    "zeros": "\x00\x00",
    "no checksum": json.dumps({**vars(cell(1)), "error": "none"}),
    "another checksum": cell(1).to_line()[:-18] + '0123456789abcdef"}',
    "a checksum in capitals": cell(1).to_line()[:-18] + cell(1).to_line()[-18:].upper(),
    "a blank more": cell(1).to_line() + " ",
    "another number": cell(1).to_line().replace("-3.3", "-3.4"),
    "a list": signed("[1]"),
    "an object of something else": signed('{"data": "yacht"}'),
    "names that are lists": signed(json.dumps({**vars(cell(1)), "data": [1], "error": None})),
    "a number too large": signed(json.dumps({**vars(cell(1)), "error": None}).replace("1.5", "1" + "0" * 400)),
    "too deep": signed(json.dumps({**vars(cell(1)), "error": None}).replace("1.5", "[" * 10000 + "]" * 10000)),
    "of another experiment": cell(1, experiment="convergence").to_line(),
}


@pytest.mark.parametrize("line", OTHERS.values(), ids=OTHERS)
def test_a_bad_line_is_named_counts_as_missing_and_stays(results, line):
    results.append([cell(0), cell(1), cell(2)])
    lines = results.path.read_text().splitlines()
    text = "\n".join([lines[0], line, lines[2]]) + "\n"
    results.path.write_text(text)
    with pytest.warns(UserWarning, match=r"line 2 of .*regression\.jsonl is bad(.|\n)*counts as missing"):
        assert results.load() == [cell(0), cell(2)]
    with pytest.warns(UserWarning, match="line 2 of"):
        assert results.missing([job(0, 1, 2)]) == [job(1)]
    assert results.append([cell(1)]) == [cell(1)]
    assert results.path.read_text() == text + lines[1] + "\n"
    assert results.complaint().startswith("line 2 of regression.jsonl is bad (")


def test_many_bad_lines_are_one_warning(results):
    results.append([cell(number) for number in range(20)])
    results.path.write_text(results.path.read_text().replace("1.5", "1.6"))
    with pytest.warns(UserWarning, match=r"line 1 of .*; so are lines 2, 3, 4, 5, 6, 7, 8, 9, 10, …\. ") as told:
        assert results.load() == []
    assert len(told) == 1


def test_every_single_bit_of_a_line_counts():
    line = cell(1).to_line().encode()
    for place in range(8 * len(line)):
        other = bytearray(line)
        other[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError):  # noqa: PT011
            Cell.from_line(other.decode())


def test_committed_results_are_whole():
    paths = sorted((Path(__file__).parents[3] / "results").glob("*.jsonl"))
    assert len(paths) > 5
    assert [Results(path.parent, path.stem).complaint() for path in paths] == [None] * len(paths)


def test_cells_of_another_experiment_are_refused(results):
    with pytest.raises(ValueError, match="'convergence'"):
        results.append([cell(experiment="convergence")])
    with pytest.raises(ValueError, match=r"\.\./x"):
        Results("results", "../x")


def test_another_configuration_is_refused_with_the_difference(results):
    results.append([cell(0)])
    other = {"epochs": 40, "prior": {"variance": 0.1}, "batch_size": 10, "hidden": (50,)}
    assert results.missing([job(0, config={**CONFIG, "hidden": (50,)})]) == []
    for refused in (
        lambda: results.missing([job(0, config=other)]),
        lambda: results.append([cell(0, method="BBB"), cell(1, config=other)]),
    ):
        with pytest.raises(ConfigurationError) as caught:
            refused()
        text = str(caught.value)
        assert "  prior.variance: stored 1.0, now 0.1\n" in text
        assert "  batch_size: stored not set, now 10\n" in text
        assert "epochs" not in text
        assert "hidden" not in text
        assert "--results" in text
    assert results.load() == [cell(0)]


def test_a_failed_cell_binds_no_configuration(results):
    results.append([failed(0)])
    changed = {**CONFIG, "epochs": 80}
    assert results.missing([job(0, config=changed)]) == [job(0, config=changed)]
    results.append([cell(0, config=changed)])
    assert results.load() == [cell(0, config=changed)]


def test_a_full_disk_leaves_the_file_as_it_was(results, monkeypatch):
    results.append([cell(0)])
    before = results.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:50]))
    with pytest.raises(OSError, match="disk full"):
        results.append([cell(1)])
    assert results.path.read_bytes() == before


def test_a_folder_that_cannot_be_written_can_be_read(results):
    results.append([cell(0)])
    results.path.chmod(0o444)
    results.path.parent.chmod(0o555)
    assert results.load() == [cell(0)]
    assert [path.name for path in results.path.parent.iterdir()] == ["regression.jsonl"]
    results.path.parent.chmod(0o755)


def test_kill_at_random_moments_loses_at_most_the_last_line(results, launch):
    random.seed(0)
    folder, length = results.path.parent, 2000
    stored = 0
    for _ in range(6):
        (process,) = launch((folder, "BBB", 0, length, 40))
        time.sleep(random.uniform(0.01, 0.2))
        process.kill()
        process.join()
        lines = results.path.read_bytes().split(b"\n") if results.path.exists() else [b""]
        assert [Cell.from_line(line.decode()).replicate for line in lines[:-1]] == list(range(len(lines) - 1))
        assert len(lines) - 1 >= stored
        stored = len(lines) - 1
    assert stored > 0
    # The same command then does the rest, and the end is that of a run that was never stopped.
    (process,) = launch((folder, "BBB", 0, length, 40))
    process.join()
    (process,) = launch((folder / "never stopped", "BBB", 0, length, 40))
    process.join()
    assert results.load() == Results(folder / "never stopped", "regression").load()
    assert len(results.load()) == length


def test_processes_that_store_at_once_lose_and_double_nothing(results, launch):
    folder = results.path.parent
    parts = [("BBB", 0, 100), ("PBP", 0, 100), ("VMG", 0, 80), ("VMG", 20, 100)]
    processes = launch(*((folder, *part, 4) for part in parts))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    found = [Cell.from_line(line) for line in results.path.read_text().splitlines()]
    wanted = [("yacht", method, number) for method in ("BBB", "PBP", "VMG") for number in range(100)]
    assert sorted(each.key for each in found) == wanted
    assert all(each.metrics == {"rmse": each.replicate / 7} for each in found)
    methods = [each.method for each in found]
    assert sum(one != other for one, other in itertools.pairwise(methods)) > 3, "they did not run at the same time"
