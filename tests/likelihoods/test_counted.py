"""What counts in a loss: equal to torch's own losses where these know the same, and clear errors where nothing fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import noisygrad as ng
from noisygrad.likelihoods import Likelihood
from support.truth import close, normal


def loss(likelihood: Likelihood, output: Tensor, target: Tensor, **given: Tensor) -> Tensor:
    likelihood.bind((), "cpu", torch.float64)
    counted, clean = likelihood.counted(output, target, **given)
    likelihood.check(output, clean)
    if counted is not None:
        likelihood.check_counted(counted)
    return likelihood.nll(output, clean) if counted is None else likelihood.counted_nll(output, clean, counted)


def labels(*shape: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(2))


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


def test_a_classifier_has_the_loss_of_torch() -> None:
    logits, y = normal(7, 4), labels(7)
    ignored = y.clone()
    ignored[2:4] = -100
    close(loss(ng.Categorical(ignore_index=-100), logits, ignored), F.cross_entropy(logits, ignored))
    close(loss(ng.Categorical(class_weights=WEIGHTS), logits, y), F.cross_entropy(logits, y, WEIGHTS))
    for smoothing in (0.1, 0.7):
        expected = F.cross_entropy(logits, y, label_smoothing=smoothing)
        close(loss(ng.Categorical(label_smoothing=smoothing), logits, y), expected)
    both = ng.Categorical(ignore_index=-100, class_weights=WEIGHTS.tolist())
    close(loss(both, logits, ignored), F.cross_entropy(logits, ignored, WEIGHTS))


def test_positions_add_up_and_examples_are_averaged() -> None:
    logits, y = normal(3, 5, 4), labels(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    summed = -F.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)[mask].sum()
    close(loss(ng.Categorical(), logits, y, mask=mask), summed / 2)  # the last example has no part
    close(loss(ng.Categorical(ignore_index=-1), logits, y.masked_fill(~mask, -1)), summed / 2)
    weight = torch.tensor([2.0, 1.0, 5.0])
    parts = [loss(ng.Categorical(), logits[i : i + 1], y[i : i + 1], mask=mask[i : i + 1]) for i in range(2)]
    close(loss(ng.Categorical(), logits, y, mask=mask, weight=weight), (2 * parts[0] + parts[1]) / 3)


LIKELIHOODS: dict[str, tuple[Likelihood, int]] = {
    "Gaussian": (ng.Gaussian(noise_variance=0.3), 2),
    "Gaussian per output": (ng.Gaussian(per_output=True), 2),
    "Bernoulli": (ng.Bernoulli(), 2),
    "Poisson": (ng.Poisson(), 2),
    "HeteroscedasticGaussian": (ng.HeteroscedasticGaussian(), 4),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_weights_masks_and_missing_targets(name: str) -> None:
    likelihood, width = LIKELIHOODS[name]
    output, target = normal(3, width), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    rows = [loss(likelihood, output[i : i + 1], target[i : i + 1]) for i in range(3)]
    weight = torch.tensor([2.0, 0.0, 1.0])
    close(loss(likelihood, output, target, weight=weight), (2 * rows[0] + rows[2]) / 3)
    close(loss(likelihood, output, target, mask=torch.tensor([False, True, True])), (rows[1] + rows[2]) / 2)
    missing = torch.tensor([[False, True], [False, False], [True, True]])
    torn = target.masked_fill(~missing, torch.nan)
    terms = likelihood.terms(output, target)
    close(loss(likelihood, output, torn, mask=missing), -(terms[0, 1] + terms[2].sum()) / 2)


def test_noise_is_learned_from_what_counts() -> None:
    """Missing outputs, whatever stands in their place, and weights: as by hand."""
    f, y = normal(4, 2), normal(4, 2, seed=2)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 1]]).bool()
    weight = torch.tensor([1.0, 2.0, 7.0, 1.0], dtype=torch.float64)
    squares, v = (f - y).square(), weight.unsqueeze(-1) * mask
    for per_output in (False, True):
        likelihood = ng.Gaussian(per_output=per_output, noise_decay=0.0)
        likelihood.bind((), "cpu", torch.float64)
        counted, clean = likelihood.counted(f, y.masked_fill(~mask, torch.inf), weight, mask)
        statistic = likelihood.observe(f, clean, counted)
        assert statistic is not None
        error, number = (v * squares).sum(0) / 4, v.sum(0) / 4  # 4 = 1 + 2 + 1, the weights of the examples that count
        expected = torch.stack([error, number])
        close(statistic, expected if per_output else expected.sum(-1, keepdim=True))
        for _ in range(2000):
            likelihood.update_noise_(statistic, 50, 1.0)
        number, error = (t if per_output else t.sum(-1, keepdim=True) for t in (number, error))
        close(likelihood.noise_shape, 6 + 50 * number / 2, rtol=1e-3)
        close(likelihood.noise_rate, 6 + 50 * error / 2, rtol=1e-3)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("replicas", [(), (2,)])
def test_noise_of_one_output_without_a_dimension_of_its_own(per_output: bool, replicas: tuple[int, ...]) -> None:
    f, y, weight = normal(*replicas, 4), normal(*replicas, 4, seed=2), torch.tensor([1.0, 0.0, 2.0, 1.0])
    weight = weight.double().expand(*replicas, 4)
    found = []
    for wide in (False, True):
        likelihood = ng.Gaussian(per_output=per_output)
        likelihood.bind(replicas, "cpu", torch.float64)
        output, target = (t.unsqueeze(-1) if wide else t for t in (f, y))
        for given in ({"weight": weight}, {"mask": weight > 0}):
            counted, clean = likelihood.counted(output, target, **given)
            found.append(likelihood.observe(output, clean, counted))
    error = (weight * (f - y).square()).sum(-1, keepdim=True) / 4
    close(found[0], torch.stack([error, torch.ones_like(error)]))
    close(found[0], found[2])
    close(found[1], found[3])


def test_the_fisher_of_a_weighted_loss_is_its_generalised_gauss_newton_matrix() -> None:
    """Class weights: the second derivative of torch's weighted loss in the logits. Smoothing leaves it as it is."""
    logits, y = normal(3, 4), labels(3)
    for likelihood, options in (
        (ng.Categorical(class_weights=WEIGHTS), {"weight": WEIGHTS}),
        (ng.Categorical(label_smoothing=0.3), {"label_smoothing": 0.3}),
    ):
        likelihood.bind((), "cpu", torch.float64)
        counted, clean = likelihood.counted(logits, y)
        columns = likelihood.output_fisher_factor(logits)
        if counted is not None:
            columns = columns * likelihood.weights_of_outputs(counted.relative().sqrt(), logits)
        found = torch.einsum("kbi,kbj->bij", columns, columns) / 3

        def total(z: Tensor, y: Tensor = y, options: dict[str, Any] = options) -> Tensor:
            return F.cross_entropy(z, y, **options)

        hessian = torch.func.hessian(total)(logits)
        close(found, torch.stack([hessian[i, :, i] for i in range(3)]))
        drawn = torch.stack([likelihood.sampled_score(logits) for _ in range(20_000)])
        expected = torch.einsum("kbi,kbj->bij", *[likelihood.output_fisher_factor(logits)] * 2)
        torch.testing.assert_close(torch.einsum("sbi,sbj->bij", drawn, drawn) / 20_000, expected, rtol=0, atol=0.02)
        score = torch.autograd.functional.jacobian(lambda z: likelihood.log_prob(z, clean).sum(), logits)  # noqa: B023
        close(likelihood.score(logits, clean), score)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": torch.zeros(3, 5, dtype=torch.bool)}, "nothing in this batch counts"),
        ({"weight": torch.zeros(3)}, "nothing in this batch counts"),
        ({"weight": torch.tensor([1.0, -1.0, 1.0])}, "at least 0; they go from -1.0 to 1.0"),
        ({"weight": torch.tensor([1.0, torch.nan, 1.0])}, "finite"),
        ({"weight": torch.ones(4)}, r"weight must be of shape \[3\].*got \[4\]"),
        ({"weight": torch.ones(3, 4)}, r"got \[3, 4\]"),
        ({"mask": torch.ones(4, 5).bool()}, r"mask must be of shape \[3\].*got \[4, 5\]"),
        ({"weight": [1.0, 1.0, 1.0]}, "weight must be a tensor; got list"),
        ({"mask": torch.ones(3, 5)}, "True where a position counts.*mask.bool"),
    ],
)
def test_what_cannot_belong_to_the_targets_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        loss(ng.Categorical(), normal(3, 5, 4), labels(3, 5), **given)


