"""VMG: the layer against the dense Gaussian, every part of the bound against its definition, and the step."""

import math
import shutil

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import Gamma, MultivariateNormal, Normal, StudentT, kl_divergence

from noisygrad_paper.baselines.vmg import VMG, conditional, dropout_kl, gamma_kl, matrix_kl


def generators(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def make(seeds=(0, 1), inputs=3, hidden=(4,), outputs=1, **options):
    settings = {"num_data": 30, "y_std": 2.0, "pseudo_pairs": 2, "dtype": torch.float64, "max_noise": 0.3} | options
    return VMG(inputs, hidden, outputs, replicas=len(seeds), generators=generators(seeds), **settings)


def perturb_(learner, scale=0.5, seed=0):
    """Away from the start, where many parts are equal or tiny."""
    noise = torch.randn(learner.parameters.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    learner.parameters.add_(scale * noise.to(learner.dtype))
    learner.named(learner.parameters)["log_noise_std"].clamp_(-3.0, -0.7)
    return learner


def batch(learner, size=5, seed=0):
    """x, y and noise, replica by replica from its own generator."""
    parts = []
    for generator in generators(range(seed, seed + learner.replicas)):
        widths = (learner.widths[0], learner.widths[-1])
        x, y = (torch.randn(size, width, generator=generator, dtype=learner.dtype) for width in widths)
        parts.append((x, y, torch.randn(learner.noise_shapes(size)["normal"], generator=generator, dtype=x.dtype)))
    x, y, normal = (torch.stack(part) for part in zip(*parts, strict=True))
    return x, y, {"normal": normal}


def train_(learner, x, y, *, epochs, batch_size, seeds, step=None):
    """What the engine does: each replica's order and noise from its own generator."""
    sources = generators(seeds)
    rows = torch.arange(learner.replicas)[:, None]
    for _ in range(epochs):
        order = torch.stack([torch.randperm(x.shape[1], generator=source) for source in sources])
        for chosen in order.split(batch_size, dim=1):
            shape = learner.noise_shapes(chosen.shape[1])["normal"]
            normal = torch.stack([torch.randn(shape, generator=source, dtype=x.dtype) for source in sources])
            (step or learner.step_)(x[rows, chosen], y[rows, chosen], {"normal": normal})


def dense_conditional(x, mean, row_variance, col_variance, pseudo_inputs, pseudo_outputs):
    """Mean and covariance of vec(xW) given x̃W + noise = ỹ, from the joint Gaussian of both."""
    identity = torch.eye(mean.shape[1], dtype=x.dtype)
    weights = torch.kron(row_variance.diag(), col_variance.diag())
    to_x, to_pseudo = torch.kron(x, identity), torch.kron(pseudo_inputs, identity)
    observed = to_pseudo @ weights @ to_pseudo.T
    observed += 1e-6 * torch.kron(torch.eye(len(pseudo_inputs), dtype=x.dtype), col_variance.diag())
    gain = torch.linalg.solve(observed, to_pseudo @ weights @ to_x.T).T
    location = (x @ mean).flatten() + gain @ (pseudo_outputs - pseudo_inputs @ mean).flatten()
    return location.reshape(len(x), -1), to_x @ weights @ to_x.T - gain @ to_pseudo @ weights @ to_x.T


@pytest.mark.parametrize("pairs", [1, 3])
def test_conditional_equals_the_dense_gaussian(pairs):
    torch.manual_seed(0)
    x, mean, pseudo_x, pseudo_y = (torch.randn(*s).double() for s in ((5, 4), (4, 2), (pairs, 4), (pairs, 2)))
    row, col = torch.rand(4).double() + 0.2, torch.rand(2).double() + 0.2
    location, remaining = conditional(x, mean, row, pseudo_x, pseudo_y)
    expected, covariance = dense_conditional(x, mean, row, col, pseudo_x, pseudo_y)
    torch.testing.assert_close(location, expected, rtol=1e-10, atol=1e-10)
    variance = (remaining[:, None] * col).flatten()
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=1e-10, atol=1e-10)


def test_outputs_at_the_pseudo_inputs_are_the_pseudo_outputs():
    torch.manual_seed(0)
    pseudo_x, pseudo_y, mean = torch.randn(3, 4).double(), torch.randn(3, 2).double(), torch.randn(4, 2).double()
    location, remaining = conditional(pseudo_x, mean, torch.ones(4).double(), pseudo_x, pseudo_y)
    torch.testing.assert_close(location, pseudo_y, rtol=0, atol=1e-4)
    assert remaining.max() < 2e-6


def test_forward_equals_a_loop_over_dense_layers():
    learner = perturb_(make(hidden=(4, 3), outputs=2))
    x, _, noise = batch(learner)
    outputs = learner.forward(learner.parameters, x, noise["normal"])
    named = learner.named(learner.parameters)
    for r in range(learner.replicas):
        hidden, rest = x[r], noise["normal"][r]
        for i, (rows, columns) in enumerate(((4, 4), (5, 3), (4, 2))):
            draws = []
            for shape in ((2, rows), (2, columns), (5, columns)):
                draws.append(rest[: math.prod(shape)].reshape(shape))
                rest = rest[math.prod(shape) :]
            std = named["log_noise_std"][r].exp()
            pseudo_x = named[f"pseudo_inputs.{i}"][r] * (1 + std[2 * i] * draws[0]) / rows**0.5
            pseudo_y = named[f"pseudo_outputs.{i}"][r] * (1 + std[2 * i + 1] * draws[1])
            extended = torch.cat([hidden, torch.ones(5, 1)], 1) / rows**0.5
            row, col = (named[f"log_{part}_std.{i}"][r].exp().square() for part in ("row", "col"))
            location, covariance = dense_conditional(extended, named[f"mean.{i}"][r], row, col, pseudo_x, pseudo_y)
            hidden = location + covariance.diagonal().sqrt().reshape(location.shape) * draws[2]
            hidden = hidden.clamp(min=0) if i < 2 else hidden
        assert rest.numel() == 0
        torch.testing.assert_close(outputs[r], hidden, rtol=1e-8, atol=1e-9)


def test_matrix_kl_equals_that_of_the_dense_gaussian_averaged_over_the_precision():
    torch.manual_seed(0)
    mean, log_row, log_col = torch.randn(3, 2).double(), 0.3 * torch.randn(3).double(), 0.3 * torch.randn(2).double()
    covariance = torch.kron((2 * log_row).exp().diag(), (2 * log_col).exp().diag())
    posterior = MultivariateNormal(mean.flatten(), covariance)

    def dense(precision):
        prior = MultivariateNormal(torch.zeros(6).double(), torch.eye(6).double() / precision)
        return float(kl_divergence(posterior, prior))

    assert float(matrix_kl(mean, log_row, log_col, 1.7, math.log(1.7))) == pytest.approx(dense(1.7), rel=1e-10)
    shape, rate = torch.tensor(3.0).double(), torch.tensor(2.0).double()
    averaged = matrix_kl(mean, log_row, log_col, shape / rate, torch.digamma(shape) - rate.log())
    density = stats.gamma(3.0, scale=0.5).pdf
    expected = integrate.quad(lambda precision: density(precision) * dense(precision), 1e-9, 30, limit=200)[0]
    assert float(averaged) == pytest.approx(expected, rel=1e-6)


def test_gamma_kl_equals_that_of_torch():
    values = torch.tensor([[2.0, 3.0, 1.0, 0.5], [300.0, 7.0, 6.0, 6.0], [6.0, 6.0, 6.0, 6.0]]).double().unbind(-1)
    expected = kl_divergence(Gamma(values[0], values[1]), Gamma(values[2], values[3]))
    torch.testing.assert_close(gamma_kl(*values), expected, rtol=1e-10, atol=1e-12)


def test_dropout_kl_follows_the_integral_it_approximates():
    nodes, weights = np.polynomial.hermite_e.hermegauss(201)

    def exact(alpha):
        """KL up to a constant: E log |1 + σε| − ½ log α."""
        return (weights * np.log(np.abs(1 + alpha**0.5 * nodes))).sum() / weights.sum() - 0.5 * math.log(alpha)

    alphas = torch.tensor([0.001, 0.01, 0.1]).double()
    found = dropout_kl(0.5 * alphas.log(), max_noise=0.005)
    expected = [exact(float(alpha)) - exact(0.005) for alpha in alphas]
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert float(dropout_kl(torch.tensor(0.5 * math.log(0.005), dtype=torch.float64), 0.005)) == pytest.approx(0)


def test_kl_is_the_sum_of_its_parts():
    learner = perturb_(make(hidden=(4,), outputs=2))
    named = learner.named(learner.parameters)
    for r in range(learner.replicas):
        shapes, rates = named["log_shape"][r].exp(), named["log_rate"][r].exp()
        priors = [(1.0, 0.5)] * 4 + [(6.0, 6.0)] * 2
        total = sum(
            kl_divergence(Gamma(shapes[k], rates[k]), Gamma(*torch.tensor(prior).double()))
            for k, prior in enumerate(priors)
        )
        for i, (rows, columns) in enumerate(((4, 4), (5, 2))):
            mean, row, col = (named[f"{part}.{i}"][r] for part in ("mean", "log_row_std", "log_col_std"))
            precision, log_precision = 1.0, 0.0
            for k in (2 * i, 2 * i + 1):
                precision *= float(shapes[k] / rates[k])
                log_precision += float(torch.digamma(shapes[k]) - rates[k].log())
            # The KL at τ = 1 moved to E[τ] and E[log τ] element by element.
            variances = (2 * (row[:, None] + col)).exp()
            total += kl_divergence(Normal(mean, variances.sqrt()), Normal(0.0, 1.0)).sum()
            total += 0.5 * (precision - 1) * (mean.square() + variances).sum() - 0.5 * rows * columns * log_precision
            for log_std, shape in zip(named["log_noise_std"][r, 2 * i :], ((2, rows), (2, columns)), strict=False):
                total += dropout_kl(log_std.expand(shape), 0.3).sum()
        assert float(learner.kl(learner.parameters)[r]) == pytest.approx(float(total), rel=1e-10)


def test_loss_is_on_the_scale_of_the_unscaled_targets():
    learner = perturb_(make(outputs=2, y_std=torch.tensor([[2.0, 3.0], [0.5, 7.0]]), kl_weight=0.7))
    x, y, noise = batch(learner)
    outputs = learner.forward(learner.parameters, x, noise["normal"])
    named = learner.named(learner.parameters)
    loss = learner.loss(learner.parameters, x, y, noise["normal"])
    for r, scales in enumerate(((2.0, 3.0), (0.5, 7.0))):
        nll = 0.0
        for d, scale in enumerate(scales):
            shape, rate = (float(named[part][r, -2 + d].exp()) for part in ("log_shape", "log_rate"))
            noise_posterior = stats.gamma(shape, scale=1 / rate)
            target, predicted = (10.0 + scale * part[r, :, d].numpy() for part in (y, outputs))
            nll -= noise_posterior.expect(
                lambda tau, t=target, f=predicted: stats.norm(f, tau**-0.5).logpdf(t).mean(), limit=200
            )
        expected = nll + 0.7 / 30 * float(learner.kl(learner.parameters)[r])
        assert float(loss[r]) == pytest.approx(expected, rel=1e-6)


def test_gradient_equals_finite_differences():
    learner = perturb_(make(seeds=(0,), inputs=2, hidden=(3,)))
    x, y, noise = batch(learner)

    def loss(parameters):
        return learner.loss(parameters, x, y, noise["normal"]).sum()

    gradient = torch.func.grad(loss)(learner.parameters)[0]
    shifts = 1e-6 * torch.eye(len(gradient), dtype=torch.float64)[:, None]
    differences = torch.stack([loss(learner.parameters + s) - loss(learner.parameters - s) for s in shifts]) / 2e-6
    torch.testing.assert_close(gradient, differences, rtol=1e-5, atol=1e-6)


def test_steps_equal_torch_adam_with_an_average():
    learner = perturb_(make(lr=0.05))
    learner.anneal.fill_(0.5)
    parameter = learner.parameters.clone().requires_grad_()
    adam = torch.optim.Adam([parameter], lr=0.025)
    kept, weight = torch.zeros_like(learner.parameters), 0.0
    for k in range(30):
        x, y, noise = batch(learner, seed=10 * k)
        adam.zero_grad()
        learner.loss(parameter, x, y, noise["normal"]).sum().backward()
        adam.step()
        with torch.no_grad():
            learner.named(parameter)["log_noise_std"].clamp_(-4.0, 0.5 * math.log(0.3))
        kept, weight = 0.999 * kept + 0.001 * parameter.detach(), 0.999 * weight + 0.001
        learner.step_(x, y, noise)
    torch.testing.assert_close(learner.parameters, parameter.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(learner.average, kept / weight, rtol=1e-9, atol=1e-9)
    assert (learner.named(learner.parameters)["log_noise_std"] == 0.5 * math.log(0.3)).any()


def wave(seeds, rows=40):
    """y = sin 2x₁ + ½x₂ and a little noise, standardised, for each replica."""
    data = []
    for generator in generators(seeds):
        x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] + 0.1 * torch.randn(rows, 1, generator=generator)
        data.append((x, (y - y.mean()) / y.std()))
    return tuple(torch.stack(part) for part in zip(*data, strict=True))


def test_replicas_equal_lone_trainings():
    seeds, scales = (3, 4, 5), torch.tensor([1.0, 2.0, 5.0])
    x, y = wave(seeds)
    together = make(seeds, y_std=scales, lr=0.01)
    train_(together, x, y, epochs=5, batch_size=4, seeds=seeds)
    for r, seed in enumerate(seeds):
        lone = make((seed,), y_std=scales[r : r + 1], lr=0.01)
        train_(lone, x[r : r + 1], y[r : r + 1], epochs=5, batch_size=4, seeds=(seed,))
        for name, tensor in lone.tensors().items():
            torch.testing.assert_close(together.tensors()[name][r], tensor[0], rtol=1e-10, atol=1e-10)
        predictions = [
            learner.predict(data, 7, generators(use))
            for learner, data, use in ((together, x, seeds), (lone, x[r : r + 1], (seed,)))
        ]
        torch.testing.assert_close(predictions[0].replica(r).location, predictions[1].replica(0).location)
        torch.testing.assert_close(predictions[0].replica(r).scale, predictions[1].replica(0).scale)


def test_state_stays_in_place():
    learner = make()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in learner.tensors().items()}
    learner.step_(*batch(learner))
    for name, tensor in learner.tensors().items():
        assert tensor.data_ptr() == before[name][0]
        assert not torch.equal(tensor, before[name][1])


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_step_equals_eager():
    eager, compiled = make(hidden=(2,)), make(hidden=(2,))
    step = torch.compile(compiled.step_, fullgraph=True, dynamic=False)
    for k in range(3):
        x, y, noise = batch(eager, seed=k)
        eager.step_(x, y, noise)
        step(x, y, noise)
    for name, tensor in eager.tensors().items():
        torch.testing.assert_close(compiled.tensors()[name], tensor, rtol=1e-8, atol=1e-8)


