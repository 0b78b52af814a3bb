"""House rules: the tools are content, files stay small, versions are pinned."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*arguments: str) -> str:
    """What a tool prints, if it is content."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy", "--strict")],
    ids=" ".join,
)
def test_tool_is_content(arguments):
    run_tool(*arguments)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_documentation_builds(tmp_path):
    # Not quietly: what is not printed is not counted either, and strict would let it pass.
    output = run_tool("mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert [line for line in output.splitlines() if line.startswith(("WARNING", "ERROR"))] == []
    page = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(named)) == len(named) > 40
    shown = re.findall(r'id="(noisygrad[\w.]+)"', page)
    modules = {max((one for one in named if f"{name}.".startswith(f"{one}.")), key=len) for name in shown}
    assert set(named) - modules == set(), "nothing of these is on the page"


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """Every file that is or could be committed."""
    git = shutil.which("git")
    if git is not None:
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0 and listed.stdout:
            paths = (ROOT / name for name in listed.stdout.split("\0") if name)
            return tuple(path for path in paths if path.is_file())
    folders = ("src", "tests", "docs", "benchmarks", "examples", "results", ".ci")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    kept = (path for path in inside if path.is_file() and "__pycache__" not in path.parts)
    return (*kept, *(path for path in ROOT.iterdir() if path.is_file()))


def python_files() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py"]


def test_no_python_file_over_400_lines():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_no_utils():
    assert [path for path in repository_files() if path.stem in {"utils", "util", "helpers", "misc"}] == []


def test_no_path_of_a_machine():
    # Not preceded by a letter or a dot: a web address may have such a folder.
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/")
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in lines if pattern.search(line)]
    assert found == []


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def declared_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    found = [Requirement(text) for text in (*project["dependencies"], *(text for extra in extras for text in extra))]
    return [each for each in found if each.name != project["name"]]  # an extra may be made of others


@pytest.mark.parametrize("requirement", declared_requirements(), ids=str)
def test_requirement_is_pinned(requirement):
    versions = pinned_versions()
    name = canonicalize_name(requirement.name)
    assert name in versions, f"{requirement.name} is in pyproject.toml but not in constraints.txt"
    assert requirement.specifier.contains(versions[name])


def test_pins_are_plain_public_versions():
    assert [
        pin for pin in pinned_versions().items() if not re.fullmatch(r"[0-9]+(\.[0-9]+)*(\.post[0-9]+)?", pin[1])
    ] == []
