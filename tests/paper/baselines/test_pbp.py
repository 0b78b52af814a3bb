"""PBP against brute force: moments by enumeration and integration, every update by a transcription in plain numbers."""

import itertools
import math
import shutil

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from noisygrad_paper.baselines.pbp import PBP, Linear, Rectifier, matched_gamma

DOUBLE = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def learner(replicas=1, sizes=(3, (4,), 1), first_seed=0, **options) -> PBP:
    generators = [seeded(first_seed + index) for index in range(replicas)]
    return PBP(*sizes, replicas=replicas, generators=generators, **options)


def regression(count, inputs=3, outputs=1, replicas=1, seed=1):
    x = torch.randn(replicas, count, inputs, dtype=DOUBLE, generator=seeded(seed))
    y = torch.sin(2.0 * x[..., :outputs]) + 0.3 * x[..., -1:]
    return x, (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)


def train(model, x, y, epochs=1, batch_size=1, step=None):
    for _ in range(epochs):
        for start in range(0, x.shape[1], batch_size):
            (step or model.step_)(x[:, start : start + batch_size], y[:, start : start + batch_size], {})
        model.end_epoch_()


def assert_same_state(first, second, tolerance):
    theirs = second.tensors()
    for name, tensor in first.tensors().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda text: name + text)  # noqa: B023


def assert_finite(model):
    assert all(tensor.isfinite().all() for tensor in model.tensors().values())
    assert all((variance > 0.0).all() for variance in model.variances)


# --- Moments ---


def test_a_linear_unit_has_the_moments_of_an_enumeration():
    """Two-point distributions have the same first two moments, so all outcomes can be added up."""
    weight = np.array([[0.3, 0.5], [-1.2, 0.2], [0.7, 1.1]])  # mean, variance
    inputs = np.array([[0.9, 0.4], [-0.5, 0.3], [0.2, 0.6]])
    outcomes = []
    for signs in itertools.product((-1.0, 1.0), repeat=6):
        w = weight[:, 0] + np.sqrt(weight[:, 1]) * np.array(signs[:3])
        a = inputs[:, 0] + np.sqrt(inputs[:, 1]) * np.array(signs[3:])
        outcomes.append(float(w @ a) / math.sqrt(3.0))
    linear = Linear(*(torch.tensor(weight[:, part]).reshape(1, 1, 3) for part in (0, 1)))
    mean, variance = linear.forward(*(torch.tensor(inputs[:, part]).reshape(1, 1, 3) for part in (0, 1)))
    assert mean.item() == pytest.approx(np.mean(outcomes), abs=1e-13)
    assert variance.item() == pytest.approx(np.var(outcomes), abs=1e-13)


@pytest.mark.parametrize("mean", [-3.0, -0.4, 0.0, 0.7, 5.0])
@pytest.mark.parametrize("variance", [0.05, 1.0, 7.0])
def test_a_rectified_gaussian_has_the_moments_of_an_integral(mean, variance):
    density = stats.norm(mean, math.sqrt(variance)).pdf
    top = max(0.0, mean) + 40.0 * math.sqrt(variance)

    def moment(order: int) -> float:
        inside = sorted({0.0, min(top, max(0.0, mean)), top})
        parts = [
            integrate.quad(lambda z: z**order * density(z), *ends, epsabs=1e-15) for ends in itertools.pairwise(inside)
        ]
        return sum(value for value, _ in parts)

    found = Rectifier().forward(torch.tensor(mean, dtype=DOUBLE), torch.tensor(variance, dtype=DOUBLE))
    assert found[0].item() == pytest.approx(moment(1), rel=1e-9, abs=1e-12)
    assert found[1].item() == pytest.approx(moment(2) - moment(1) ** 2, rel=1e-8, abs=1e-12)


def normal_cdf(z):
    return 0.5 * torch.erfc(-z / math.sqrt(2.0))  # torch.special.ndtr is 0 already at −9


