"""Running a plan: only what is missing, in one process or several or on a cluster, and whatever fails on the way."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from noisygrad_paper.experiments import runner
from noisygrad_paper.experiments.cells import ConfigurationError, Job, Results
from noisygrad_paper.experiments.runner import JobsFailed, run_jobs
from support.processes import clean_processes

EXPERIMENT = "regression"


def job(data="yacht", *replicates, method="NNG-MVG", **config):
    return Job(data=data, method=method, replicates=replicates or (0, 1, 2), config={"epochs": 40, **config})


PLAN = [job("yacht"), job("wine"), job("boston", 0, 1), job("yacht", 0, method="BBB")]
NAMES = {"yacht": 1.0, "wine": 2.0, "boston": 3.0}


def cells_of(wanted, **metrics):
    def cell(number):
        figures = {"rmse": NAMES[wanted.data] + number / 3, "log_likelihood": -2.0, **metrics}
        return wanted.cell(EXPERIMENT, number, figures, seconds=0.25, device="cpu")

    return [cell(number) for number in wanted.replicates]


def compute(wanted, report):
    report(0.5, "halfway")
    return cells_of(wanted)


def note_and_compute(wanted, report):
    """Leaves a note of what was asked for in the folder that the config names."""
    text = f"{wanted.name} {wanted.replicates} {torch.get_num_threads()} {os.getpid()}\n"
    with Path(wanted.config["notes"]).open("a") as file:
        file.write(text)
    return cells_of(wanted)


def fail_on_wine(wanted, report):
    if wanted.data == "wine":
        raise FloatingPointError("the Fisher of layer 2 is not finite")
    return cells_of(wanted)


def die_on_wine(wanted, report):
    if wanted.data == "wine":
        os.kill(os.getpid(), signal.SIGKILL)
    return cells_of(wanted)


def diverge_on_wine(wanted, report):
    return cells_of(wanted, log_likelihood=float("nan") if wanted.data == "wine" else -2.0)


def interrupt_on_wine(wanted, report):
    if wanted.data == "wine":
        raise KeyboardInterrupt
    return cells_of(wanted)


def one_short(wanted, report):
    return cells_of(wanted)[1:]


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results", EXPERIMENT)


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install noisygrad[cluster]")
    # A job that kills its worker is given up at once; by default Dask tries it on three more.
    with (
        importlib.import_module("dask").config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as made,
    ):
        yield made.scheduler_address


def run(jobs, work, results, **options):
    """The cells as numbers that can be compared, and the lines said."""
    said = []
    cells = run_jobs(jobs, work, results, announce=said.append, **options)
    return [(cell.key, cell.metrics) for cell in cells], said


def expected(jobs=PLAN):
    return [(cell.key, cell.metrics) for each in jobs for cell in cells_of(each)]


def test_local_computes_and_stores_the_plan_in_its_order(results):
    found, said = run(PLAN, compute, results)
    assert found == expected()
    assert [(cell.key, cell.metrics) for cell in results.load()] == expected()
    assert len(said) == 4  # no terminal: a line per job
    assert said[0].startswith("3/9 cells  yacht NNG-MVG rmse 1.333  log_likelihood -2")
    assert "left" in said[0]
    assert said[-1].startswith("9/9 cells  yacht BBB [0] rmse 1")


@pytest.mark.parametrize("progress", [None, False])
def test_progress_can_be_silent(results, capsys, progress):
    run_jobs(PLAN, compute, results, progress=progress)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_without_a_terminal_plain_lines_go_to_the_error_stream(results, capsys):
    run_jobs(PLAN, compute, results)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 4
    assert "\x1b" not in captured.err


def test_a_second_run_computes_only_what_is_missing(results, tmp_path):
    notes = tmp_path / "notes"
    plan = [job("yacht", notes=str(notes)), job("wine", notes=str(notes)), job("boston", notes=str(notes))]
    results.append([cells_of(plan[0])[1], *cells_of(plan[1])])
    found, said = run(plan, note_and_compute, results)
    assert [line.split(") ")[0] for line in notes.read_text().splitlines()] == [
        "yacht NNG-MVG (0, 2",
        "boston NNG-MVG (0, 1, 2",
    ]
    assert said[0] == f"4 of 9 cells are already in {results.path}"
    assert found == expected(plan)
    before = results.path.read_bytes()
    assert run(plan, fail_on_wine, results)[0] == expected(plan)  # nothing is left to fail
    assert results.path.read_bytes() == before


def hang_on_wine(wanted, report):
    time.sleep(60.0 if wanted.data == "wine" else 0.0)
    return cells_of(wanted)


def test_kill_and_the_same_command_end_like_an_uninterrupted_run(results):
    process = clean_processes().Process(target=run_jobs, args=(PLAN, hang_on_wine, results))
    process.start()
    while len(results.load()) < 3:
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    with results.path.open("ab") as file:
        file.write(cells_of(PLAN[1])[0].to_line().encode()[:100])
    with pytest.warns(UserWarning, match=r"line 4 of .* is bad"):
        found, said = run(PLAN, compute, results)
    with pytest.warns(UserWarning, match=r"line 4 of .* is bad"):
        stored = results.load()
    assert said[0].startswith("3 of 9 cells")
    assert found == expected()
    assert [(cell.key, cell.metrics) for cell in stored] == expected()


def test_another_configuration_is_refused_before_anything_runs(results):
    run(PLAN, compute, results)
    with pytest.raises(ConfigurationError, match="epochs: stored 40, now 80"):
        run([job("boston", 7), job("yacht", 9, epochs=80)], compute, results)
    assert len(results.load()) == 9


def options(backend, request):
    if backend == "dask":
        return {"backend": "dask", "scheduler": request.getfixturevalue("cluster")}
    return {"backend": backend, "workers": 2 if backend == "joblib" else 1}


@pytest.mark.parametrize("backend", ["joblib", "dask"])
def test_other_processes_give_the_same_cells(results, tmp_path, backend, request):
    notes = tmp_path / "notes"
    plan = [job(data, method=method, notes=str(notes)) for data in NAMES for method in ("BBB", "PBP", "VMG")]
    found, said = run(plan, note_and_compute, results, **options(backend, request))
    assert found == expected(plan)
    assert said[-1].startswith("27/27 cells")
    lines = [line.rsplit(maxsplit=2) for line in notes.read_text().splitlines()]
    assert sorted(name for name, _, _ in lines) == sorted(f"{each.name} (0, 1, 2)" for each in plan)
    assert {threads for _, threads, _ in lines} == {"1"}
    assert str(os.getpid()) not in {process for _, _, process in lines}


@pytest.mark.parametrize("backend", ["local", "joblib", "dask"])
def test_a_job_that_fails_does_not_stop_the_others(results, backend, request):
    with pytest.raises(JobsFailed) as caught:
        run(PLAN, fail_on_wine, results, **options(backend, request))
    assert "1 of 4 jobs failed" in str(caught.value)
    assert "wine NNG-MVG (replicates 0, 1, 2): FloatingPointError: the Fisher of layer 2" in str(caught.value)
    assert "fail_on_wine" in caught.value.failures[0].trace
    assert {cell.data for cell in results.load()} == {"yacht", "boston"}
    assert run(PLAN, compute, results)[0] == expected()


@pytest.mark.parametrize("backend", ["joblib", "dask"])
def test_a_process_that_dies_does_not_stop_the_others(results, backend, request):
    plan = [job("wine"), *(each for each in PLAN if each.data != "wine")]
    with pytest.raises(JobsFailed) as caught:
        run(plan, die_on_wine, results, **options(backend, request))
    (failure,) = caught.value.failures
    assert failure.job == plan[0]
    assert "out of memory" in failure.error
    assert {cell.key for cell in results.load()} == {key for key, _ in expected(plan[1:])}


def test_a_diverged_cell_is_stored_as_failed_and_tried_again(results):
    found, said = run(PLAN, diverge_on_wine, results)
    assert [metrics for (data, _, _), metrics in found if data == "wine"] == [{}, {}, {}]
    assert "failed: wine NNG-MVG replicate 0: not finite: log_likelihood = nan" in said
    assert len(results.missing(PLAN)) == 1
    assert run(PLAN, compute, results)[0] == expected()


def test_work_that_gives_other_cells_than_asked_is_a_failure(results):
    with pytest.raises(JobsFailed, match="must give the cells"):
        run([job("yacht")], one_short, results)
    assert results.load() == []


def test_an_interruption_says_what_is_stored(results):
    said = []
    with pytest.raises(KeyboardInterrupt):
        run_jobs(PLAN, interrupt_on_wine, results, announce=said.append)
    assert said[-1] == f"Interrupted: 3 of 9 cells are in {results.path}; the same command goes on."
    assert len(results.load()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "slurm"}, "'slurm'"),
        ({"workers": 0}, "at least 1"),
        ({"workers": 2}, "joblib"),
        ({"backend": "dask"}, "--scheduler"),
        ({"scheduler": "tcp://127.0.0.1:8786"}, "dask"),
        ({"progress": "yes"}, "'yes'"),
        ({"jobs": [job("yacht", 0, 1), job("yacht", 1)]}, "yacht NNG-MVG 1"),
    ],
)
def test_wrong_arguments_are_refused(results, arguments, words):
    with pytest.raises(ValueError, match=words):
        run_jobs(**{"jobs": PLAN, "work": compute, "results": results, **arguments})


def test_a_scheduler_that_does_not_answer_is_an_error(results, monkeypatch):
    pytest.importorskip("distributed", reason="Dask is not installed: pip install noisygrad[cluster]")
    monkeypatch.setattr(runner, "_CONNECT_SECONDS", 0.5)
    with pytest.raises(ConnectionError, match=r"tcp://127\.0\.0\.1:9.*dask scheduler"):
        run_jobs(PLAN, compute, results, backend="dask", scheduler="tcp://127.0.0.1:9")


def test_a_cluster_without_workers_is_an_error_and_with_threads_a_warning(results, monkeypatch):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install noisygrad[cluster]")
    monkeypatch.setattr(runner, "_CONNECT_SECONDS", 2)
    with distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        address = cluster.scheduler_address
        with pytest.raises(ConnectionError, match="has no workers"):
            run_jobs(PLAN, compute, results, backend="dask", scheduler=address)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0"
    ) as cluster:
        address = cluster.scheduler_address
        with pytest.warns(UserWarning, match="--nthreads 1"):
            assert run(PLAN, compute, results, backend="dask", scheduler=address)[0] == expected()


def test_dask_that_is_not_installed_is_an_error(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ModuleNotFoundError, match=r"noisygrad\[cluster\]"):
        run_jobs(PLAN, compute, results, backend="dask", scheduler="tcp://127.0.0.1:9")
