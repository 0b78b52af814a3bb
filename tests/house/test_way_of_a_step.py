"""One can walk through a step: it goes through few files of the library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MOST = {"plain": 15, "statistics and refresh": 29}


@pytest.fixture(scope="module")
def ways() -> dict[str, list[str]]:
    """What `way.py` prints, made in a process that no other test has touched."""
    command = [sys.executable, Path(__file__).with_name("way.py")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = re.findall(r"^(\w.*): \d+\n((?:  .+\n)+)", done.stdout, re.MULTILINE)
    return {kind: files.split() for kind, files in parts}


@pytest.mark.parametrize("kind", MOST)
def test_a_step_goes_through_few_files(ways: dict[str, list[str]], kind: str) -> None:
    assert len(ways[kind]) <= MOST[kind], f"{len(ways[kind])} files, at most {MOST[kind]}:\n" + "\n".join(ways[kind])


def test_the_way_is_seen_at_all(ways: dict[str, list[str]]) -> None:
    plain, full = map(set, ways.values())
    assert {"optim/optimizer.py", "families/kronecker.py", "likelihoods/gaussian.py"} <= plain
    assert any(name.startswith("curvature/") for name in full - plain)
