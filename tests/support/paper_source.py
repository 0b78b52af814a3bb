"""The tables of the paper's LaTeX source, where it can be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def paper_source() -> Path:
    return Path(os.environ.get("NOISYGRAD_PAPER", ROOT.parent / "shared" / "paper" / "noisy-natural-gradient.tex"))


def printed_rows(label: str) -> dict[str, list[str]]:
    """The rows of a table of the paper's source, each cell as it is printed."""
    source = paper_source().read_text(encoding="utf-8")
    body = source.split(f"\\label{{{label}}}")[1].split("\\midrule")[1].split("\\bottomrule")[0]
    rows = {}
    for line in body.strip().split("\\\\"):
        if line.strip():
            name, *cells = (re.sub(r"\\textbf\{(.*)\}", r"\1", cell.strip()) for cell in line.split("&"))
            rows[name.lower().replace("pow. plant", "power")] = [re.sub(r"\s*\$\\pm\$", "±", cell) for cell in cells]
    return rows
