import re
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

from noisygrad import __version__
from noisygrad.cli.main import main
from noisygrad_paper.demo import fits as demo
from noisygrad_paper.demo.fits import FAMILIES, METHODS, DemoConfig
from support.pages import check_stands_alone

runner = CliRunner()


def test_quick_demo_prints_tables_and_writes_a_page(tmp_path):
    path = tmp_path / "page.html"
    threads = torch.get_num_threads()
    done = runner.invoke(main, ["demo", "--quick", "--seed", "3", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == threads
    for method in METHODS:
        assert len(re.findall(rf"│ {method} ", done.stdout)) == 2
    for header in ("RMSE", "accuracy", "ECE", "KL", "90 %"):
        assert header in done.stdout
    assert "page.html" in done.stdout
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == [path]

    page = check_stands_alone(path.read_text(encoding="utf-8"))
    assert len(page.all("img")) == 4
    assert len(page.all("table")) == 4
    for word in (*FAMILIES, "point", "noisygrad demo --seed 3"):
        assert any(word in text for text in page.texts)


def test_fits_are_complete_and_repeatable():
    config = DemoConfig(epochs=1, num_samples=4)
    announced = []
    first = demo.run(config, lambda data, method: announced.append((data, method)))
    assert announced == [(data, method) for data in demo.DATA for method in METHODS]
    again = demo.run(config)
    for one, other in zip(first.fits, again.fits, strict=True):
        measured = {"accuracy", "ece"} if one.data == "digits" else {"rmse", "coverage"}
        measured |= {"log_likelihood", "seconds"} | ({"kl"} if one.method != "point" else set())
        assert set(one.metrics) == measured
        numbers = {name: value for name, value in one.metrics.items() if name != "seconds"}
        assert numbers == {name: other.metrics[name] for name in numbers}


def test_the_seed_decides_the_split():
    first, same, other = (demo.load_split("diabetes", DemoConfig(seed=seed)) for seed in (0, 0, 1))
    assert (first.test_y == same.test_y).all()
    assert (first.test_y != other.test_y).any()
    assert len(first.train_y) + len(first.test_y) == 442


@pytest.mark.parametrize("where", ["missing/page.html", "."])
def test_bad_output_is_refused_before_training(tmp_path, monkeypatch, where):
    def fail(*_):
        raise AssertionError("training began")

    monkeypatch.setattr(demo, "run", fail)
    done = runner.invoke(main, ["demo", "--output", str(tmp_path / where)])
    assert done.exit_code == 2
    assert "folder" in done.output
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_refused(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("noisygrad.cli.output.tempfile.NamedTemporaryFile", refuse)
    done = runner.invoke(main, ["demo", "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert re.search(r"Permission[\s│]+denied", done.output)


def test_interruption_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    done = runner.invoke(main, ["demo", "--quick", "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 130
    assert "not written" in done.output
    assert list(tmp_path.iterdir()) == []


def test_version_and_help():
    assert runner.invoke(main, ["--version"]).output == f"noisygrad {__version__}\n"
    assert "demo" in runner.invoke(main, ["--help"]).output
    text = runner.invoke(main, ["demo", "--help"], env={"NO_COLOR": "1", "COLUMNS": "100"}).output
    for option in ("--output", "--seed", "--quick"):
        assert option in text


def test_the_form_of_warnings_is_the_commands_alone():
    usual = warnings.formatwarning
    assert runner.invoke(main, ["data", "list"]).exit_code == 0
    assert warnings.formatwarning is usual


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "noisygrad", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"noisygrad {__version__}\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"epochs": 0}, "epochs"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_config_is_checked_when_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**wrong)