def test_labels_to_be_ignored_say_how() -> None:
    y = labels(3, 5)
    y[1, 2] = -100
    with pytest.raises(ValueError, match=r"Categorical\(ignore_index=-100\)"):
        loss(ng.Categorical(), normal(3, 5, 4), y)
    with pytest.raises(ValueError, match=r"4 class_weights, but 3 classes in .* \[5, 3\]"):
        loss(ng.Categorical(class_weights=WEIGHTS), normal(5, 3), labels(5, classes=3))
    for wrong in ({"ignore_index": 1.5}, {"ignore_index": True}, {"label_smoothing": 1.0}, {"class_weights": [-1.0]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ng.Categorical(**wrong)  # type: ignore[arg-type]


class WholeExamples(ng.Gaussian):
    """A user's likelihood, whose terms are not known one by one."""

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        return self.sum_event(super().terms(output, target))


def test_a_likelihood_without_terms_can_leave_out_whole_examples() -> None:
    output, target = normal(3, 5, 2), normal(3, 5, 2, seed=3)
    weight = torch.tensor([1.0, 0.0, 2.0])
    own, usual = WholeExamples(noise_variance=0.2), ng.Gaussian(noise_variance=0.2)
    close(loss(own, output, target, weight=weight), loss(usual, output, target, weight=weight))
    with pytest.raises(ValueError, match="define `terms`"):
        loss(own, output, target, mask=torch.ones(3, 5, dtype=torch.bool))


def test_the_elbo_of_data_in_which_not_all_counts() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    optimizer = ng.NoisyAdam(model, ng.Categorical(ignore_index=-100), num_data=3, seed=0)
    x, y = normal(3, 6, 3), labels(3, 6)
    y[0, 3:] = -100
    optimizer.step(lambda: (model(x), y))
    posterior = optimizer.posterior()
    whole = posterior.expected_nll([(x, y)], generator=torch.Generator().manual_seed(1))
    pieces = [(x[:1, :3], y[:1, :3]), (x[1:], y[1:])]
    close(posterior.expected_nll(pieces, generator=torch.Generator().manual_seed(1)), whole)


def test_what_does_not_count_may_be_impossible() -> None:
    """A class that is ruled out by a logit of −∞ is no label of padding; padding alone adds nothing to the bound."""
    logits, y = normal(3, 4), labels(3)
    logits[:, 0], y[y == 0] = -torch.inf, 1
    y[1] = -100
    logits.requires_grad_()
    found = loss(ng.Categorical(ignore_index=-100), logits, y)
    close(found, F.cross_entropy(logits, y))
    (gradient,) = torch.autograd.grad(found, logits)
    assert bool(gradient.isfinite().all())
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    optimizer = ng.NoisyAdam(model, ng.Categorical(ignore_index=-100), num_data=3, seed=0)
    x, target = normal(3, 6, 3), labels(3, 6)
    optimizer.step(lambda: (model(x), target))
    posterior, empty = optimizer.posterior(), (x, torch.full_like(target, -100))
    bounds = [
        posterior.expected_nll(data, generator=torch.Generator().manual_seed(1))
        for data in ([(x, target)], [(x, target), empty], [(x, target, None, torch.ones(3, 6).bool())])
    ]
    close(bounds[1], bounds[0])
    close(bounds[2], bounds[0])
    twice = [(x, target, torch.tensor([2.0, 1.0, 0.0]))], [(x[[0, 0, 1]], target[[0, 0, 1]])]
    close(*(posterior.expected_nll(data, generator=torch.Generator().manual_seed(1)) for data in twice))


def test_a_mask_that_is_one_position_too_long_is_refused() -> None:
    """Of a shifted language model, whose mask was not shifted: else it would be taken for one of the inputs."""
    with pytest.raises(ValueError, match=r"mask must be of shape \[3\] or .*got \[3, 6\]"):
        loss(ng.Categorical(), normal(3, 5, 4), labels(3, 5), mask=torch.ones(3, 6).bool())


def test_a_mask_of_outputs_or_of_inputs_whatever_their_sizes() -> None:
    """Of outputs [batch, outputs], or with a 1 between; of the inputs [batch, positions, 1]."""
    for likelihood, width in (LIKELIHOODS["Gaussian"], LIKELIHOODS["HeteroscedasticGaussian"]):
        output, target = normal(3, width), normal(3, 2, seed=2)
        missing = torch.tensor([[False, True], [True, True], [False, False]])
        terms = likelihood.terms(output, target)
        expected = -(terms[0, 1] + terms[1].sum()) / 2
        close(loss(likelihood, output, target, mask=missing), expected)
        close(loss(likelihood, output, target, mask=missing.unsqueeze(1)), expected)
        for positions in (1, 2, 3):
            inside = missing[:, :1].expand(3, positions)
            close(loss(likelihood, output, target, mask=inside.unsqueeze(-1)), -terms[1].sum())
            with pytest.raises(ValueError, match=r"\[3, 1, 2\] \(outputs; .*mask.unsqueeze\(-1\)\); got \[3, 4\]"):
                loss(likelihood, output, target, mask=torch.ones(3, 4).bool())
    for output, target in ((normal(3, 4), labels(3)), (normal(3, 2), labels(3, classes=2))):
        for mask in (missing, missing.unsqueeze(-1)):  # of one label for each sequence
            close(loss(ng.Categorical(), output, target, mask=mask), F.cross_entropy(output[:2], target[:2]))


def test_positions_of_a_mask_of_outputs_are_those_of_the_targets() -> None:
    gaussian = ng.Gaussian(noise_variance=0.3)
    mask = torch.tensor([[[1, 0], [1, 1], [0, 0]], [[0, 0], [0, 1], [0, 0]]]).bool()
    counted, _ = gaussian.counted(normal(2, 3, 2), normal(2, 3, 2), None, mask)
    assert counted is not None
    assert torch.equal(counted.positions, mask.any(-1))
    counted, _ = gaussian.counted(normal(2, 2), normal(2, 2), None, mask[:, 0])
    assert counted is not None
    assert counted.positions is None
    assert counted.has_parts
