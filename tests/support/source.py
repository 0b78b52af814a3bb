"""The source of both packages as the house tests read it: modules, and what each imports."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("noisygrad", "noisygrad_paper")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / "src" / package).rglob("*.py"))]
    return {module_name(path): path for path in paths}


def library() -> list[str]:
    """The modules of `noisygrad` alone."""
    return [name for name in modules() if package_of(name) == "noisygrad"]


def package_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def room_of(name: str) -> str:
    """`noisygrad.families.kl` is in the room families; a package's own `__init__` is a room without a name."""
    return name.split(".")[1] if "." in name else ""


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def _absolute_base(node: ast.ImportFrom, name: str) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if modules()[name].name == "__init__.py" else name.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Everything a module imports, for a type checker alone too; `from package import submodule` is the submodule."""
    found: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_base(node, name)
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
            if base == "torch":
                found |= {f"torch.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(name: str) -> set[str]:
    """Those of its imports that are modules of the two packages, without itself."""
    return {other for other in imports(name) if package_of(other) in PACKAGES} - {name}
