"""How the cost of a step grows with the network's width and with the batch, and what predictions cost.

    python benchmarks/scaling.py [--device cuda] [--output results/scaling-h200.json]

The paper's VGG16 at widths ×1, ×2, ×4 (batch 128) and at batches 128, 512, 2048 (width ×1). Statistics every 10 steps
and factors every 200, as in `benchmarks/run.py`, whose steps are used. On a GPU all steps are CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

import torch

import noisygrad as ng
from noisygrad_paper.networks import VGG16
from run import FACTOR_EVERY, STATS_EVERY, WARM_UPS, amortised, make_steps, problem, seconds

WIDTHS, BATCHES = (1.0, 2.0, 4.0), (128, 512, 2048)
METHODS = ("SGD", "NoisyAdam", "NoisyKFAC")
ROUNDS, TEST_IMAGES, SAMPLES = 5, 10_000, 10


def step_times(width: float, batch: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of each kind of step of each method, rounds of all methods interleaved."""
    p = problem("vgg16", device, None, width=width, batch=batch)
    suffix = " captured" if device.type == "cuda" else ""
    steps = {method: make_steps(method + suffix, p) for method in METHODS}
    found: dict[str, dict[str, list[float]]] = {m: {kind: [] for kind in kinds} for m, kinds in steps.items()}
    for kinds in steps.values():
        for step in kinds.values():
            seconds(step, WARM_UPS, device)
    counts = {"plain": 20, "statistics": 5, "refresh": 2} if device.type == "cuda" else {}
    for _ in range(ROUNDS):
        for method, kinds in steps.items():
            for kind, step in kinds.items():
                found[method][kind].append(seconds(step, counts.get(kind, 1), device))
    times = {m: {kind: statistics.median(v) for kind, v in kinds.items()} for m, kinds in found.items()}
    return {method: {**kinds, "step": amortised(kinds)} for method, kinds in times.items()}


def prediction_times(device: torch.device, images: int) -> dict[str, float]:
    """Seconds for one pass of the plain network over the test images, and for ten draws of the weights."""
    model = VGG16().to(device)
    optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=50_000)
    posterior = optimizer.posterior()
    x = torch.randn(images, 3, 32, 32, device=device)
    model.eval()

    @torch.no_grad()
    def plain() -> object:
        return torch.cat([model(part) for part in x.split(1000)])

    def draws() -> object:
        return posterior.outputs(x, SAMPLES, batch_size=1000)

    once = {name: seconds(work, 1, device) for name, work in (("plain", plain), ("draws", draws))}
    del once  # the first run of either pays for starting up
    found = {"plain": [], "draws": []}
    for _ in range(ROUNDS):
        found["plain"].append(seconds(plain, 1, device))
        found["draws"].append(seconds(draws, 1, device))
    times = {name: statistics.median(values) for name, values in found.items()}
    return {**times, "ratio": times["draws"] / times["plain"], "samples": SAMPLES, "images": images}


def main() -> None:
    """Measure and print; with --output, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", nargs="+", type=float, default=list(WIDTHS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--images", type=int, default=TEST_IMAGES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as the classification experiment does
        torch.backends.cudnn.benchmark = True
    found = []
    pairs = [(width, 128) for width in arguments.widths] + [(1.0, batch) for batch in arguments.batches if batch != 128]
    for width, batch in pairs:
        times = step_times(width, batch, device)
        found.append({"width": width, "batch": batch, "seconds": times})
        row = ", ".join(f"{method} {kinds['step'] * 1e3:.2f} ms" for method, kinds in times.items())
        print(f"width ×{width:g}, batch {batch}: {row}", flush=True)
    prediction = prediction_times(device, arguments.images)
    print(f"{SAMPLES} draws for {arguments.images} images: {prediction['ratio']:.2f} × one pass")
    if arguments.output:
        record = {
            "command": "python benchmarks/scaling.py "
            + " ".join(sys.argv[1:]).replace(str(arguments.output), f"results/{arguments.output.name}"),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "every": {"statistics": STATS_EVERY, "factors": FACTOR_EVERY},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "noisygrad": ng.__version__},
            "steps": found,
            "prediction": prediction,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
