"""Commands of other packages: found by entry point, and what is said where a package they need is missing."""

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest
from typer.testing import CliRunner

from noisygrad.cli import main as command_line

runner = CliRunner()

# As where no extra is installed; pillow comes with matplotlib.
WITHOUT_EXTRAS = """
import sys

BLOCKED = {"gymnasium", "Box2D", "stable_baselines3", "sb3_contrib", "jax", "jaxlib", "numpyro", "dask", "distributed"}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
from noisygrad.cli.main import main
main(sys.argv[1:])
"""


def without_extras(*arguments: str, folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture
def commands():
    """The command line, to which a test may add commands."""
    before = list(command_line.main.registered_commands), list(command_line.main.registered_groups)
    yield command_line
    command_line.main.registered_commands, command_line.main.registered_groups = before


def test_the_papers_commands_are_declared():
    declared = {point.name: point.value for point in entry_points(group="noisygrad.commands")}
    expected = {
        "data": "noisygrad_paper.data.commands:app",
        "demo": "noisygrad_paper.demo.commands:demo",
        "report": "noisygrad_paper.report.commands:report",
        "reproduce": "noisygrad_paper.reproduce:app",
    }
    assert expected.items() <= declared.items(), "the installed metadata are old: run pip install -e . again"
    text = runner.invoke(command_line.main, ["--help"]).output
    assert all(name in text for name in expected)


def test_a_group_and_a_function_can_be_added(commands):
    commands._add(EntryPoint("tables", "noisygrad_paper.data.commands:app", "noisygrad.commands"))
    commands._add(EntryPoint("page", "noisygrad_paper.report.commands:report", "noisygrad.commands"))
    assert "fetch" in runner.invoke(commands.main, ["tables", "--help"]).output
    assert "--results" in runner.invoke(commands.main, ["page", "--help"], env={"COLUMNS": "100"}).output


def test_a_command_that_cannot_be_imported_spoils_no_other(commands):
    commands._add(EntryPoint("broken", "no_such_package.commands:app", "noisygrad.commands"))
    done = runner.invoke(commands.main, ["broken", "--with", "anything"])
    assert done.exit_code == 2
    assert "the command broken is in no_such_package.commands:app" in done.output
    assert "No module named 'no_such_package'" in done.output
    assert runner.invoke(commands.main, ["--version"]).exit_code == 0


def test_the_demo_needs_no_extra(tmp_path):
    done = without_extras("demo", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "noisygrad-demo.html" in done.stdout
    assert (tmp_path / "noisygrad-demo.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("exploration",), ("gymnasium", "stable_baselines3", "sb3_contrib", "Box2D")),
        (("hmc-correlation", "--methods", "HMC"), ("jax", "numpyro")),
        (("active-learning", "--methods", "HMC"), ("jax", "numpyro")),
    ],
    ids=lambda value: value[0],
)
def test_what_an_experiment_lacks_is_named_in_one_line(tmp_path, arguments, names):
    done = without_extras("reproduce", *arguments, folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"needs {', '.join(names)}: pip install 'noisygrad[paper]'" in line
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_report_and_the_lists_need_no_extra(tmp_path):
    (tmp_path / "results").mkdir()
    assert without_extras("report", folder=tmp_path).returncode == 0
    assert (tmp_path / "noisygrad-report.html").exists()
    listed = without_extras("data", "list", folder=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "boston" in listed.stdout
