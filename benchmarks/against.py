"""Step times of this tree against those of another commit, process by process in turns, so that both see one machine.

    python benchmarks/against.py COMMIT [--models mlp vgg16] [--turns 5] [--replicas] [--output FILE]

Each turn runs `benchmarks/run.py` (with `--replicas` also `benchmarks/replicas.py`) of either tree. Printed are medians
over turns: the time of a step as a multiple of SGD's in the same process, and what it is here beside there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Figures = dict[str, list[float]]


def run(tree: Path, script: str, *arguments: str) -> dict[str, dict[str, dict[str, float]]]:
    """What a benchmark of a tree writes: by network (or "replicas") and method."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        command = [sys.executable, tree / "benchmarks" / script, *arguments, "--output", output]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        record = json.loads(output.read_text())
    return record.get("seconds_per_step") or {"replicas": record["methods"]}


def ratios(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Every figure by a name: steps as multiples of SGD's, memory in MB, epochs of replicas in milliseconds."""
    figures = {}
    for network, methods in found.items():
        for method, row in methods.items():
            if network == "replicas":
                figures[f"replicas, {method} (ms)"] = row["epoch"] * 1e3
                continue
            kinds = {kind: row[kind] for kind in ("plain", "statistics", "refresh", "step") if kind in row}
            for kind, seconds in kinds.items() if method != "SGD" else ():
                figures[f"{network}, {method}, {kind} (× SGD)"] = seconds / methods["SGD"]["step"]
            if "peak_mb" in row:
                figures[f"{network}, {method}, peak (MB)"] = row["peak_mb"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--models", nargs="+", default=["mlp", "vgg16"])
    parser.add_argument("--methods", nargs="+", default=["SGD", "NoisyAdam", "NoisyKFAC"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of each network in one turn")
    parser.add_argument("--replicas", action="store_true", help="the replica engine too; needs the data of yacht")
    parser.add_argument("--memory", action="store_true", help="peak memory too, in the first turn")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Figures] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", there, arguments.commit], cwd=ROOT, check=True)
        try:
            for turn in range(arguments.turns):
                memory = "--memory" if arguments.memory and turn == 0 else "--no-memory"
                order = [("there", there), ("here", ROOT)]
                for name, tree in order if turn % 2 == 0 else reversed(order):
                    steps = ("--methods", *arguments.methods, "--rounds", str(arguments.rounds), memory)
                    figures = ratios(run(tree, "run.py", "--models", *arguments.models, *steps))
                    if arguments.replicas:
                        figures |= ratios(run(tree, "replicas.py"))
                    for figure, value in figures.items():
                        found[figure][name].append(value)
                print(f"turn {turn + 1} of {arguments.turns}", file=sys.stderr)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)
    print(f"{'':48}{'there':>10}{'here':>10}{'ratio':>8}")
    table = {}
    for figure, both in found.items():
        before, now = (statistics.median(both[name]) for name in ("there", "here"))
        table[figure] = {"there": before, "here": now, "ratio": now / before}
        print(f"{figure:48}{before:10.3f}{now:10.3f}{now / before:8.3f}")
    if arguments.output:
        record = {"commit": arguments.commit, "turns": arguments.turns, "figures": table}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
