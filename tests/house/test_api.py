"""The public names and signatures are those of api.txt, so that a change of them is a decision."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_public_api_is_as_decided() -> None:
    # In a process of its own, so that no other test has imported or replaced anything.
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, HERE / "api.py"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found, decided = done.stdout.splitlines(), (HERE / "api.txt").read_text(encoding="utf-8").splitlines()
    change = "\n".join(difflib.unified_diff(decided, found, "api.txt", "the library", n=0, lineterm=""))
    assert found == decided, f"{change}\n\nIf this is meant: python tests/house/api.py --write, and commit api.txt."
