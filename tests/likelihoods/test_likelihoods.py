import json
import math

import pytest
import torch
from scipy import special as scipy_special
from torch import Tensor, distributions

from noisygrad import likelihoods
from noisygrad.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson

ALL: list[tuple[Likelihood, int]] = [
    (Gaussian(0.3), 3),
    (HeteroscedasticGaussian(), 4),
    (Categorical(), 3),
    (Bernoulli(), 3),
    (Poisson(), 3),
]
IDS = [type(likelihood).__name__ for likelihood, _ in ALL]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def fresh(likelihood: Likelihood) -> Likelihood:
    return type(likelihood).from_config(likelihood.config())


def test_log_prob_equals_torch_distributions() -> None:
    f = outputs(5, 4)
    bound = Gaussian(0.3)
    bound.bind((), "cpu", torch.float64)
    y = outputs(5, 4, seed=1)
    expected = distributions.Normal(f, math.sqrt(0.3)).log_prob(y).sum(-1)
    torch.testing.assert_close(bound.log_prob(f, y), expected)
    y2 = y[:, :2]
    expected = distributions.Normal(f[:, :2], (0.5 * f[:, 2:]).exp()).log_prob(y2).sum(-1)
    torch.testing.assert_close(HeteroscedasticGaussian().log_prob(f, y2), expected)
    labels = torch.tensor([0, 3, 1, 2, 2])
    torch.testing.assert_close(Categorical().log_prob(f, labels), distributions.Categorical(logits=f).log_prob(labels))
    binary = (y > 0).double()
    expected = distributions.Bernoulli(logits=f).log_prob(binary).sum(-1)
    torch.testing.assert_close(Bernoulli().log_prob(f, binary), expected)
    counts = torch.poisson(f.exp(), generator=generator())
    expected = distributions.Poisson(f.exp()).log_prob(counts).sum(-1)
    torch.testing.assert_close(Poisson().log_prob(f, counts), expected)
    torch.testing.assert_close(Poisson().log_prob(f, counts.long()), expected)


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
@pytest.mark.parametrize("replicas", [(), (2,)])
@pytest.mark.parametrize("events", [(), (2,)], ids=["", "positions"])
def test_the_score_is_the_derivative_of_log_prob(
    likelihood: Likelihood, width: int, replicas: tuple[int, ...], events: tuple[int, ...]
) -> None:
    likelihood = fresh(likelihood)
    likelihood.bind(replicas, "cpu", torch.float64)
    f = outputs(*replicas, 5, *events, width).requires_grad_()
    target = likelihood.sample(f, [generator(seed) for seed in range(max(1, math.prod(replicas)))])
    (expected,) = torch.autograd.grad(likelihood.log_prob(f, target).sum(), f)
    score = likelihood.score(f, target)
    assert not score.requires_grad
    torch.testing.assert_close(score, expected, rtol=1e-12, atol=1e-12)


