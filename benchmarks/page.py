"""The documentation's page of step times, from results/benchmark-*.json and nothing else.

python benchmarks/page.py     # writes docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from growth import growth

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Step times

Made by `benchmarks/page.py` from the files that `benchmarks/run.py` left in `results/`. Every method trains the same
network on the same batch; rounds of all methods are interleaved in one run and the median is taken, so look at the
ratios. Statistics are taken every 10 steps and factors made every 200, and both are part of the mean step.

CPU figures are of the processor named below. In one longer run of NoisyAdam and IVON alone for each network, of the
same code, NoisyAdam took {vgg16:.2f} (VGG16) and {mlp:.2f} (MLP) times as long as IVON (41 and 61 rounds,
`results/ivon-cpu.json`). On VGG16 the two are nearly level, and shorter runs while the code changed gave 0.95 to
1.02. How it comes out depends on memory that the C library gives back to the system after a step and has to be given
again: with that switched off (`MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` very large) NoisyAdam took 1.02
times as long as IVON (nine rounds, not kept). On another host, without a record of its processor, where SGD took 330
ms on VGG16, earlier code gave 0.98 to 1.02 (VGG16, fifteen runs) and 0.95 to 1.01 (MLP, twelve runs), and NoisyKFAC
took 1.85 times as long as SGD. Here that code took 2.27 times as long (seven rounds, not kept): MKL, which multiplies
torch's matrices, is less than half as fast on this processor as oneDNN, which does the convolutions of SGD, most
likely for want of AVX-512. Since large products go to oneDNN too, it is as below.

On the GPU all methods have images in channels-last order and TF32 products; captured steps are CUDA graphs (all but
K-FAC's refreshes), bf16 ones have a network in bfloat16. Eager steps there wait for the host, and hosts differ, so that
ratios to eager SGD do too. In six runs of changing code on several hosts, the last of which is below, SGD took 4.5,
4.0, 3.7, 3.5, 4.5 and 3.3 ms, NoisyAdam 1.25, 1.29, 1.35, 1.35, 1.21 and 1.26 times as long (0.76 to 0.82 × IVON), and
captured NoisyKFAC 0.68, 0.89, 1.01, 1.01, 0.74 and 0.92 times.

Peak memory is that of a process that does nothing else: what is resident beyond the start, or allocated on the GPU.
Ours has steps with statistics and a refresh of the factors in it. On a CPU the start has torch's compiler in it, about
70 MB, which noisygrad imports and which earlier versions of this page counted with every method.
"""
NAMES = {"mlp": "MLP 13-50-1, batch 10", "vgg16": "the paper's VGG16, batch 128"}


def page(picture: Path) -> str:
    """The whole page; the picture of growth is drawn into the file named."""
    pair = json.loads((ROOT / "results" / "ivon-cpu.json").read_text())["seconds_per_step"]
    parts = [HEAD.format(**{name: row["NoisyAdam"]["step"] / row["IVON"]["step"] for name, row in pair.items()})]
    for path in sorted((ROOT / "results").glob("benchmark-*.json")):
        record = json.loads(path.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        parts.append(f"\n## {record['device']}\n\n`{record['command']}`; {versions}.\n")
        for name, results in record["seconds_per_step"].items():
            kept = record["stats_batch"][name]
            note = f" (statistics from {kept} of the examples)" if kept else " (statistics from all examples)"
            parts.append(f"\n### {NAMES[name]}{note}\n\n{table(results)}")
    grown = ROOT / "results" / "scaling-h200.json"
    if grown.exists():
        parts.append(growth(grown, picture))
    return "".join([*parts, replicas(), against()])


def replicas() -> str:
    """Trainings done together, on a CPU and on a GPU."""
    record = json.loads((ROOT / "results" / "replicas-cpu.json").read_text())
    run = json.loads((ROOT / "results" / "regression-h200-run.json").read_text())
    rows = ["| | an epoch (ms) | all splits (ms) | ratio |", "|---|---|---|---|"]
    for name, row in record["methods"].items():
        rows.append(f"| {name} | {row['epoch'] * 1e3:.1f} | {row['all_splits'] * 1e3:.1f} | {row['ratio']:.2f} |")
    splits = next(iter(record["methods"]))
    return (
        f"\n## Replicas\n\nMade by `benchmarks/replicas.py`: an epoch of {record['data']} with NNG-MVG and the paper's "
        f"settings, {splits} in one batched network ({record['execution']} step), the same engine with one replica, "
        f"and the public optimiser; threads: {record['threads']}.\n\n"
        + "\n".join(rows)
        + f"\n\nOn one H200, `{run['command']}` finished its {run['cells']} cells, {run['data_sets']}, in "
        f"{run['seconds'] / 60:.1f} minutes ({run['device']}).\n"
    )


def against() -> str:
    """Version 0.1 and what came after it, as `benchmarks/against.py` found them."""
    record = json.loads((ROOT / "results" / "against-0.1-cpu.json").read_text())
    rows = ["| | 0.1 | now | ratio |", "|---|---|---|---|"]
    for name, row in record["figures"].items():
        rows.append(f"| {name} | {row['there']:.2f} | {row['here']:.2f} | {row['ratio']:.2f} |")
    return (
        f"\n## Beside version 0.1\n\nMedians of runs in turns with the last commit of 0.1 ({record['commit']}), "
        f"on {record['device']}: {' and '.join(f'`{command}`' for command in record['commands'])}; {record['note']}. "
        f"Peaks of resident memory scatter by how the C library cuts it up: {record['memory']}\n\n"
        + "\n".join(rows)
        + "\n"
    )


def table(results: dict[str, dict[str, float]]) -> str:
    """One network's methods, as Markdown."""
    rows = ["| method | step (ms) | × SGD | × IVON | peak memory (MB) |", "|---|---|---|---|---|"]
    for method, row in results.items():
        ratios = [row["step"] / results[peer]["step"] if peer in results else None for peer in ("SGD", "IVON")]
        cells = [f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios]
        memory = f"{row['peak_mb']:.0f}" if "peak_mb" in row else ""
        rows.append(f"| {method} | {row['step'] * 1e3:.2f} | {cells[0]} | {cells[1]} | {memory} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (ROOT / "docs" / "benchmarks.md").write_text(page(ROOT / "docs" / "assets" / "growth.png"), encoding="utf-8")
