"""The public names of the library with their signatures, one per line: `python tests/house/api.py [--write]`.

With `--write` they go into api.txt, which a test compares; without it they are printed. An object is written out once:
an arrow leads there from its other names. Methods that a class has from another public class stand with that one alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

FILE = Path(__file__).with_suffix(".txt")
# An object of several modules is described in the last of them, as `noisygrad.likelihoods.Gaussian`.
MODULES = (
    "noisygrad",
    "noisygrad.active",
    "noisygrad.curvature",
    "noisygrad.exploration",
    "noisygrad.families",
    "noisygrad.likelihoods",
    "noisygrad.metrics",
    "noisygrad.networks",
    "noisygrad.optim",
    "noisygrad.posterior",
    "noisygrad.predictions",
    "noisygrad.training",
)
SPECIAL = {"__init__", "__call__"}


def names_of(module: ModuleType) -> list[str]:
    """Those of `__all__`; otherwise the public functions and classes that are defined there."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return sorted(name for name in own if not name.startswith("_"))


class Written:
    """An annotation as it is written in the source, without the quotes that `inspect` would put around a string."""

    def __init__(self, annotation: Any) -> None:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        self.text = re.sub(r"\bnoisygrad[\w.]*\.(\w+)", r"\1", text)  # in which file it stands is no part of the API

    def __repr__(self) -> str:
        return self.text


def signature_of(function: Any) -> str:
    signature, empty = inspect.signature(function), inspect.Signature.empty
    parameters = [
        one if one.annotation is empty else one.replace(annotation=Written(one.annotation))
        for one in signature.parameters.values()
    ]
    result = signature.return_annotation
    return str(
        signature.replace(parameters=parameters, return_annotation=empty if result is empty else Written(result))
    )


def members_of(kind: type, public: set[type]) -> dict[str, Any]:
    """What the class, or a private base of it, defines itself."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in {"noisygrad", "noisygrad_paper"}:
            continue
        if base is kind or base not in public:
            annotations = {name: repr(Written(value)) for name, value in inspect.get_annotations(base).items()}
            for name, value in (annotations | dict(vars(base))).items():
                found.setdefault(name, value)
                if name in annotations:
                    found[name] = annotations[name]
    return {
        name: value
        for name, value in found.items()
        if (name in SPECIAL or not name.startswith("_")) and not is_given_by_a_library(value)
    }


def is_given_by_a_library(value: Any) -> bool:
    """What scikit-learn and typing put into a class by themselves."""
    return getattr(value, "__module__", "") == "typing" or type(value).__module__.startswith("sklearn.")


def lines_of_member(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, str):
        yield f"{name}: {member}"
    elif isinstance(member, property | functools.cached_property):
        function = member.fget if isinstance(member, property) else member.func
        settable = " (settable)" if isinstance(member, property) and member.fset else ""
        yield f"{name}: property{settable} -> {Written(inspect.signature(function).return_annotation)}"
    elif isinstance(member, staticmethod | classmethod):
        yield f"{name}: {type(member).__name__} {signature_of(member.__func__)}"
    elif callable(member):
        yield f"{name}{signature_of(member)}"
    else:
        yield f"{name}: {type(member).__name__}"


def lines_of(name: str, value: Any, public: set[type]) -> Iterator[str]:
    if isinstance(value, type):
        yield f"{name}: class({', '.join(base.__name__ for base in value.__bases__ if base is not object)})"
        for member, content in members_of(value, public).items():
            yield from lines_of_member(f"{name}.{member}", content)
    elif isinstance(value, FunctionType):
        yield f"{name}{signature_of(value)}"
    elif isinstance(value, ModuleType):
        yield f"{name}: module"
    elif isinstance(value, tuple) and all(isinstance(entry, str) for entry in value):
        yield f"{name} = {value!r}"
    else:
        yield f"{name}: {type(value).__name__}"


def public_api() -> list[str]:
    """Every public name of the modules, with signatures."""
    places: dict[str, Any] = {}
    homes: dict[int, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in names_of(module):
            value = getattr(module, name)
            places[f"{module_name}.{name}"] = value
            if not isinstance(value, ModuleType):
                homes[id(value)] = f"{module_name}.{name}"
    public = {value for value in places.values() if isinstance(value, type)}
    lines: set[str] = set()
    for name, value in places.items():
        home = homes.get(id(value), name)
        lines |= {f"{name} -> {home}"} if home != name else set(lines_of(name, value, public))
    return sorted(lines)


def main() -> None:
    """Print the lines, or write them into the file."""
    text = "".join(f"{line}\n" for line in public_api())
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text, encoding="utf-8")
    elif sys.argv[1:]:
        raise SystemExit(f"the one option is --write; got {' '.join(sys.argv[1:])}")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
