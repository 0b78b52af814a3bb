"""Classification under torchrun: two processes train one network, and what fails fails in both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from noisygrad.distributed import Processes
from noisygrad_paper.data import load_images, subset
from noisygrad_paper.experiments import classification, processes
from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.experiments.classification import plan, run_job


def torchrun(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "noisygrad",
        "reproduce", "classification", "--data", "digits", "--configurations", "plain", "--results", str(results),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = [*command, *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=200, env=environment, check=False)


def quiet(fraction: float, text: str) -> None:
    pass


def test_two_processes_train_one_network(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--methods", "noisy-K-FAC,SGD", "--epochs", "2", "--train-size", "600")
    assert done.returncode == 0, done.stderr[-3000:]
    cells = Results(tmp_path, "classification").load()
    assert sorted(cell.method for cell in cells) == ["SGD", "noisy-K-FAC"]
    # Without noise, two halves of a batch are the batch.
    (job,) = plan("digits", ["SGD"], ["plain"], epochs=2, train_size=600)
    (alone,) = run_job(job, quiet)
    (together,) = (cell for cell in cells if cell.method == "SGD")
    assert together.metrics["nll"] == pytest.approx(alone.metrics["nll"], rel=1e-3)
    assert together.metrics["train_loss"] == pytest.approx(alone.metrics["train_loss"], rel=1e-3)
    assert all(cell.metrics["accuracy"] > 50 for cell in cells)


def test_a_job_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    arguments = ("--methods", "SGD,K-FAC", "--epochs", "1", "--train-size", "400", "--validation")
    (broken, _) = plan("digits", ["SGD", "K-FAC"], ["plain"], epochs=1, train_size=400, validation=True)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(classification, "processes", lambda: Processes(0, 2))
        (folder / f"{classification._file_name(broken, 0)}.safetensors").write_bytes(b"damaged")
    done = torchrun(tmp_path, *arguments)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "1 of 2 jobs failed" in done.stderr
    assert "truncated or not a safetensors file" in done.stderr
    assert [cell.method for cell in Results(tmp_path, "classification-validation").load()] == ["K-FAC"]
    assert [path.read_bytes() for path in folder.iterdir()] == [b"damaged"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_gpu_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--device", "cuda")
    assert done.returncode != 0
    assert "this machine has no such usable GPU" in done.stderr
    assert "experiments/processes.py" not in done.stderr  # no traceback of ours; torchrun shows its own


def test_ranks_draw_crops_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan("digits", ["SGD"], ["D"], epochs=1, train_size=400)
    seen: list[list[int]] = []

    class Watched(classification.Learning):
        def train(self, *arguments: object) -> object:
            seen.append(torch.randint(1000, (8,)).tolist())
            raise ArithmeticError("enough")

    monkeypatch.setattr(classification, "Learning", Watched)
    images = subset(load_images("digits"), 400, 0)
    monkeypatch.setattr(classification, "_part_of", lambda *arguments: images)
    for rank in (0, 1, 0):
        # As on a rank of two, whose batches are halves; nothing else is asked of the other process.
        monkeypatch.setattr(classification, "processes", lambda rank=rank: Processes(rank, 1))
        run_job(job, quiet)
    assert seen[0] == seen[2] != seen[1]


def test_what_failed_in_another_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "all_gather_object", lambda own: [own, "OutOfMemoryError: no more"])
    with pytest.raises(RuntimeError, match="it failed in process 1: OutOfMemoryError: no more"):
        processes.in_all_processes(lambda: 3)
    with pytest.raises(KeyError, match="mine"):
        processes.in_all_processes(lambda: {}["mine"])
    monkeypatch.setattr(processes, "all_gather_object", lambda own: [own, None])
    assert processes.in_all_processes(lambda: 3) == 3
