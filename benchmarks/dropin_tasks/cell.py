"""One training of one task by one method with one seed, and all that is measured of it."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import noisygrad as ng

from . import measures
from .methods import SAMPLES, Method, forward
from .outcomes import OUTCOMES
from .store import Store, UnavailableError
from .task import Data, Task
from .variation import Variation

MOST_TEXTS = 5


def batches(rows: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches: every epoch in a new order, its incomplete last batch left out."""
    order = torch.Generator().manual_seed(1000 + seed)
    done = 0
    while done < steps:
        for index in torch.randperm(rows, generator=order).split(size):
            if len(index) == size and done < steps:
                done += 1
                yield index


def run_cell(task: Task, method: Method, seed: int, variation: Variation, store: Store) -> dict[str, Any]:
    """The record of a training. Raises `UnavailableError` where data or a package are missing, and nothing else."""
    record: dict[str, Any] = {
        "task": task.name,
        "method": method.name + variation.label,
        "seed": seed,
        "half": task.half,
        "kind": task.kind,
        "settings": dict(method.settings),
        "variation": asdict(variation),
        "versions": {"torch": torch.__version__, "noisygrad": ng.__version__},
    }
    outcome = OUTCOMES[task.likelihood]
    data = variation.data(task.data(store), task.likelihood)
    size = variation.batch(task.batch, len(data.train))
    steps = variation.steps(task.steps)
    torch.manual_seed(seed)
    model = task.network(data, variation.width_factor)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    record |= {"rows": len(data.train), "weights": weights, "batch": size, "steps": steps}
    one = forward(model, data.test.rows(slice(0, 1)).inputs)
    baseline = marginal_nll(task, data, one)
    record["marginal_nll"] = baseline
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        done = 0
        try:
            torch.manual_seed(seed + 1)  # dropout and the like, the same whatever the network drew at its start
            training = method.start(model, outcome, len(data.train), seed)
            begin, busy = time.perf_counter(), time.process_time()
            model.train()
            for index in batches(len(data.train), size, steps, seed):
                training.step(data.train.rows(index))
                done += 1
            record["seconds"] = time.perf_counter() - begin
            record["cpu_seconds"] = time.process_time() - busy
            record["ms_per_step"] = 1e3 * record["seconds"] / steps
            record |= measured(task, data, training.finish(data.validation), SAMPLES * one.numel())
        except UnavailableError:
            raise
        except Exception as error:  # a method that fails is a result
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            record |= {"broke": f"{type(error).__name__}: {error}", "broke_at": place, "broke_after": done}
    texts = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    record |= {"warnings": len(caught), "warning_texts": texts[:MOST_TEXTS]}
    record["diverged"] = "broke" not in record and not record["nll"] <= baseline
    return finite(record)


def marginal_nll(task: Task, data: Data, output: Tensor) -> float:
    """What predicting the training targets' own distribution, whatever the input, has on the test rows."""
    outcome = OUTCOMES[task.likelihood]
    row, noise = outcome.marginal(data.train)
    lead = output.shape[1:-1]

    def predict(inputs: tuple[Tensor, ...]) -> Any:
        return outcome.prediction(row.expand(1, len(inputs[0]), *lead, len(row)), noise)

    return measures.nll(predict, data.test, outcome, math.prod(lead) * len(row))


def measured(
    task: Task, data: Data, predicts: tuple[measures.Predict, measures.Predict], elements: int
) -> dict[str, float]:
    """Figures on the test rows, and what choosing between methods may look at."""
    outcome = OUTCOMES[task.likelihood]
    predict, predict_mean = predicts
    found = measures.figures(predict, data.test, outcome, elements, data.outside)
    found["nll_mean_weights"] = measures.nll(predict_mean, data.test, outcome, elements)
    found["validation_nll"] = measures.nll(predict, data.validation, outcome, elements)
    return found


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity as text, which every reader of JSON takes."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
