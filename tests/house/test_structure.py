"""What keeps the library open: private state stays private, code does not ask for families, names are used once."""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from support.source import library, modules, room_of, tree_of

MOST_LINES = 19_000
MOST_FAMILY_TESTS = 8


def functions_outside_classes(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
        if not isinstance(node, ast.ClassDef):
            yield from functions_outside_classes(node)


def optimizers_among(arguments: ast.arguments) -> set[str]:
    """The names of the arguments that are an optimiser, by their name or by their annotation."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {
        one.arg
        for one in every
        if one.arg in {"optimizer", "noisy"} or (one.annotation and "Noisy" in ast.unparse(one.annotation))
    }


def private_reads(tree: ast.AST) -> list[str]:
    """`function: optimizer._name` of every function outside a class that takes an optimiser and looks inside it."""
    found = set()
    for function in functions_outside_classes(tree):
        names = optimizers_among(function.args)
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in names and node.attr.startswith("_") and not node.attr.startswith("__"):
                found.add(f"{getattr(function, 'name', 'lambda')}: {node.value.id}.{node.attr}")
    return sorted(found)


def test_no_function_reaches_into_an_optimizer() -> None:
    found = [f"{name}.{read}" for name in modules() for read in private_reads(tree_of(name))]
    assert found == [], "\n".join(found)


def is_family(node: ast.AST) -> bool:
    """Whether an expression is a family, as in `block.family`, `family` and `state["family"]`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "family"
    return (isinstance(node, ast.Attribute) and node.attr == "family") or (
        isinstance(node, ast.Name) and node.id == "family"
    )


def family_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """What a module calls modules of `noisygrad.families`, and what it takes out of them (but for the base's)."""
    named, taken = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.asname or alias.name for alias in node.names}
            if node.module == "noisygrad.families":
                named |= names - {"base"}
            elif node.module.startswith("noisygrad.families.") and node.module != "noisygrad.families.base":
                taken |= {name for name in names if name[0].isupper()}
    return named, taken


def family_tests(tree: ast.AST) -> list[str]:
    """Every place that asks which family something has: comparisons, `match`, `isinstance` of a family's own class."""
    named, taken = family_names(tree)

    def is_own_class(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id in named
        return isinstance(node, ast.Name) and node.id in taken

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            missing = isinstance(node.ops[0], ast.Is | ast.IsNot)  # whether one is given at all
            asked = any(map(is_family, sides)) and not missing
        elif isinstance(node, ast.Match):
            patterns = [p.cls for case in node.cases for p in ast.walk(case) if isinstance(p, ast.MatchClass)]
            asked = is_family(node.subject) or any(map(is_own_class, patterns))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            kinds = node.args[1:2] if node.func.id in {"isinstance", "issubclass"} else []
            asked = any(is_own_class(inner) for kind in kinds for inner in ast.walk(kind))
        else:
            continue
        if asked:
            found.append(f"{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def test_who_asks_for_the_family_is_few() -> None:
    outside = [name for name in library() if room_of(name) != "families"]
    found = [f"{name}:{test}" for name in outside for test in family_tests(tree_of(name))]
    assert len(found) <= MOST_FAMILY_TESTS, f"{len(found)} tests of the family:\n" + "\n".join(found)


def test_the_library_is_small() -> None:
    lines = sum(len(modules()[name].read_text(encoding="utf-8").splitlines()) for name in library())
    assert lines <= MOST_LINES


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for name in library():
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    # Each family has the same skeleton: its statistics, prior and precision are classes of these names.
    twice = {
        found: where
        for found, where in places.items()
        if len(where) > 1 and any(room_of(name) != "families" for name in where)
    }
    assert twice == {}, "\n".join(f"{found}: {', '.join(where)}" for found, where in sorted(twice.items()))


# The tests above find what they look for

SOURCE = textwrap.dedent(
    """
    from noisygrad.families import base, dense, kronecker as kron
    from noisygrad.families.diagonal import Root

    def inside(optimizer, other):
        return optimizer._steps, other._steps, optimizer.steps

    def typed(given: "NoisyOptimizer | None"):
        return [lambda: given._mean, given.__dict__]

    class Shell:
        def method(self, optimizer):
            return optimizer._steps

    def asks(block, family, state, found):
        a = block.family == "dense" or family in ("full",) or state["family"] != 3
        b = isinstance(found, dense.Prior | kron.Prior), isinstance(found, (int, Root)), isinstance(found, base.Prior)
        match block.family:
            case "full":
                return a, b
        return block.family, {"dense": 1}[family], family is None
    """
)


def test_finders_find() -> None:
    tree = ast.parse(SOURCE)
    assert private_reads(tree) == ["inside: optimizer._steps", "typed: given._mean"]
    assert len(family_tests(tree)) == 6
