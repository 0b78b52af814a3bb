"""Imports point one way, from a formula to what uses it; what only a type checker imports counts like any other."""

from __future__ import annotations

from collections.abc import Mapping, Set

from support.source import imports, library, modules, own_imports, package_of, room_of

# A room may import those before it. What is not named here comes last, in any order without cycles.
ROOMS = (
    "kernels",
    "families",
    "priors",
    "predictions",
    "likelihoods",
    "curvature",
    "posterior",
    "algorithm",
    "optim",
    "replicas",
    "training",
)
# These import nothing of the package, so every room but the kernels may use them.
LEAVES = frozenset({"archive", "networks", "distributed"})


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in LEAVES or importer == "kernels":
        return False
    if importer in ROOMS:
        return imported in LEAVES or imported in ROOMS[: ROOMS.index(importer)]
    return True


def cycles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The groups of nodes of which each leads to each other one."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = set(graph.get(waiting.pop(), ())) - seen
            seen |= new
            waiting += new
        return seen

    reached = {node: reachable(node) for node in graph}
    groups = {tuple(sorted(b for b in graph if b in reached[a] and a in reached[b])) for a in graph if a in reached[a]}
    return sorted(map(list, groups))


def test_imports_point_one_way() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in library()
        for other in sorted(own_imports(name))
        if package_of(other) == "noisygrad" and not allowed(room_of(name), room_of(other))
    ]
    assert wrong == [], "\n".join(wrong)


def test_the_library_does_without_the_paper() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in library()
        for other in sorted(own_imports(name))
        if package_of(other) != "noisygrad"
    ]
    assert wrong == [], "\n".join(wrong)


def test_no_cycle_between_rooms() -> None:
    graph: dict[str, set[str]] = {}
    for name in modules():
        room = f"{package_of(name)}.{room_of(name)}"
        graph.setdefault(room, set()).update({f"{package_of(o)}.{room_of(o)}" for o in own_imports(name)} - {room})
    found = cycles(graph)
    assert found == [], "\n".join(map(str, found))


def test_no_cycle_between_modules() -> None:
    found = cycles({name: {other for other in own_imports(name) if other in modules()} for name in modules()})
    assert found == [], "\n".join(map(str, found))


def test_what_a_step_is_made_of_knows_no_optimizer() -> None:
    shell = {"noisygrad.optim.optimizer", "noisygrad.optim.optimizers"}
    parts = [name for name in library() if name.startswith("noisygrad.optim.") and name not in shell]
    assert len(parts) > 5
    assert [name for name in parts if shell & own_imports(name)] == []


def test_cycle_finder_finds_all_cycles() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycles({"a": {"b", "d"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": {"d"}}) == [["b", "c"], ["d", "e"]]


def test_the_order_of_rooms_is_strict() -> None:
    assert allowed("families", "kernels")
    assert allowed("optim", "networks")
    assert allowed("estimators", "training")
    for pair in (
        ("kernels", "families"),
        ("families", "posterior"),
        ("optim", "replicas"),
        ("networks", "priors"),
        ("kernels", "networks"),
    ):
        assert not allowed(*pair)


def test_only_distributed_imports_torch_distributed() -> None:
    guilty = {
        name
        for name in modules()
        if any(other == "torch.distributed" or other.startswith("torch.distributed.") for other in imports(name))
    }
    assert guilty <= {"noisygrad.distributed", "noisygrad_paper.experiments.processes"}
