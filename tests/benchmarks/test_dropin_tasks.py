"""Every task of the drop-in suite can be trained, and is what it says; on made data."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

import noisygrad as ng
from dropin_tasks.measures import area_under_roc, calibration_error
from dropin_tasks.methods import method_named
from dropin_tasks.outcomes import OUTCOMES
from dropin_tasks.sources import SOURCES
from dropin_tasks.store import Store
from dropin_tasks.task import Arrays, Data, Task
from dropin_tasks.tasks import TASKS
from dropin_tasks.variation import Variation
from support.made_dropin import MADE, made


class MadeStore(Store):
    """Made data in place of real ones."""

    def arrays(self, name: str) -> Arrays:
        return made(name)


@cache
def data_of(name: str) -> Data:
    return TASKS[name].data(MadeStore(Path()))


def trained(task: Task, method: str) -> float:
    """The log-likelihood of some rows after one step on them, which must have moved what is not frozen and no more."""
    data, outcome = data_of(task.name), OUTCOMES[task.likelihood]
    torch.manual_seed(0)
    model = task.network(data, 1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    training = method_named(method).start(model, outcome, len(data.train), 0)
    model.train()
    batch = data.train.rows(slice(0, 8))
    training.step(batch)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved
    assert moved <= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    predict, _ = training.finish(data.validation.rows(slice(0, 8)))
    return float(outcome.log_prob(predict(batch.inputs), batch.targets).mean())


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("method", ["adamw-1e-3", "noisy-kfac"])
def test_a_step_of_every_task(name: str, method: str) -> None:
    assert math.isfinite(trained(TASKS[name], method))


def test_every_kind_is_in_both_halves() -> None:
    kinds = {half: {task.kind for task in TASKS.values() if task.half == half} for half in ("tune", "report")}
    assert kinds["tune"] == kinds["report"]
    assert min(Counter(task.half for task in TASKS.values()).values()) >= 12


def test_every_source_is_known_and_made() -> None:
    needed = {source for task in TASKS.values() for source in task.sources}
    assert needed <= set(SOURCES)
    assert needed <= set(MADE)


@pytest.mark.parametrize("name", ["mnist-lenet", "names-language-model", "wine-chemistry", "topics-language-model"])
def test_the_parts_of_a_split_share_no_row(name: str) -> None:
    data = data_of(name)
    rows = [tuple(row.flatten().tolist()) for part in (data.train, data.validation, data.test) for row in part.targets]
    assert len(data.validation) == pytest.approx(len(data.train) / 9, abs=1)
    if TASKS[name].likelihood.startswith("gaussian"):
        assert len(set(rows)) == len(rows)


def test_outliers_leave_the_test_rows() -> None:
    data = data_of("wine-chemistry")
    spoilt = Variation(outliers=0.1).data(data, "gaussian")
    for part, was in ((spoilt.train, data.train), (spoilt.validation, data.validation)):
        assert 0.03 < float((part.targets != was.targets).float().mean()) < 0.2
    assert torch.equal(spoilt.test.targets, data.test.targets)
    assert torch.equal(spoilt.train.inputs[0], data.train.inputs[0])


def test_variations_are_named() -> None:
    assert Variation().label == ""
    assert Variation(batch_factor=4, outliers=0.01).label == "@batch-factor=4,outliers=0.01"
    assert Variation(batch_factor=4).steps(400) == 100
    with pytest.raises(ValueError, match="epoch_factor must be positive"):
        Variation(epoch_factor=0)


def test_figures_agree_with_the_librarys() -> None:
    torch.manual_seed(0)
    probs = torch.softmax(3 * torch.randn(500, 4), -1)
    target = torch.randint(4, (500,))
    confidence, label = probs.max(-1)
    found = calibration_error(confidence, (label == target).float())
    assert found == pytest.approx(ng.metrics.ece(probs, target), abs=1e-6)
    inside, outside = torch.randn(200).round(decimals=1), torch.randn(300).round(decimals=1) + 0.5
    assert area_under_roc(inside, outside) == pytest.approx(ng.metrics.auroc(inside, outside), abs=1e-6)


def test_what_knows_the_targets_only_is_a_baseline() -> None:
    train = data_of("wine-imbalanced").train
    row, _ = OUTCOMES["categorical"].marginal(train)
    shares = torch.bincount(train.targets) / len(train)
    assert torch.allclose(row.softmax(-1)[:6], shares, atol=1e-2)