def published_rectifier(mean, variance):
    """The form with γ = φ/Φ and its series below −30, as the authors' programs have it."""
    alpha = mean / variance.sqrt()
    cdf = normal_cdf(alpha)
    far = alpha < -30.0
    safe = torch.where(far, -1.0, alpha)
    ratio = torch.exp(-0.5 * safe**2) / math.sqrt(2.0 * math.pi) / normal_cdf(safe)
    gamma = torch.where(far, -alpha - 1.0 / alpha + 2.0 / alpha**3, ratio)
    kept = mean + variance.sqrt() * gamma
    output = cdf * kept
    return output, output * kept * normal_cdf(-alpha) + cdf * variance * (1.0 - gamma * (gamma + alpha))


def test_rectifier_equals_the_published_form_also_where_that_needs_its_series():
    alpha = torch.tensor([-1e3, -60.0, -38.0, -31.0, -29.0, -9.0, -2.0, -0.1, 0.1, 3.0, 9.0, 60.0, 1e3], dtype=DOUBLE)
    for scale in (1e-3, 1.0, 30.0):
        variance = torch.full_like(alpha, scale**2)
        found = Rectifier().forward(alpha * scale, variance)
        for ours, published in zip(found, published_rectifier(alpha * scale, variance), strict=True):
            torch.testing.assert_close(ours, published, rtol=1e-9, atol=1e-16 * scale)


def test_rectifier_is_finite_everywhere():
    mean = torch.tensor([-1e100, -1e6, -1.0, 0.0, 1.0, 1e6, 1e100], dtype=DOUBLE)[:, None]
    variance = torch.tensor([1e-98, 1e-12, 1.0, 1e12], dtype=DOUBLE)[None, :].expand(7, -1)
    rectifier = Rectifier()
    _, spread = rectifier.forward(mean, variance)
    gradients = rectifier.input_gradients(torch.ones_like(spread), torch.ones_like(spread))
    assert (spread >= 0.0).all()
    assert all(tensor.isfinite().all() for tensor in (spread, *gradients))


def test_one_hidden_layer_has_the_moments_of_sampled_networks():
    """With certain inputs and one hidden layer the propagation is exact."""
    model, count = learner(sizes=(2, (5,), 1)), 400_000
    for index, variance in enumerate(model.variances):
        variance.uniform_(0.1, 1.0, generator=seeded(index))
    x = torch.tensor([0.8, -1.3], dtype=DOUBLE)
    hidden, output = (
        mean + variance.sqrt() * torch.randn(count, *mean.shape[1:], dtype=DOUBLE, generator=seeded(index))
        for index, (mean, variance) in enumerate(zip(model.means, model.variances, strict=True))
    )
    extended = torch.cat([x, torch.ones(1, dtype=DOUBLE)])
    units = (hidden @ extended / math.sqrt(3.0)).clamp(min=0.0)
    values = (output[:, 0] * torch.nn.functional.pad(units, (0, 1), value=1.0)).sum(-1) / math.sqrt(6.0)
    mean, variance = model.moments(x.expand(1, 1, 2))
    assert mean.item() == pytest.approx(values.mean().item(), abs=5.0 * math.sqrt(values.var().item() / count))
    assert variance.item() == pytest.approx(values.var().item(), rel=0.02)


# --- The Gamma ---


@pytest.mark.parametrize(("shape", "rate", "residual"), [(6.0, 6.0, 0.3), (2.5, 0.7, 2.0), (60.0, 9.0, -0.5)])
def test_matched_gamma_has_the_tilted_distributions_moments(shape, rate, residual):
    def expectation(power: float, k: int = 0) -> float:
        prior = stats.gamma(shape + k, scale=1.0 / rate)

        def integrand(tau: float) -> float:
            return tau**power * math.sqrt(tau) * math.exp(-0.5 * tau * residual**2) * float(prior.pdf(tau))

        return float(integrate.quad(integrand, 0.0, prior.mean() + 60.0 * prior.std(), epsabs=0.0, limit=500)[0])

    z = [expectation(0.0, k) for k in range(3)]
    new_shape, new_rate = matched_gamma(shape, rate, z[1] / z[0], z[2] / z[1])
    assert new_shape / new_rate == pytest.approx(expectation(1.0) / z[0], rel=1e-7)
    assert new_shape * (new_shape + 1.0) / new_rate**2 == pytest.approx(expectation(2.0) / z[0], rel=1e-7)
    # Here the tilted distribution is itself a Gamma.
    assert (new_shape, new_rate) == pytest.approx((shape + 0.5, rate + 0.5 * residual**2), rel=1e-6)


