"""Step time of the optimisers against their peers: ratios measured in one run, and peak memory.

    python benchmarks/run.py [--device cuda] [--models mlp vgg16] [--methods ...] [--output results/benchmark-cpu.json]

Every method trains the same network on the same batch. Rounds of all methods are interleaved, so that a machine whose
speed drifts slows all of them alike; the figure of a method is the median over rounds of the mean step time. Statistics
every 10 steps and factors every 200 are amortised: plain, statistics and refresh steps are timed apart and weighted.
Statistics are taken of all examples of a batch (`--stats-batch` takes fewer of VGG16's). On a GPU all methods have what
the classification experiment has: images in channels-last order, TF32 products, cuDNN's choice of algorithms by trial.
Peers are optional installs: what is missing is left out with a note.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.optim.execution import Replay
from noisygrad.training import CapturedStep
from noisygrad_paper.networks import VGG16

STATS_EVERY, FACTOR_EVERY = 10, 200
METHODS = ("SGD", "AdamW fused", "IVON", "NoisyAdam", "NoisyKFAC")
CAPTURED = tuple(
    f"{method} captured{precision}"
    for precision in ("", " bf16")
    for method in ("SGD", "AdamW fused", "NoisyAdam", "NoisyKFAC")
)
"""The same as CUDA graphs, and with a network in bfloat16 (the optimiser in float32): on a GPU only."""
WARM_UPS = 6  # a graph is recorded in the fourth run
Step = Callable[[], object]


@dataclass
class Problem:
    """A network, a batch, the loss of the point methods and the likelihood of ours."""

    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: Callable[[], ng.Likelihood]
    num_data: int
    settings: dict[str, object]
    """The paper's for this problem: regression has neither damping nor a trust region, CIFAR-10 has both."""


def problem(
    name: str, device: torch.device, stats_batch: int | None, *, width: float = 1.0, batch: int = 128
) -> Problem:
    """The two of the paper: MLP 13-50-1 at batch 10, VGG16 at batch 128, or at another width and batch."""
    torch.manual_seed(0)
    if name == "mlp":
        return Problem(
            lambda: ng.networks.MLP(13, (50,), 1).to(device),
            torch.randn(10, 13, device=device),
            torch.randn(10, 1, device=device),
            F.mse_loss,
            lambda: ng.Gaussian(noise_variance=0.1),
            455,
            {},
        )
    order = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    return Problem(
        lambda: VGG16(width=width).to(device, memory_format=order),
        torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=order),
        torch.randint(10, (batch,), device=device),
        F.cross_entropy,
        ng.Categorical,
        50_000,
        {"damping": 1e-3, "kl_clip": 1e-3, "momentum_mode": "heavy_ball", "stats_batch": stats_batch},
    )


def make_steps(method: str, p: Problem) -> dict[str, Step]:
    """The kinds of step of a method by name; all but ours have only `plain`."""
    torch.manual_seed(0)
    model = p.model().train()
    method, *suffixes = method.split(" captured")
    captured, narrow = bool(suffixes), suffixes == [" bf16"]

    def outputs() -> Tensor:
        if not narrow:
            return model(p.x)
        # A cast that a recording remembered would stay as it was at the recording.
        with torch.autocast(p.x.device.type, torch.bfloat16, cache_enabled=False):
            return model(p.x)

    if method.startswith("Noisy"):
        optimizer = getattr(ng, method)(
            model,
            p.likelihood(),
            num_data=p.num_data,
            lr=1e-5,
            stats_every=STATS_EVERY,
            factor_every=FACTOR_EVERY,
            fisher_decay=1.0 - 1e-9,
            **p.settings,
        )
        # Nothing is learned here, so the Fisher would shrink and the noise grow until most numbers were denormal or
        # infinite, which no training sees: it is one, and after so many updates, a new one counts for nothing.
        fisher = optimizer.covariance.fisher
        fisher.updates.fill_(1e9)
        fisher.seen.fill_(1.0)
        for statistics in fisher.statistics.values():
            ones = statistics.with_identity(1.0).averages()
            for name, average in statistics.averages().items():
                average.copy_(ones[name])
        kinds = {"plain": STATS_EVERY * 7, "statistics": STATS_EVERY * 3 - 1, "refresh": FACTOR_EVERY - 1}

        whole = CapturedStep(optimizer, lambda: (outputs(), p.y))

        def step(before: int) -> Step:
            def run() -> object:
                optimizer.steps = before  # the schedule looks at the step count alone
                return whole() if captured else optimizer.step(lambda: (outputs(), p.y))

            return run

        return {kind: step(before) for kind, before in kinds.items()}
    if method == "IVON":
        import ivon

        peer = ivon.IVON(model.parameters(), lr=1e-5, ess=p.num_data)

        def sampled() -> object:
            with peer.sampled_params(train=True):
                peer.zero_grad()
                loss = p.loss(model(p.x), p.y)
                loss.backward()
            peer.step()
            return loss

        return {"plain": sampled}
    if method == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=captured)

    def plain() -> object:
        optimizer.zero_grad()
        loss = p.loss(outputs().float(), p.y)
        loss.backward()
        optimizer.step()
        return loss

    return {"plain": Replay(plain, p.x.device) if captured else plain}