def test_training_improves_the_predictive():
    seeds = (0, 1)
    x, y = wave(seeds)
    learner = make(seeds, hidden=(10,), num_data=40, y_std=1.0, lr=0.01, max_noise=0.005, noise_prior=(1.0, 0.1))
    before = learner.predict(x, 20, generators(seeds))
    train_(learner, x, y, epochs=60, batch_size=10, seeds=seeds)
    after = learner.predict(x, 20, generators(seeds))
    assert (after.mean - y).square().mean() < 0.5 * (before.mean - y).square().mean()
    assert (after.log_prob(y).mean(-1) > before.log_prob(y).mean(-1) + 0.3).all()


def test_prediction_rescales_to_the_unscaled_targets():
    learner = perturb_(make(y_std=torch.tensor([2.0, 5.0])), scale=0.1)
    x, y, noise = batch(learner)
    learner.step_(x, y, noise)
    prediction = learner.predict(x, 3, generators((5, 6)))
    scales = torch.tensor([2.0, 5.0]).double()[:, None, None]
    found = prediction.rescaled(10.0, scales).log_prob(10.0 + scales * y)
    named = learner.named(learner.average)
    shape, rate = (named[part][:, -1].exp()[:, None, None] for part in ("log_shape", "log_rate"))
    each = StudentT(2 * shape, 10.0 + scales * prediction.location, (rate / shape).sqrt())
    expected = torch.logsumexp(each.log_prob(10.0 + scales * y).squeeze(-1), 0) - math.log(3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_and_repeated_columns_stay_finite(dtype):
    x, y = wave((0, 1))
    x = torch.cat([torch.zeros_like(x[..., :1]), x[..., :1], x[..., :1]], -1).to(dtype)
    learner = make(hidden=(4,), pseudo_pairs=6, y_std=0.01, lr=0.05, dtype=dtype, num_data=40)
    train_(learner, x, y.to(dtype), epochs=20, batch_size=8, seeds=(0, 1))
    assert all(tensor.isfinite().all() for tensor in learner.tensors().values())
    assert learner.predict(x, 5, generators((0, 1))).log_prob(y.to(dtype)).isfinite().all()


def test_conditional_in_float32_follows_float64():
    torch.manual_seed(0)
    row = torch.rand(4) + 0.2
    x, mean, pseudo_y, direction = (torch.randn(*shape) for shape in ((5, 4), (4, 2), (6, 2), (5, 2)))
    pseudo_x = torch.randn(6, 4)  # six pairs in four dimensions: only the jitter keeps the matrix from being singular

    def work(dtype):
        parts = [part.to(dtype).requires_grad_() for part in (x, mean, row, pseudo_x, pseudo_y)]
        location, remaining = conditional(*parts)
        loss = (location * direction.to(dtype)).sum() + remaining.sqrt().sum()
        return [location, remaining.sqrt(), *torch.autograd.grad(loss, parts)]

    for narrow, wide in zip(work(torch.float32), work(torch.float64), strict=True):
        assert (narrow - wide).abs().max() < 1e-3 * wide.abs().max() + 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0}, "num_data"),
        ({"hidden": (4, 0)}, r"hidden\[1\]"),
        ({"pseudo_pairs": 0}, "pseudo_pairs"),
        ({"lr": 0.0}, "lr"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"max_noise": 1e-9}, "max_noise"),
        ({"noise_prior": (6.0, 0.0)}, "noise_prior"),
        ({"y_std": torch.ones(3)}, "y_std"),
        ({"y_std": 0.0}, "y_std"),
        ({"generators": []}, "generators"),
    ],
)
def test_bad_arguments_are_named(options, message):
    settings = {"hidden": (4,), "num_data": 30, "y_std": 1.0, "replicas": 2, "generators": generators((0, 1))} | options
    with pytest.raises(ValueError, match=message):
        VMG(3, settings.pop("hidden"), **settings)