# --- A transcription in plain numbers ---


class Naive:
    """The formulas one by one, weight by weight; only the derivatives are autograd's, of loops over the units."""

    def __init__(self, model: PBP, replica: int) -> None:
        self.mean = [layer[replica].tolist() for layer in model.means]
        self.variance = [layer[replica].tolist() for layer in model.variances]
        self.places = [
            (k, i, j) for k, layer in enumerate(self.mean) for i, row in enumerate(layer) for j in range(len(row))
        ]
        self.own = {place: [0.0, 5.0 / 6.0, 0.0, 0.0] for place in self.places}  # m̂, v̂⁻¹, â, b̂ (natural)
        self.noise = [6.0, 6.0]
        self.weight = [6.0, 6.0]

    def forward(self, means, variances, x):
        m, v = [float(value) for value in x], [0.0] * len(x)
        for k in range(len(means)):
            m, v = [*m, 1.0], [*v, 0.0]
            n = len(m)
            pre = []
            for row_m, row_v in zip(means[k], variances[k], strict=True):
                mean = sum(row_m[j] * m[j] for j in range(n)) / math.sqrt(n)
                spread = sum(row_v[j] * v[j] + row_m[j] ** 2 * v[j] + row_v[j] * m[j] ** 2 for j in range(n)) / n
                pre.append((mean, spread))
            if k < len(means) - 1:
                pre = [published_rectifier(mean, spread) for mean, spread in pre]
            m, v = [mean for mean, _ in pre], [spread for _, spread in pre]
        return m, v

    def step(self, x, y):
        leaves = [
            [[[torch.tensor(e, dtype=DOUBLE, requires_grad=True) for e in row] for row in layer] for layer in values]
            for values in (self.mean, self.variance)
        ]
        m, v = self.forward(*leaves, x)
        a, b = self.noise
        log_z = []
        for k in range(3):
            totals = [spread + b / (a - 1.0 + k) for spread in v]
            terms = [-0.5 * s.log() - (float(t) - c) ** 2 / (2.0 * s) for t, c, s in zip(y, m, totals, strict=True)]
            log_z.append(sum(terms))
        flat = [leaves[part][k][i][j] for part in (0, 1) for k, i, j in self.places]
        gradients = [g.item() for g in torch.autograd.grad(log_z[0], flat)]
        half = len(self.places)
        for (k, i, j), by_mean, by_variance in zip(self.places, gradients[:half], gradients[half:], strict=True):
            variance = self.variance[k][i][j]
            self.mean[k][i][j] += variance * by_mean
            self.variance[k][i][j] = variance - variance**2 * (by_mean**2 - 2.0 * by_variance)
        self.noise = self.gamma(a, b, [term.item() for term in log_z])

    @staticmethod
    def gamma(a, b, log_z):
        z, z1, z2 = (math.exp(term) for term in log_z)
        return [1.0 / (z2 * z / z1**2 * (a + 1.0) / a - 1.0), 1.0 / (z2 / z1 * (a + 1.0) / b - z1 / z * a / b)]

    def refresh(self):
        for k, i, j in self.places:
            mean, variance = self.mean[k][i][j], self.variance[k][i][j]
            own_mean, own_precision, own_a, own_b = self.own[k, i, j]
            precision_cav, natural_cav = 1.0 / variance - own_precision, mean / variance - own_mean
            v_cav, m_cav = 1.0 / precision_cav, natural_cav / precision_cav
            a_cav, b_cav = self.weight[0] - 1.0 - own_a + 1.0, self.weight[1] + own_b
            if not (0.0 < v_cav < 1e6 and b_cav > 0.0 and a_cav > 1.0):
                continue
            totals = [v_cav + b_cav / (a_cav - 1.0 + order) for order in range(3)]
            self.weight = self.gamma(a_cav, b_cav, [-0.5 * math.log(s) - m_cav**2 / (2.0 * s) for s in totals])
            by_mean = -m_cav / totals[0]
            by_variance = -0.5 / totals[0] + 0.5 * m_cav**2 / totals[0] ** 2
            new_mean = m_cav + v_cav * by_mean
            new_variance = v_cav - v_cav**2 * (by_mean**2 - 2.0 * by_variance)
            self.mean[k][i][j], self.variance[k][i][j] = new_mean, new_variance
            self.own[k, i, j] = [
                new_mean / new_variance - natural_cav,
                1.0 / new_variance - precision_cav,
                self.weight[0] - a_cav,
                b_cav - self.weight[1],
            ]

    def assert_equals(self, model: PBP, replica: int, tolerance: float) -> None:
        for ours, theirs in ((model.means, self.mean), (model.variances, self.variance)):
            for layer, expected in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(layer[replica].numpy(), expected, rtol=tolerance, atol=tolerance)
        own = np.array([self.own[place] for place in self.places])
        np.testing.assert_allclose(own[:, 0], 0.0, atol=tolerance)
        for tensor, expected in (
            (model.factor_precision, own[:, 1]),
            (model.factor_shape, own[:, 2]),
            (model.factor_rate, -own[:, 3]),
            (torch.stack([model.noise_shape, model.noise_rate], -1), self.noise),
            (torch.stack([model.weight_shape, model.weight_rate], -1), self.weight),
        ):
            np.testing.assert_allclose(tensor[replica].numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("hidden", "outputs"), [((4,), 1), ((3, 2), 1), ((4,), 2), ((), 1)], ids=str)