def seconds(step: Step, count: int, device: torch.device) -> float:
    """Mean wall time of a step over `count`; the device is waited for before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def amortised(times: dict[str, float]) -> float:
    """The mean over a long run with statistics every 10 steps and factors every 200."""
    if len(times) == 1:
        return times["plain"]
    share = 1 / STATS_EVERY
    refresh = 1 / FACTOR_EVERY
    return (1 - share) * times["plain"] + (share - refresh) * times["statistics"] + refresh * times["refresh"]


def measure(
    name: str, methods: list[str], device: torch.device, rounds: int, stats_batch: int | None
) -> dict[str, dict[str, float]]:
    """Interleaved rounds of all methods on one network."""
    p = problem(name, device, stats_batch)
    steps = {method: make_steps(method, p) for method in methods}
    quick = name == "mlp"
    counts = {"plain": 300, "statistics": 100, "refresh": 30} if quick else {"plain": 5, "statistics": 2, "refresh": 1}
    if device.type == "cuda" and not quick:
        counts = {"plain": 20, "statistics": 5, "refresh": 1}
    for kinds in steps.values():
        for step in kinds.values():
            seconds(step, WARM_UPS, device)
    found: dict[str, dict[str, list[float]]] = {m: {kind: [] for kind in kinds} for m, kinds in steps.items()}
    for _ in range(rounds):
        for method, kinds in steps.items():
            for kind, step in kinds.items():
                found[method][kind].append(seconds(step, counts[kind], device))
    results = {}
    for method, kinds in found.items():
        times = {kind: statistics.median(values) for kind, values in kinds.items()}
        results[method] = {**times, "step": amortised(times)}
    return results


def peak_memory(name: str, method: str, device: torch.device, stats_batch: int | None) -> float:
    """Peak memory in MB of a few steps of each kind, in a process that does nothing else."""
    options = ["--device", str(device), "--stats-batch", str(stats_batch or 0), "--only-memory", name, method]
    found = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
    return float(found.stdout.strip().splitlines()[-1])


def only_memory(name: str, method: str, device: torch.device, stats_batch: int | None) -> None:
    """Print how far the steps raise this process's peak memory in MB: what is resident, or allocated on a GPU."""
    p = problem(name, device, stats_batch)
    before = peak_resident()
    for step in make_steps(method, p).values():
        seconds(step, WARM_UPS if device.type == "cuda" else 2, device)
    print(torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else peak_resident() - before)


def peak_resident() -> float:
    """In MB. Not `getrusage`, whose peak a process inherits from the one that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def processor() -> str:
    """The CPU by the name that it gives itself, and the widest instructions that torch uses on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"


def report(name: str, results: dict[str, dict[str, float]]) -> None:
    """A table with ratios to SGD and to IVON."""
    print(f"\n{name}")
    print(f"{'method':26}{'step':>12}{'× SGD':>9}{'× IVON':>9}{'peak MB':>10}   plain / statistics / refresh")
    for method, row in results.items():
        sgd = row["step"] / results["SGD"]["step"] if "SGD" in results else float("nan")
        peer = row["step"] / results["IVON"]["step"] if "IVON" in results else float("nan")
        kinds = " / ".join(f"{row[k] * 1e3:.3f}" for k in ("plain", "statistics", "refresh") if k in row)
        memory = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
        print(f"{method:26}{row['step'] * 1e3:9.3f} ms{sgd:9.2f}{peer:9.2f}{memory:>10}   {kinds} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["mlp", "vgg16"], choices=["mlp", "vgg16"])
    parser.add_argument("--methods", nargs="+", choices=METHODS + CAPTURED, help="all that the device can run")
    parser.add_argument("--rounds", type=int, help="7, or 25 on a GPU, where steps are short and hosts uneven")
    parser.add_argument("--stats-batch", type=int, default=0, help="examples of a VGG16 batch for statistics; 0: all")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only-memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    stats_batch = arguments.stats_batch or None
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # Trials of algorithms take memory of their own.
        torch.backends.cudnn.benchmark = not arguments.only_memory
    if arguments.only_memory:
        only_memory(*arguments.only_memory, device, stats_batch)
        return
    methods = list(arguments.methods or METHODS + (CAPTURED if device.type == "cuda" else ()))
    try:
        import ivon  # noqa: F401
    except ImportError:
        if "IVON" in methods:
            methods.remove("IVON")
            print("IVON is left out: pip install ivon-opt")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.models:
        rounds = arguments.rounds or (25 if device.type == "cuda" else 7)
        results[name] = measure(name, methods, device, rounds, stats_batch)
        if arguments.memory:
            # Processes do not count each other's memory; a CPU's cores are for one of them at a time.
            with ThreadPoolExecutor(4 if device.type == "cuda" else 1) as pool:
                peaks = pool.map(lambda method, name=name: peak_memory(name, method, device, stats_batch), methods)
                for method, peak in zip(methods, peaks, strict=True):
                    results[name][method]["peak_mb"] = peak
        report(name, results[name])
    if arguments.output:
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores ({processor()})"
        record = {
            # The folder is that of one machine; the results live in one place.
            "command": "python benchmarks/run.py "
            + " ".join(sys.argv[1:]).replace(str(arguments.output), f"results/{arguments.output.name}"),
            "device": where,
            "threads": torch.get_num_threads(),
            "stats_batch": {"mlp": None, "vgg16": stats_batch},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "noisygrad": ng.__version__},
            "seconds_per_step": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
