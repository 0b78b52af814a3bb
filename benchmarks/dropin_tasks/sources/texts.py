"""Text that comes with Python: its manual's topics, docstrings, names and source lines, as numbers."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..store import UnavailableError
from ..task import Arrays

if TYPE_CHECKING:
    from ..store import Store

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Characters by their number less 1; 0 is padding."""
CHARACTERS = len(ALPHABET) + 1
WORDS = 2000
"""Of which 0 is padding and 1 any other word."""
DOCSTRING_PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "mailbox",
    "multiprocessing",
    "unittest",
    "xml",
)
LINE_PACKAGES = ("asyncio", "ctypes", "email", "encodings", "html", "importlib", "multiprocessing", "unittest", "xml")


def characters(text: str) -> NDArray[np.uint8]:
    """The numbers of a text's characters; what the alphabet lacks becomes a question mark."""
    numbers = {character: number + 1 for number, character in enumerate(ALPHABET)}
    return np.array([numbers.get(character, numbers["?"]) for character in text], dtype=np.uint8)


def padded(texts: Sequence[NDArray[np.integer]], length: int, kind: type[np.integer]) -> NDArray[np.integer]:
    """Texts of different lengths in rows of one, cut or filled up with 0."""
    rows = np.zeros((len(texts), length), dtype=kind)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text[:length])] = text[:length]
    return rows


def modules() -> Iterator[tuple[str, str]]:
    """The package and the source of every file of the standard library, but for its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "dist-packages", "lib2to3", "idle_test"} & set(place):
            continue
        try:
            yield place[0].removesuffix(".py"), path.read_text("utf-8")
        except UnicodeDecodeError:
            continue


def _definitions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def docstrings(_: Store) -> Arrays:
    """Docstrings of functions and classes as up to 48 words, and which package they come from."""
    found = [
        (text, DOCSTRING_PACKAGES.index(package))
        for package, source in modules()
        if package in DOCSTRING_PACKAGES
        for text in {ast.get_docstring(node) or "" for node in _definitions(source)}
        if len(text) > 20
    ]
    texts = [re.findall(r"[a-z_]+|[0-9]+|[^\sa-z_0-9]", text.lower()) for text, _ in sorted(found)]
    common = [word for word, _ in Counter(w for words in texts for w in words).most_common(WORDS - 2)]
    numbers = {word: number + 2 for number, word in enumerate(common)}
    rows = [np.array([numbers.get(word, 1) for word in words], dtype=np.uint16) for words in texts]
    return {"x": padded(rows, 48, np.uint16), "y": np.array([label for _, label in sorted(found)], dtype=np.uint8)}


def source_lines(_: Store) -> Arrays:
    """Lines of source as up to 64 characters, and which package they come from."""
    found: dict[int, set[str]] = {label: set() for label in range(len(LINE_PACKAGES))}
    for package, source in modules():
        if package in LINE_PACKAGES:
            lines = (line.strip() for line in source.splitlines())
            found[LINE_PACKAGES.index(package)] |= {line for line in lines if 20 < len(line) <= 64}
    chosen = np.random.RandomState(1)
    picked = [
        (line, label) for label, lines in found.items() for line in chosen.permutation(np.array(sorted(lines)))[:900]
    ]
    rows = [characters(str(line)) for line, _ in picked]
    return {"x": padded(rows, 64, np.uint8), "y": np.array([label for _, label in picked], dtype=np.uint8)}


def topics(_: Store) -> Arrays:
    """The manual's text, one character after the other."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError as error:
        raise UnavailableError("this Python comes without pydoc_data") from error
    return {"x": characters("\n".join(texts[name] for name in sorted(texts)))}


def library(_: Store) -> Arrays:
    """Source of some packages of the standard library, one character after the other."""
    packages = {"asyncio", "email", "http", "json", "logging", "unittest", "urllib"}
    text = "\n".join(source for package, source in modules() if package in packages)
    return {"x": characters(re.sub(r"\n\s*\n+", "\n", text))[:500_000]}


def names(_: Store) -> Arrays:
    """Names of functions and classes, each with a newline at its end, as rows of 24 characters."""
    found = {node.name for _, source in modules() for node in _definitions(source) if 4 <= len(node.name) <= 23}
    return {"x": padded([characters(name + "\n") for name in sorted(found)], 24, np.uint8)}


SOURCES: Mapping[str, Callable[[Store], Arrays]] = {
    "docstrings": docstrings,
    "source-lines": source_lines,
    "topics": topics,
    "library": library,
    "names": names,
}