def test_another_log_prob_has_its_own_score() -> None:
    class Sharp(Categorical):
        def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
            return super().log_prob(2 * output, target)

    f, labels = outputs(5, 3), torch.tensor([0, 2, 1, 1, 0])
    torch.testing.assert_close(Sharp().score(f, labels), 2 * Categorical().score(2 * f, labels))


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
@pytest.mark.parametrize("replicas", [(), (2,), (2, 3)])
def test_nll_is_the_batch_mean_of_log_prob_and_replicas_are_a_loop(
    likelihood: Likelihood, width: int, replicas: tuple[int, ...]
) -> None:
    likelihood = fresh(likelihood)
    likelihood.bind(replicas, "cpu", torch.float64)
    f = outputs(*replicas, 5, width)
    count = math.prod(replicas)
    generators = [generator(seed) for seed in range(count)]
    y = likelihood.sample(f, generators)
    likelihood.check(f, y)
    log_prob = likelihood.log_prob(f, y)
    assert log_prob.shape == (*replicas, 5)
    torch.testing.assert_close(likelihood.nll(f, y), -log_prob.mean(-1).sum())
    torch.testing.assert_close(likelihood.predictive(f.unsqueeze(0)).log_prob(y), log_prob)
    factor = likelihood.output_fisher_factor(f)
    assert factor.shape[1:] == f.shape
    single = fresh(likelihood)
    single.bind((), "cpu", torch.float64)
    flat_f = f.reshape(count, 5, width)
    flat_factor = factor.reshape(-1, count, 5, width)
    for index in range(count):
        one_y = single.sample(flat_f[index], [generator(index)])
        assert torch.equal(one_y, y.reshape(count, *one_y.shape)[index])
        torch.testing.assert_close(single.log_prob(flat_f[index], one_y), log_prob.reshape(count, 5)[index])
        torch.testing.assert_close(single.output_fisher_factor(flat_f[index]), flat_factor[:, index])
    assert torch.equal(likelihood.kl(), torch.zeros(replicas, dtype=torch.float64))


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
def test_sampling_obeys_its_generators(likelihood: Likelihood, width: int) -> None:
    f = outputs(20, width)
    first, again, other = (likelihood.sample(f, [generator(seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert likelihood.sample(f).shape == first.shape
    with pytest.raises(ValueError, match="expected 1 generator"):
        likelihood.sample(f, [generator(), generator()])


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
def test_fisher_factor_is_the_covariance_of_scores_of_sampled_targets(likelihood: Likelihood, width: int) -> None:
    draws = 400_000
    f = 0.5 * outputs(1, width)
    many = f.expand(draws, width).clone().requires_grad_()
    y = likelihood.sample(many, [generator()])
    (score,) = torch.autograd.grad(likelihood.nll(many, y) * draws, many)
    sampled = score.T @ score / draws
    factor = likelihood.output_fisher_factor(f)[:, 0]
    exact = factor.T @ factor
    torch.testing.assert_close(sampled, exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(score.mean(0), torch.zeros_like(f[0]), rtol=0, atol=0.02)


@pytest.mark.parametrize(("likelihood", "width"), [ALL[2], ALL[3], ALL[4]], ids=IDS[2:])
def test_fisher_factor_is_the_hessian_of_natural_parameters(likelihood: Likelihood, width: int) -> None:
    f = outputs(1, width)
    y = likelihood.sample(f, [generator()])
    hessian = torch.autograd.functional.hessian(lambda value: likelihood.nll(value, y), f)[0, :, 0]
    factor = likelihood.output_fisher_factor(f)[:, 0]
    torch.testing.assert_close(factor.T @ factor, hessian)


def test_heteroscedastic_fisher_is_the_expected_hessian() -> None:
    f = outputs(1, 2)
    # E over y by Gauss-Hermite quadrature, exact for the quadratic dependence on y.
    nodes, weights = scipy_special.roots_hermite(8)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for node, weight in zip(nodes, weights, strict=True):
        y = f[:, :1] + math.sqrt(2) * node * torch.exp(0.5 * f[:, 1:])
        hessian = torch.autograd.functional.hessian(lambda value, y=y: HeteroscedasticGaussian().nll(value, y), f)
        expected += weight / math.sqrt(math.pi) * hessian[0, :, 0]
    factor = HeteroscedasticGaussian().output_fisher_factor(f)[:, 0]
    torch.testing.assert_close(factor.T @ factor, expected)


def test_fisher_factor_of_positions_is_block_diagonal() -> None:
    f = outputs(2, 3, 4)  # two examples, three positions, four classes
    y = torch.zeros(2, 3, dtype=torch.long)
    factor = Categorical().output_fisher_factor(f)
    assert factor.shape == (12, 2, 3, 4)
    for example in range(2):
        columns = factor[:, example].reshape(12, 12)
        hessian = torch.autograd.functional.hessian(
            lambda value: Categorical().nll(value, y[:1]), f[example : example + 1]
        )
        torch.testing.assert_close(columns.T @ columns, hessian.reshape(12, 12))
    torch.testing.assert_close(Categorical().nll(f, y), -torch.log_softmax(f, -1)[..., 0].sum() / 2)
    gaussian = Gaussian(0.25).output_fisher_factor(f)[:, 0].reshape(12, 12)
    torch.testing.assert_close(gaussian.T @ gaussian, 4 * torch.eye(12, dtype=torch.float64))


def test_outputs_without_event_dimensions() -> None:
    f, y = outputs(6), outputs(6, seed=1)
    for likelihood, target in ((Gaussian(0.5), y), (Bernoulli(), (y > 0).double()), (Poisson(), y.exp().floor())):
        likelihood.check(f, target)
        assert likelihood.log_prob(f, target).shape == (6,)
        torch.testing.assert_close(likelihood.nll(f, target), -likelihood.log_prob(f, target).mean())
        assert likelihood.output_fisher_factor(f).shape == (1, 6)
        assert likelihood.predictive(f.unsqueeze(0)).log_prob(target).shape == (6,)


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
def test_half_precision_outputs_are_widened(likelihood: Likelihood, width: int) -> None:
    f = outputs(6, width, dtype=torch.float32).bfloat16()
    y = likelihood.sample(f, [generator()])
    loss = likelihood.nll(f.requires_grad_(), y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, likelihood.nll(f.float(), y))
    loss.backward()
    assert f.grad is not None


@pytest.mark.parametrize(("likelihood", "width"), ALL, ids=IDS)
def test_config_round_trip(likelihood: Likelihood, width: int) -> None:
    config = json.loads(json.dumps(likelihood.config()))
    again = likelihoods.by_name(type(likelihood).__name__).from_config(config)
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()


def test_by_name_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'Cauchy'.*Gaussian.*Poisson"):
        likelihoods.by_name("Cauchy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_variance": 0.0}, "noise_variance"),
        ({"noise_variance": math.inf}, "noise_variance"),
        ({"noise_prior": (6.0, 0.0)}, "noise_prior"),
        ({"noise_prior": (6.0,)}, "noise_prior"),
        ({"noise_decay": 1.5}, "noise_decay"),
        ({"noise_variance": "a"}, "noise_variance must be positive .* got 'a'"),
        ({"noise_prior": 6.0}, "noise_prior must be .* got 6.0"),
        ({"noise_prior": "ab"}, "noise_prior must be"),
        ({"noise_decay": "a"}, "noise_decay must"),
    ],
)
def test_constructor_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gaussian(**arguments)  # type: ignore[arg-type]


ZERO = torch.zeros(4, 1)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (Gaussian(), ZERO, torch.zeros(4), r"unsqueeze\(-1\)"),
        (Gaussian(), torch.zeros(4), ZERO, r"squeeze\(-1\)"),
        (Bernoulli(), ZERO, torch.zeros(4), r"unsqueeze\(-1\)"),
        (Poisson(), ZERO, torch.zeros(4), r"unsqueeze\(-1\)"),
        (HeteroscedasticGaussian(), torch.zeros(4, 2), torch.zeros(4), r"unsqueeze\(-1\)"),
        (Gaussian(), ZERO, torch.zeros(3, 1), r"batches disagree.*\[4, 1\].*\[3, 1\]"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(5).long(), "batches disagree"),
        (Gaussian(), torch.zeros(4, 2), torch.zeros(4, 3), "last layer"),
        (Gaussian(), ZERO, ZERO.long(), r"int64.*target\.float\(\)"),
        (Bernoulli(), ZERO, ZERO.bool(), r"bool.*target\.float\(\)"),
        (Poisson(), ZERO, ZERO.bool(), "must be numbers"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4), r"float32.*target\.long\(\)"),
        (Gaussian(), ZERO.long(), ZERO, "output must be floating"),
        (Gaussian(), torch.zeros(0, 1), torch.zeros(0, 1), "empty"),
        (Gaussian(), torch.zeros(()), torch.zeros(()), r"\['batch', '...'\]"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4, 3).long(), "not one-hot"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4, 1).long(), "squeeze"),
        (Categorical(), torch.zeros(4), torch.zeros(4).long(), "dimension of classes"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), r"0\.\.2.*from 0 to 3"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([-100, 1]), "from -100"),
        (HeteroscedasticGaussian(), torch.zeros(4, 3), torch.zeros(4, 1), "twice as many units"),
        (Gaussian(), ZERO, ZERO + torch.nan, "4 of 4 targets are NaN"),
        (Gaussian(), ZERO, ZERO + torch.inf, "infinite"),
        (HeteroscedasticGaussian(), torch.zeros(4, 2), ZERO + torch.nan, "NaN"),
        (Bernoulli(), ZERO, ZERO - 1, r"\[0, 1\].*-1"),
        (Bernoulli(), ZERO, ZERO + torch.nan, r"\[0, 1\]"),
        (Poisson(), ZERO, ZERO - 1, "counts"),
        (Poisson(), ZERO, ZERO + 0.5, "fractional"),
        (Poisson(), ZERO, ZERO + torch.inf, "infinite"),
        (Gaussian(), ZERO, torch.zeros(4, 1, device="meta"), "target on meta"),
    ],
)
def test_check_refuses_with_advice(likelihood: Likelihood, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check(output, target)


def test_check_knows_replicas_and_accepts_what_is_right() -> None:
    likelihood = Gaussian()
    likelihood.bind((3,), "cpu", torch.float64)
    with pytest.raises(ValueError, match="replicas first"):
        likelihood.check(torch.zeros(4, 1), torch.zeros(4, 1))
    likelihood.check(torch.zeros(3, 4, 1), torch.zeros(3, 4, 1))
    Poisson().check(ZERO, ZERO.long() + 2)
    Categorical().check(torch.zeros(4, 5, 3), torch.full((4, 5), 2))
    bad = Categorical().invalid(torch.zeros(2, 3), torch.tensor([0, 3]))
    assert bad.ndim == 0
    assert bool(bad)


class Unusual(Gaussian):
    """Targets of at least 1; `log_prob` of every element, which is not what it should be."""

    nll = Likelihood.nll

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        return ~(target >= 1).all()

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -(output - target).square()


def test_impossible_values_of_ones_own_likelihood_are_not_called_nan() -> None:
    with pytest.raises(ValueError, match=r"impossible; they go from -1\.0 to -1\.0"):
        Unusual().check(ZERO, ZERO - 1)


def test_a_log_prob_of_the_wrong_shape_is_no_loss() -> None:
    with pytest.raises(
        ValueError, match=r"Unusual: log_prob must give one number for each example, \[4\].*gave \[4, 1\]"
    ):
        Unusual().nll(ZERO, ZERO + 1)