def test_training_equals_the_transcription(hidden, outputs):
    """Three passes of ten examples, each followed by the refinement of the prior."""
    x, y = regression(10, outputs=outputs, replicas=2)
    model = learner(replicas=2, sizes=(3, hidden, outputs))
    naive = [Naive(model, replica) for replica in range(2)]
    for _ in range(3):
        for index in range(10):
            model.step_(x[:, index : index + 1], y[:, index : index + 1], {})
            for replica in range(2):
                naive[replica].step(x[replica, index], y[replica, index])
        model.end_epoch_()
        for replica in range(2):
            naive[replica].refresh()
            naive[replica].assert_equals(model, replica, 1e-9)
    assert ((model.factor_shape != 0.0).sum(-1) > 1).all()


def test_gradients_are_autograds():
    """One step reveals them: (M' − M)/V and the change of V, against the network of the published form."""
    model = learner(sizes=(3, (6, 4), 1))
    means, variances = ([layer.clone().requires_grad_() for layer in part] for part in (model.means, model.variances))
    x, y = (part[:, :1] for part in regression(5))
    m, v = x, torch.zeros_like(x)
    for index, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        m, v = torch.nn.functional.pad(m, (0, 1), value=1.0), torch.nn.functional.pad(v, (0, 1))
        n = m.shape[-1]
        m, v = m @ mean.mT / n**0.5, (v @ variance.mT + v @ mean.square().mT + m.square() @ variance.mT) / n
        if index < 2:
            m, v = published_rectifier(m, v)
    total = v + 6.0 / 5.0
    log_z = (-0.5 * total.log() - (y - m).square() / (2.0 * total)).sum()
    gradients = torch.autograd.grad(log_z, [*means, *variances])
    model.step_(x, y, {})
    for index, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        by_mean, by_variance = gradients[index], gradients[3 + index]
        found = (model.means[index] - mean) / variance
        torch.testing.assert_close(found, by_mean, rtol=0.0, atol=1e-10)
        found = 0.5 * ((model.variances[index] - variance) / variance.square() + by_mean.square())
        torch.testing.assert_close(found, by_variance, rtol=0.0, atol=1e-10)


