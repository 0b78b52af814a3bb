"""House rules: the tools are content, imports point one way, files stay small, versions are pinned."""

import ast
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
SOURCE = ROOT / "src" / "noisygrad"

# A room may import those before it. What is not named here comes last, in any order without cycles.
ROOMS = ("families", "priors", "predictions", "likelihoods", "curvature", "posterior", "optim", "training")
# These import nothing of the package, so every room may use them.
LEAVES = ("archive", "networks", "switches", "distributed")


def run_tool(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)


@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy", "--strict")],
    ids=" ".join,
)
def test_tool_is_content(arguments):
    run_tool(*arguments)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_documentation_builds(tmp_path):
    run_tool("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))


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


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def absolute_base(node: ast.ImportFrom, name: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Everything a module imports when it runs; `from package import submodule` counts as the submodule."""
    path = modules()[name]
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # What only a type checker imports does not exist when the program runs.
    typed = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in typed for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, name, path)
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
            if base == "torch":
                found |= {f"torch.{alias.name}" for alias in node.names}
    return frozenset(found)


def room(name: str) -> str:
    """`noisygrad.families.kl` is in the room families; the package's own `__init__` is a room without a name."""
    return name.split(".")[1] if "." in name else ""


def own_imports(name: str) -> set[str]:
    return {other for other in imports(name) if other == "noisygrad" or other.startswith("noisygrad.")}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one cycle, or nothing."""
    finished: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in finished:
            return []
        for following in sorted(graph.get(node, ())):
            if cycle := visit(following, [*trail, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in LEAVES:
        return False
    if importer in ROOMS:
        return imported in LEAVES or imported in ROOMS[: ROOMS.index(importer)]
    return True


def test_imports_point_one_way():
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        for other in sorted(own_imports(name))
        if not allowed(room(name), room(other))
    ]
    assert wrong == []


def test_no_cycle_between_rooms():
    graph: dict[str, set[str]] = {}
    for name in modules():
        graph.setdefault(room(name), set()).update(room(other) for other in own_imports(name))
    assert find_cycle({node: others - {node} for node, others in graph.items()}) == []


def test_no_cycle_between_modules():
    graph = {name: {other for other in own_imports(name) if other in modules()} - {name} for name in modules()}
    assert find_cycle(graph) == []


def test_cycle_finder_finds_cycles():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_only_distributed_imports_torch_distributed():
    guilty = [
        name
        for name in modules()
        if any(other == "torch.distributed" or other.startswith("torch.distributed.") for other in imports(name))
    ]
    assert set(guilty) <= {"noisygrad.distributed"}


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
