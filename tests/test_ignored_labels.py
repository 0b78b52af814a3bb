"""Positions whose class is not known have no part in the loss, the Fisher and the ELBO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisygrad as ng
from truth import close, measured_fisher, normal, per_example_jacobians, random_weights

IGNORED = -100
LABELS = torch.tensor([[0, 2, IGNORED], [IGNORED, IGNORED, IGNORED], [1, IGNORED, 0], [2, 1, 1]])


def likelihood() -> ng.Categorical:
    made = ng.Categorical(ignore_index=IGNORED)
    made.bind((), "cpu", torch.float64)
    return made


def network() -> nn.Module:
    torch.manual_seed(0)
    return random_weights(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double())


def known_fisher(model: nn.Module, x: Tensor) -> Tensor:
    """Mean over examples of Jᵀ F J, of the known positions alone."""
    total = torch.zeros(())
    with torch.no_grad():
        for example, labels, jacobian in zip(x, LABELS, per_example_jacobians(model, x), strict=True):
            for t, p in enumerate(torch.softmax(model(example), -1)):
                j = jacobian.view(3, 3, -1)[t] * (labels[t] != IGNORED)
                total = total + j.mT @ (torch.diag(p) - torch.outer(p, p)) @ j
    return total / len(x)


def test_the_loss_is_that_of_known_positions() -> None:
    output = normal(4, 3, 3).requires_grad_()
    known = LABELS != IGNORED
    loss = likelihood().nll(output, LABELS)
    close(loss, F.cross_entropy(output[known], LABELS[known], reduction="sum") / 4)
    close(-likelihood().log_prob(output, LABELS).mean(), loss)
    assert not likelihood().log_prob(output, LABELS)[1].detach()
    (gradient,) = torch.autograd.grad(loss, output)
    assert not gradient[~known].any()
    close(likelihood().score(output, LABELS), -4 * gradient)


def test_flat_labels_are_a_mean_over_all_examples() -> None:
    output, labels = normal(4, 3), torch.tensor([0, IGNORED, 2, 1])
    known = labels != IGNORED
    close(likelihood().nll(output, labels), F.cross_entropy(output[known], labels[known], reduction="sum") / 4)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_the_exact_fisher_is_that_of_known_positions(family: str) -> None:
    model, x = network(), normal(4, 3, 2)
    truth = known_fisher(model, x)
    found = measured_fisher(model, likelihood(), x, family, target=LABELS)
    close(found, truth if family == "full" else torch.diag(truth.diagonal()))
    # And so, in the mean, is the sampled one.
    draws = [measured_fisher(model, likelihood(), x, family, kind="sampled", target=LABELS, seed=s) for s in range(800)]
    assert float((torch.stack(draws).mean(0) - found).norm() / found.norm()) < 0.15


@pytest.mark.parametrize("kind", ["sampled", "exact", "empirical"])
def test_what_is_wholly_unknown_says_nothing(kind: str) -> None:
    found = measured_fisher(
        network(), likelihood(), normal(4, 3, 2), "kronecker", kind=kind, target=torch.full((4, 3), IGNORED)
    )
    assert not found.any()


def test_padding_changes_nothing_in_training() -> None:
    """Sequences of two positions, as they are and padded to three."""
    posteriors = []
    x, labels = normal(6, 2, 2).float(), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2], [0, 0], [1, 2]])
    padded = torch.cat([x, 7 * torch.ones(6, 1, 2)], dim=1), F.pad(labels, (0, 1), value=IGNORED)
    for inputs, targets in ((x, labels), padded):
        model = network().float()
        optimizer = ng.NoisyFull(model, ng.Categorical(IGNORED), num_data=6, lr=0.1, fisher="exact", seed=0)
        for _ in range(5):
            optimizer.step(lambda model=model, inputs=inputs, targets=targets: (model(inputs), targets))
        posteriors.append(optimizer.posterior())
    plain, other = posteriors
    close(plain.precision(), other.precision(), rtol=1e-4, atol=1e-4)
    close(plain.mean["0.weight"], other.mean["0.weight"], rtol=1e-4, atol=1e-5)
    elbos = [
        posterior.elbo([data], 3, torch.Generator().manual_seed(0))
        for posterior, data in ((plain, (x, labels)), (other, padded))
    ]
    close(*elbos, rtol=1e-4, atol=1e-4)


def test_it_is_kept_in_the_file(tmp_path: Path) -> None:
    model = network().float()
    optimizer = ng.NoisyKFAC(model, ng.Categorical(ignore_index=-1), num_data=4)
    optimizer.step(lambda: (model(normal(4, 2).float()), torch.tensor([0, -1, 2, 1])))
    optimizer.posterior().save(tmp_path / "posterior.safetensors")
    loaded = ng.load_posterior(tmp_path / "posterior.safetensors", model).likelihood
    assert isinstance(loaded, ng.Categorical)
    assert loaded.ignore_index == -1


def test_other_labels_must_still_be_classes() -> None:
    output = normal(2, 3)
    for label in (-1, 3):
        with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
            likelihood().check(output, torch.tensor([label, IGNORED]))
        assert likelihood().harmless(output, torch.tensor([label, IGNORED])).tolist() == [max(0, label - 1), IGNORED]
    likelihood().check(output, torch.tensor([1, IGNORED]))
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
        ng.Categorical().check(output, torch.tensor([1, IGNORED]))


@pytest.mark.parametrize("wrong", [0, 3, -1.0, "pad", True])
def test_it_must_be_no_class(wrong: object) -> None:
    with pytest.raises(ValueError, match="ignore_index must be a negative integer"):
        ng.Categorical(ignore_index=wrong)  # type: ignore[arg-type]