# --- The learner ---


def test_replicas_are_lone_runs():
    x, y = regression(12, replicas=3)
    together = learner(replicas=3)
    train(together, x, y, epochs=3)
    for index in range(3):
        alone = learner(first_seed=index)
        train(alone, x[index : index + 1], y[index : index + 1], epochs=3)
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(together.tensors()[name][index], tensor[0], rtol=1e-12, atol=1e-12)


def test_the_batch_size_changes_nothing():
    x, y = regression(12)
    one, four = learner(), learner()
    train(one, x, y, epochs=2)
    train(four, x, y, epochs=2, batch_size=4)
    assert_same_state(one, four, 1e-13)


def test_a_regression_improves_and_its_noise_is_learned():
    x, y = regression(100, inputs=2)
    model = learner(sizes=(2, (20,), 1))
    before = model.predict(x, 1, []).log_prob(y).mean().item()
    train(model, x, y, epochs=15)
    prediction = model.predict(x, 1, [])
    assert (prediction.mean - y).square().mean().sqrt().item() < 0.3
    assert prediction.log_prob(y).mean().item() > before + 0.5
    assert (model.noise_rate / (model.noise_shape - 1.0)).item() < 0.2


def test_prediction_is_one_gaussian_of_function_and_noise():
    model = learner(replicas=2)
    x, _ = regression(5, replicas=2)
    prediction = model.predict(x, 100, [])
    assert prediction.location.shape == (1, 2, 5, 1)
    torch.testing.assert_close(prediction.location[0], model.moments(x).mean)
    variance = model.moments(x).variance.sum(-1)
    assert variance.shape == (2, 5)
    torch.testing.assert_close(prediction.scale[0, ..., 0].square(), variance + 1.2)


def test_the_first_refinement_without_data_changes_nothing():
    model, untouched = learner(), learner()
    model.end_epoch_()
    assert_same_state(model, untouched, 1e-15)


def test_state_stays_where_it_is():
    model = learner()
    before = {name: tensor.data_ptr() for name, tensor in model.tensors().items()}
    train(model, *regression(3))
    assert {name: tensor.data_ptr() for name, tensor in model.tensors().items()} == before


def test_constant_and_duplicate_columns_leave_the_state_finite():
    x, y = regression(40, inputs=4)
    x[..., 1] = 0.0
    x[..., 2] = x[..., 0]
    y = y.round() * 1e-3  # hardly any noise, and repeated targets
    model = learner(sizes=(4, (6,), 1))
    train(model, x, y, epochs=10)
    assert_finite(model)


@pytest.mark.parametrize("target", [1e8, 1e200, math.nan])
def test_an_absurd_target_leaves_the_state_finite(target):
    model = learner()
    x, y = regression(6)
    y[0, 3] = target
    train(model, x, y, epochs=2)
    assert_finite(model)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_equals_eager():
    torch._dynamo.reset()
    x, y = regression(8, replicas=2)
    eager, compiled = learner(replicas=2), learner(replicas=2)
    train(eager, x, y, epochs=2)
    train(
        compiled,
        x,
        y,
        epochs=2,
        step=torch.compile(compiled.step_, fullgraph=True, dynamic=False, options=PBP.compile_options),
    )
    assert_same_state(eager, compiled, 1e-10)


@pytest.mark.parametrize("sizes", [(0, (4,), 1), (3, (0,), 1), (3, (4,), 0)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        learner(sizes=sizes)
    with pytest.raises(ValueError, match="one per replica"):
        PBP(3, (4,), replicas=2, generators=[seeded(0)])
