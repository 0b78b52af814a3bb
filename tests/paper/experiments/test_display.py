"""How far a run is: on a terminal, in a log, and with jobs in several processes."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from noisygrad_paper.experiments import display, notes
from noisygrad_paper.experiments.cells import Cell, Job, Results
from noisygrad_paper.experiments.display import Display, LineDisplay, duration, figures_of
from noisygrad_paper.experiments.notes import ProgressFile, notes_read
from noisygrad_paper.experiments.runner import run_jobs

EXPERIMENT = "regression"


def job(data: str = "yacht", *replicates: int, cost: float = 1.0) -> Job:
    return Job(data=data, method="NNG-MVG", replicates=replicates or (0, 1, 2), config={"epochs": 40}, cost=cost)


def cells_of(wanted: Job) -> list[Cell]:
    return [wanted.cell(EXPERIMENT, n, {"rmse": n / 3}, seconds=0.25, device="cpu") for n in wanted.replicates]


def slow(wanted: Job, report: Callable[[float, str], None]) -> list[Cell]:
    for step in range(4):
        time.sleep(0.12)
        report(step / 4, f"epoch {step}")
    return cells_of(wanted)


def run_in_threads(wanted: Job, report: Callable[[float, str], None]) -> list[Cell]:
    """Waits until both jobs of a plan are at work, and then says for a second that it is."""
    notes._EVERY_SECONDS = 0.02  # in this process too
    places = [Path(wanted.config["folder"]) / data for data in ("yacht", "wine")]
    places[wanted.data == "wine"].touch()
    end = time.monotonic() + 60.0
    while not all(place.exists() for place in places) and time.monotonic() < end:
        time.sleep(0.02)
    for _ in range(20):
        time.sleep(0.05)
        report(0.25, f"at {time.monotonic()}")
    return cells_of(wanted)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results", EXPERIMENT)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In place of the error stream; no fixture, since pytest gives each phase of a test an error stream of its own."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return made


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(display.time, "monotonic", made)
    return made


def test_the_bar_shows_cells_figures_and_time_left(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal(monkeypatch)
    run_jobs([job("yacht"), job("wine")], slow, results)
    drawn = seen.getvalue()
    assert "0/6 cells" in drawn
    assert "3/6 cells" in drawn
    assert "wine NNG-MVG: epoch 2   last: yacht NNG-MVG rmse 0.3333" in drawn
    assert "s left" in drawn


def test_the_bar_shows_what_other_processes_do(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_EVERY_SECONDS", 0.02)
    seen = terminal(monkeypatch)
    plan = [replace(each, config={"folder": str(tmp_path)}) for each in (job("yacht", 4), job("wine"))]
    run_jobs(plan, run_in_threads, results, backend="joblib", workers=2)
    drawn = seen.getvalue()
    assert "yacht NNG-MVG [4] 25%" in drawn
    assert "wine NNG-MVG 25%" in drawn


def test_a_log_has_a_line_now_and_then_on_what_is_at_work(clock: Clock) -> None:
    said: list[str] = []
    log = LineDisplay(said.append, total=4, done=0, cost=4.0)
    for minute, fraction in enumerate((0.1, 0.2, 0.25)):
        clock.now = 50.0 * minute
        log.within(job("yacht", 0), fraction, f"epoch {minute}")
    assert said == ["0/4 cells  yacht NNG-MVG: epoch 2  1 min 40 s, 25 min 00 s left"]
    clock.now = 200.0
    log.within(job("wine"), 0.25, "epoch 1")
    assert said[1:] == ["0/4 cells  yacht NNG-MVG [0] 25%  wine NNG-MVG 25%  3 min 20 s, 10 min 00 s left"]
    log.finished(job("yacht", 0), cells_of(job("yacht", 0)))
    assert said[2].startswith("1/4 cells  yacht NNG-MVG [0] rmse 0  3 min 20 s")
    log.within(job("yacht", 0), 0.9, "a note that was read too late")
    assert log.spent() == pytest.approx(1.75)


def test_jobs_that_differ_by_replicates_alone_are_counted_apart() -> None:
    log = Display(None, total=4, done=0, cost=4.0)
    first, second = job("yacht", 0, 1), job("yacht", 2, 3)
    for each in (first, second):
        log.within(each, 0.5, "half")
    assert log.spent() == pytest.approx(2.0)
    log.finished(first, [])
    log.within(second, 0.75, "more")
    assert log.spent() == pytest.approx(3.5)


def test_the_running_figures_are_means_and_the_ends_of_curves() -> None:
    figures = [{"kl": 0.0, "rmse": [3.0, 1.0], "empty": []}, {"kl": 0.0, "rmse": [3.0, 2.0], "empty": []}]
    cells = [job().cell(EXPERIMENT, n, each, seconds=1.0, device="cpu") for n, each in enumerate(figures)]
    assert figures_of(cells) == "kl 0  rmse 1.5"
    assert figures_of([]) == ""


def test_the_time_left_follows_the_expected_cost(clock: Clock) -> None:
    shown = Display(None, 10, 0, cost=100.0)
    clock.now = 30.0
    assert shown.left() is None
    shown.within(job("wine", 0, cost=40.0), 0.5, "half")
    assert shown.left() == pytest.approx(30.0 * 80 / 20)
    shown.finished(job("yacht", 0, 1, cost=5.0), [])
    assert shown.left() == pytest.approx(30.0 * 70 / 30)
    assert [duration(seconds) for seconds in (4.4, 65, 7260)] == ["4 s", "1 min 05 s", "2 h 01 min"]


def test_notes_are_told_once_and_a_lost_folder_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_EVERY_SECONDS", 0.01)
    told: list[tuple[int, float, str]] = []
    with notes_read(lambda *what: told.append(what)) as folder:
        keeper = ProgressFile(folder, 7)
        for fraction in (0.25, 0.5):
            keeper(fraction, "epoch … of 4")
            end = time.monotonic() + 20.0
            while (7, fraction, "epoch … of 4") not in told and time.monotonic() < end:
                time.sleep(0.01)
        time.sleep(0.05)
    assert told == [(7, 0.25, "epoch … of 4"), (7, 0.5, "epoch … of 4")]
    assert not Path(folder).exists()
    time.sleep(0.02)
    keeper(0.75, "nobody listens")
    ProgressFile(None, 0)(0.5, "nobody ever did")
    assert not Path(folder).exists()
